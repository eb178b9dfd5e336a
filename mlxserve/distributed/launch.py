"""Starts the processes that compute one model together, and ends them together."""

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from mlxserve.distributed import backends
from mlxserve.distributed.addresses import free_ports
from mlxserve.distributed.hosts import Roster
from mlxserve.distributed.remote import Orders, Report
from mlxserve.distributed.ssh import (
    Fault,
    Remote,
    UnreachableError,
    end,
    faults_of,
    pass_on,
    reached,
)
from mlxserve.errors import RequestError

# Of this process's variables, those that hold for other machines too.
SHARED = ("MLXSERVE_PEER_TIMEOUT_S", "MLXSERVE_KERNELS", "MLXSERVE_DEBUG", "HF_HUB_OFFLINE")
END_S = 3.0  # for the others, once one has ended
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The processes that compute one model together.

    backend: of `mx.distributed`; tensor: how many share each layer; python: of other machines.
    """

    roster: Roster
    backend: str
    tensor: int
    python: str = sys.executable


class Ended(NamedTuple):
    """How a group ended. code: rank 0's, or that of the first to fail.

    ready: whether it had begun to serve; told: whether a signal has ended it.
    """

    code: int
    ready: bool
    told: bool


def launch(
    group: Group,
    command: Sequence[str],
    *,
    at: socket.socket | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> Ended:
    """Run a command of `mlxserve` as a group of ranks, until all have ended.

    at: where rank 0 serves; on_ready: called when it does. Rank 0 has this process's terminal; what
    the others print goes to stderr, line by line, with their number. When one ends, so do all.
    Raises RequestError for a host that can't take part, and UnreachableError for one that doesn't
    answer, before any rank is started.
    """
    came, ready = os.pipe()
    passed = [ready] if at is None else [ready, at.fileno()]
    own = {"MLXSERVE_READY_FD": str(ready)}
    own |= {} if at is None else {"MLXSERVE_LISTEN_FD": str(at.fileno())}
    with (
        open(came, "rb", buffering=0) as told,
        open(ready, "wb", buffering=0) as tells,
        started(group, "mlxserve", command, env=own, pass_fds=passed) as processes,
    ):
        tells.close()
        return _Watch(processes, told, on_ready).wait()


@contextlib.contextmanager
def started(
    group: Group,
    module: str,
    args: Sequence[str],
    *,
    env: Mapping[str, str] = {},
    pass_fds: Sequence[int] = (),
    stdout: int | None = None,
) -> Iterator[list[subprocess.Popen]]:
    """Run a module of Python as all ranks of a group; at the end they are killed.

    env, pass_fds, stdout: rank 0's own. Raises as `launch` does.
    """
    hosts = group.roster.hosts
    with reached(hosts, group.python) as answers, tempfile.TemporaryDirectory() as folder:
        remotes = {remote.rank: remote for remote, _ in answers}
        shared, (name, text) = _settings(group, _sound(answers))
        file = Path(folder) / "hosts.json"
        file.write_text(text)
        processes: list[subprocess.Popen] = []
        alive, held = os.pipe()  # whose other end is closed when this process is gone
        try:
            for rank in range(len(hosts)):
                own = shared | {"MLX_RANK": str(rank), "MLXSERVE_RANK": str(rank)}
                if remote := remotes.get(rank):
                    remote.send(Orders(module, list(args), own, {name: text}))
                    processes.append(remote.process)
                    continue
                own = {**os.environ, **own, name: str(file), "MLXSERVE_LAUNCHER_FD": str(alive)}
                if rank:
                    processes.append(_follower(rank, module, args, own, pass_fds=[alive]))
                else:
                    fds = [alive, *pass_fds]
                    processes.append(
                        _start(module, args, {**own, **env}, pass_fds=fds, stdout=stdout)
                    )
            yield processes
        finally:
            end(processes)
            os.close(alive)
            os.close(held)


def _sound(answers: Sequence[tuple[Remote, Report | Fault]]) -> dict[int, Report]:
    """What the hosts have, by rank. Raises RequestError where one can't take part."""
    silent = [answer for _, answer in answers if isinstance(answer, Fault)]
    if silent:
        raise UnreachableError(silent)
    reports = {remote.rank: answer for remote, answer in answers if isinstance(answer, Report)}
    hosts = {remote.rank: remote.host.name for remote, _ in answers}
    for rank, report in reports.items():
        if faults := faults_of(hosts[rank], report):
            raise RequestError("; ".join(map(str, faults)))
    return reports


def _settings(
    group: Group, reports: Mapping[int, Report]
) -> tuple[dict[str, str], tuple[str, str]]:
    """Variables of all ranks; and one more that names a file, with what is in it."""
    roster = group.roster
    ip, count = roster.control_ip(), len(roster.hosts)
    here = [own for host in roster.hosts if host.here for own in host.ips]
    control, coordinator, *found = free_ports([ip, ip, *here])
    own = iter(found)
    ports = [
        reports[rank].ports if rank in reports else [next(own) for _ in host.ips]
        for rank, host in enumerate(roster.hosts)
    ]
    env = {name: os.environ[name] for name in SHARED if name in os.environ}
    env |= {
        **roster.env,
        "MLXSERVE_RANKS": str(count),
        "MLXSERVE_TENSOR": str(group.tensor),
        "MLXSERVE_BACKEND": group.backend,
        "MLXSERVE_CONTROL": f"{ip}:{control}",
        "MLXSERVE_CONTROL_KEY": secrets.token_hex(16),
    }
    if hasattr(os, "sched_getaffinity") and not roster.apart:  # ranks would fight over the cores
        threads = max(1, len(os.sched_getaffinity(0)) // count)
        env["MLXSERVE_CPU_THREADS"] = os.environ.get("MLXSERVE_CPU_THREADS", str(threads))
    if group.backend != "jaccl":
        return env, ("MLX_HOSTFILE", json.dumps(backends.links(roster, ports)))
    env["MLX_JACCL_COORDINATOR"] = f"{ip}:{coordinator}"
    if not backends.is_mesh(roster):
        env["MLX_JACCL_RING"] = "1"
    return env, ("MLX_IBV_DEVICES", json.dumps([host.rdma for host in roster.hosts]))


def _start(
    module: str, args: Sequence[str], env: Mapping[str, str], **how: Any
) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", module, *args], env=env, **how)


def _follower(
    rank: int, module: str, args: Sequence[str], env: Mapping[str, str], **how: Any
) -> subprocess.Popen:
    process = _start(
        module,
        args,
        env,
        **how,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is rank 0's, which ends the others once it has ended
    )
    threading.Thread(target=pass_on, args=(rank, process.stdout), daemon=True).start()
    return process


class _Watch:
    """Waits for processes, and takes signals meanwhile. came: a pipe that rank 0 writes to."""

    def __init__(
        self, processes: Sequence[subprocess.Popen], came: IO[bytes], on_ready: Callable[[], None]
    ) -> None:
        self._processes = processes
        self._came: list[IO[bytes]] = [came]
        self._on_ready = on_ready
        self._ready = self._told = False

    def wait(self) -> Ended:
        """Until all have ended, or some time after the first has."""
        numbers = signal.SIGINT, signal.SIGTERM
        before = {number: signal.signal(number, self._take) for number in numbers}
        end_s, failed = None, 0
        try:
            while None in (codes := [process.poll() for process in self._processes]):
                failed = failed or next((code for code in codes if code), 0)
                if end_s is None and any(code is not None for code in codes):
                    end_s = time.monotonic() + END_S
                if end_s is not None and time.monotonic() > end_s:
                    break
                self._hear()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        code = codes[0] or failed or next((code for code in codes if code), 0)
        return Ended(128 - code if code < 0 else code, self._ready, self._told)

    def _take(self, number: int, frame: object) -> None:
        self._told = True
        if number != signal.SIGINT:  # a terminal sends that to rank 0 itself
            self._processes[0].send_signal(number)

    def _hear(self) -> None:
        """A while, or until rank 0 says that it serves."""
        for pipe in select.select(self._came, [], [], POLL_S)[0]:
            self._came = []  # there is one byte in it, or the end
            if pipe.read(1):
                self._ready = True
                self._on_ready()


def waits(first_s: float = 1.0, most_s: float = 60.0) -> Iterator[float]:
    """Seconds before each new start, twice as many each time."""
    wait_s = first_s
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, most_s)
