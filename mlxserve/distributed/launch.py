"""Starts the processes that compute one model together, and ends them together."""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from mlxserve.errors import RequestError

MAX_RANKS = 16  # on one machine
END_S = 3.0  # for the others, once one has ended
POLL_S = 0.05
LOCAL = "127.0.0.1"


class Ended(NamedTuple):
    """How a group ended. code: rank 0's, or that of the first to fail.

    ready: whether it had begun to serve; told: whether a signal has ended it.
    """

    code: int
    ready: bool
    told: bool


def launch_here(
    count: int,
    command: Sequence[str],
    *,
    at: socket.socket | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> Ended:
    """Run a command of `mlxserve` as `count` ranks on this machine, until all have ended.

    at: where rank 0 serves; on_ready: called, on another thread, when it does. Rank 0 has this
    process's terminal; what the others print goes to stderr, line by line, with their number. When
    one ends, so do all.
    """
    if not 1 <= count <= MAX_RANKS:
        raise RequestError(f"{count} ranks; give a number from 1 to {MAX_RANKS}")
    with tempfile.TemporaryDirectory() as folder:
        processes: list[subprocess.Popen] = []
        env = _environment(count, Path(folder))
        came, ready = os.pipe()
        try:
            passed = [ready] if at is None else [ready, at.fileno()]
            own = {"MLXSERVE_READY_FD": str(ready)}
            own |= {} if at is None else {"MLXSERVE_LISTEN_FD": str(at.fileno())}
            processes.append(_start(0, command, env | own, pass_fds=passed))
            os.close(ready)
            for rank in range(1, count):
                processes.append(_follower(rank, command, env))
            return _Watch(processes, came, on_ready).wait()
        finally:
            _end(processes)


def _environment(count: int, folder: Path) -> dict[str, str]:
    control, *ports = free_ports(count + 1)
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"{LOCAL}:{port}"] for port in ports]))
    env = os.environ | {
        "MLX_HOSTFILE": str(hosts),
        "MLXSERVE_RANKS": str(count),
        "MLXSERVE_CONTROL": f"{LOCAL}:{control}",
        "MLXSERVE_CONTROL_KEY": secrets.token_hex(16),
    }
    if hasattr(os, "sched_getaffinity"):  # ranks would fight over the cores
        env.setdefault("MLXSERVE_CPU_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    return env


def _start(rank: int, command: Sequence[str], env: dict[str, str], **how) -> subprocess.Popen:
    own = {"MLX_RANK": str(rank), "MLXSERVE_RANK": str(rank)}
    return subprocess.Popen([sys.executable, "-m", "mlxserve", *command], env=env | own, **how)


def _follower(rank: int, command: Sequence[str], env: dict[str, str]) -> subprocess.Popen:
    process = _start(
        rank,
        command,
        env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is rank 0's, which ends the others once it has ended
    )
    threading.Thread(target=_pass_on, args=(rank, process.stdout), daemon=True).start()
    return process


def _pass_on(rank: int, lines: IO[bytes]) -> None:
    for line in lines:
        text = line.decode(errors="replace").rstrip("\n")
        print(f"[rank {rank}] {text}", file=sys.stderr, flush=True)


class _Watch:
    """Waits for processes, and takes signals meanwhile. came: a pipe that rank 0 writes to."""

    def __init__(
        self, processes: Sequence[subprocess.Popen], came: int, on_ready: Callable[[], None]
    ) -> None:
        self._processes = processes
        self._ready = self._told = False
        threading.Thread(target=self._hear, args=(came, on_ready), daemon=True).start()

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
                time.sleep(POLL_S)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        code = codes[0] or failed or next((code for code in codes if code), 0)
        return Ended(128 - code if code < 0 else code, self._ready, self._told)

    def _take(self, number: int, frame: object) -> None:
        self._told = True
        if number != signal.SIGINT:  # a terminal sends that to rank 0 itself
            self._processes[0].send_signal(number)

    def _hear(self, came: int, on_ready: Callable[[], None]) -> None:
        with open(came, "rb", buffering=0) as pipe:
            if pipe.read(1):
                self._ready = True
                on_ready()


def _end(processes: Sequence[subprocess.Popen]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def free_ports(count: int) -> list[int]:
    """That nobody listens at."""
    with contextlib.ExitStack() as stack:
        doors = [stack.enter_context(socket.create_server((LOCAL, 0))) for _ in range(count)]
        return [door.getsockname()[1] for door in doors]


def waits(first_s: float = 1.0, most_s: float = 60.0) -> Iterator[float]:
    """Seconds before each new start, twice as many each time."""
    wait_s = first_s
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, most_s)
