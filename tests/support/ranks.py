"""A group of processes on this machine, over MLX's ring on loopback.

Ranks that wait for each other spin, so a test starts few groups and does much in each.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mlxserve.distributed.addresses import LOOPBACK, free_ports

ROOT = Path(__file__).parents[2]
CALL = "import json, sys; from {0} import {1}; {1}(*json.loads(sys.argv[1]))"


def run(
    ranks: int,
    function: Callable[..., None],
    *args: Any,
    timeout_s: float,
    ports: Sequence[Sequence[int]] | None = None,
) -> list[str]:
    """Call a function in so many processes at once; returns what each one printed, by rank.

    function: of a module that is quick to import. args: as JSON can hold them. ports: of all ranks,
    as each one sees them. Once one process fails or time is up, all are killed: AssertionError,
    with what they printed.
    """
    ports = ports or [free_ports([LOOPBACK] * ranks)] * ranks
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        call = CALL.format(function.__module__, function.__name__)
        processes = []
        for rank in range(ranks):
            hosts = folder / f"{rank}.json"
            hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports[rank]]))
            env = os.environ | {
                "MLX_RANK": str(rank),
                "MLX_HOSTFILE": str(hosts),
                "MLXSERVE_CPU_THREADS": "1",
            }
            with (folder / str(rank)).open("w") as out:
                command = [sys.executable, "-c", call, json.dumps(args)]
                processes.append(
                    subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out)
                )
        try:
            fault = _wait(processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        printed = [(folder / str(rank)).read_text() for rank in range(ranks)]
        assert not fault, "\n".join([fault, *printed])
        return printed


def _wait(processes: list[subprocess.Popen], until: float) -> str:
    """Until all have ended well (""), or one hasn't."""
    while time.monotonic() < until:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return f"rank {rank} ended with {code}"
        if all(code == 0 for code in codes):
            return ""
        time.sleep(0.05)
    return "time is up"
