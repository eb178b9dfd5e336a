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
from collections.abc import Sequence
from pathlib import Path

from mlxserve.errors import RequestError

MAX_RANKS = 16  # on one machine
END_S = 3.0  # for the others, once one has ended
LOCAL = "127.0.0.1"


def launch_here(count: int, command: Sequence[str]) -> int:
    """Run a command of `mlxserve` as `count` ranks on this machine. Returns the exit code.

    Rank 0 has this process's terminal; what the others print goes to stderr, line by line, with
    their number. When one ends, so do all. The code is rank 0's, or that of the first to fail.
    """
    if not 1 <= count <= MAX_RANKS:
        raise RequestError(f"{count} ranks; give a number from 1 to {MAX_RANKS}")
    with tempfile.TemporaryDirectory() as folder, _free_ports(count + 1) as ports:
        hosts = Path(folder) / "hosts.json"
        hosts.write_text(json.dumps([[f"{LOCAL}:{port}"] for port in ports[1:]]))
        env = os.environ | {
            "MLX_HOSTFILE": str(hosts),
            "MLXSERVE_RANKS": str(count),
            "MLXSERVE_CONTROL": f"{LOCAL}:{ports[0]}",
            "MLXSERVE_CONTROL_KEY": secrets.token_hex(16),
        }
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        if cores is not None:  # ranks would fight over them
            env.setdefault("MLXSERVE_CPU_THREADS", str(max(1, cores // count)))
        processes: list[subprocess.Popen] = []
        try:
            for rank in range(count):
                processes.append(_start(rank, command, env))
            return _wait(processes)
        finally:
            _end(processes)


def _start(rank: int, command: Sequence[str], env: dict[str, str]) -> subprocess.Popen:
    own = {"MLX_RANK": str(rank), "MLXSERVE_RANK": str(rank)}
    line = [sys.executable, "-m", "mlxserve", *command]
    if rank == 0:
        return subprocess.Popen(line, env=env | own)
    # Ctrl-C is rank 0's, which ends the others once it has ended.
    process = subprocess.Popen(
        line,
        env=env | own,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    threading.Thread(target=_pass_on, args=(rank, process.stdout), daemon=True).start()
    return process


def _pass_on(rank: int, lines: "subprocess.IO[bytes]") -> None:  # type: ignore[name-defined]
    for line in lines:
        text = line.decode(errors="replace").rstrip("\n")
        print(f"[rank {rank}] {text}", file=sys.stderr, flush=True)


def _wait(processes: Sequence[subprocess.Popen]) -> int:
    """Until all have ended, or some time after the first has."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: _pass(number, processes[0]))
    end_s = None
    failed = 0
    while None in (codes := [process.poll() for process in processes]):
        failed = failed or next((code for code in codes if code), 0)
        if end_s is None and any(code is not None for code in codes):
            end_s = time.monotonic() + END_S
        if end_s is not None and time.monotonic() > end_s:
            break
        time.sleep(0.05)
    code = processes[0].poll()
    code = failed if code in (0, None) else code
    return 128 - code if code < 0 else code


def _pass(number: int, first: subprocess.Popen) -> None:
    """A terminal sends Ctrl-C to rank 0 itself."""
    if number != signal.SIGINT:
        first.send_signal(number)


def _end(processes: Sequence[subprocess.Popen]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


@contextlib.contextmanager
def _free_ports(count: int):
    """Numbers of ports that nobody listens at."""
    doors = [socket.create_server((LOCAL, 0)) for _ in range(count)]
    ports = [door.getsockname()[1] for door in doors]
    for door in doors:
        door.close()
    yield ports
