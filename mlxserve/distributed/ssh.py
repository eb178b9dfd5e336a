"""The launcher's end of a process on another host. See `remote`."""

import contextlib
import os
import queue
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple

import msgspec

from mlxserve.distributed.hosts import Host
from mlxserve.distributed.remote import MARK, Inquiry, Orders, Report
from mlxserve.errors import RequestError
from mlxserve.opening import versions

CONNECT_S = 10
ANSWER_S = 60.0  # for all hosts together: Python has to import MLX, perhaps from a cold disk
SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
# What ssh, a shell or Python says, and what mends it; {host}, {name} of the host, {python}.
_FIXES = (
    ("Permission denied", "let this machine in without a password: `ssh-copy-id {host}`"),
    ("Host key verification failed", "run `ssh {host}` once, and accept its key"),
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "see whether it is that host: `ssh {host}`"),
    ("not resolve hostname", "correct the name"),
    ("Connection refused", "turn sshd on there: System Settings > Sharing > Remote Login on a Mac"),
    ("timed out", "is it on, and in this network?"),
    ("No route to host", "is it on, and in this network?"),
    ("unreachable", "is it on, and in this network?"),
    ("No module named", "install mlxserve, as it is here, for {python} there"),
    ("not found", "install Python and mlxserve there, or say with --python where it is"),
    ("No such file", "install Python and mlxserve there, or say with --python where it is"),
)
_ASK = "see what `ssh {host} {python} -m mlxserve.distributed.remote` says"


class Fault(NamedTuple):
    """Why a host can't take part, and what mends it."""

    host: str
    text: str
    fix: str

    def __str__(self) -> str:
        return f"{self.host}: {self.text}; {self.fix}"


class UnreachableError(RequestError):
    """Hosts that don't answer. They may later."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("; ".join(map(str, faults)))


class Remote:
    """A process of ours on a host, over ssh, which `process` is.

    What it prints goes to stderr, line by line, with its rank. It ends when `process` does.
    """

    def __init__(self, rank: int, host: Host, python: str) -> None:
        self.rank = rank
        self.host = host
        self._python = python
        self._said: list[str] = []  # before its report
        self._reports: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        command = shlex.join([python, "-m", "mlxserve.distributed.remote"])
        try:
            self.process = subprocess.Popen(
                [*SSH, "--", host.name, command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is rank 0's; the others end once it has ended
            )
        except FileNotFoundError:
            raise RequestError("there is no ssh here; install OpenSSH's client") from None
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: Inquiry | Orders) -> None:
        """Nothing where it is gone: the end of `process` tells of that."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(msgspec.json.encode(message) + b"\n")
            self.process.stdin.flush()

    def report(self, until_s: float) -> Report | Fault:
        """What it answers to an inquiry, or why it doesn't, until a time of `time.monotonic`."""
        try:
            report = self._reports.get(timeout=max(0.0, until_s - time.monotonic()))
        except queue.Empty:
            return self._fault(f"no answer within {ANSWER_S:g} s")
        if report is not None:
            return report
        return self._fault(self._said[-1] if self._said else f"ssh ended: {self.process.wait()}")

    def _fault(self, text: str) -> Fault:
        """With what mends it, where a line of what was said shows that."""
        fix = _ASK
        for words, mends in _FIXES:
            if telling := [line for line in self._said if words in line]:
                text, fix = telling[0], mends
                break
        return Fault(self.host.name, text, fix.format(host=self.host.name, python=self._python))

    def _read(self) -> None:
        lines = self.process.stdout
        assert lines is not None
        for line in lines:
            text = _text(line)
            if text.startswith(MARK):
                self._reports.put(_report(text.removeprefix(MARK)))
                pass_on(self.rank, lines)
            elif text:
                self._said.append(text)
        self._reports.put(None)


def pass_on(rank: int, lines: IO[bytes]) -> None:
    """To stderr, with the number of the rank that prints them."""
    for line in lines:
        print(f"[rank {rank}] {_text(line)}", file=sys.stderr, flush=True)


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r\n")


def _report(text: str) -> Report:
    try:
        return msgspec.json.decode(text, type=Report)
    except msgspec.DecodeError as error:
        return Report(problem=f"its mlxserve is another: {error}", fix="make them the same")


def faults_of(host: str, report: Report) -> list[Fault]:
    """What is wrong with a host that answers, beside this machine's."""
    if report.problem:
        return [Fault(host, report.problem, report.fix)]
    return [
        Fault(host, f"{what} is {report.versions.get(what)}, and {own} here", "make them the same")
        for what, own in versions().items()
        if report.versions.get(what) != own
    ]


@contextlib.contextmanager
def reached(
    hosts: Sequence[Host], python: str, model: str = ""
) -> Iterator[list[tuple[Remote, Report | Fault]]]:
    """Those of the hosts that aren't this machine, asked all at once; they are ended at the end."""
    remotes: list[Remote] = []
    try:
        for rank, host in enumerate(hosts):
            if not host.here:
                remotes.append(Remote(rank, host, python))
                remotes[-1].send(Inquiry(list(host.ips), os.getcwd(), model))
        until_s = time.monotonic() + ANSWER_S
        yield [(remote, remote.report(until_s)) for remote in remotes]
    finally:
        end([remote.process for remote in remotes])


def end(processes: Sequence[subprocess.Popen]) -> None:
    """Kill those that are left, and wait for them."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
