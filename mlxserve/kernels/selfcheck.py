"""Checks a Metal kernel in a process of its own: a bad one may hang the GPU, or end its process.

`examine` starts another Python with `main`, which takes a use on stdin and gives a verdict on
stdout, both JSON; what there is to check is the affair of the kernel's module in `CHECKS`. MLX
waits for a GPU without end, so only killing the process helps there.
"""

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from mlxserve import config
from mlxserve.errors import ModelError
from mlxserve.kernels.metal import launch
from mlxserve.kernels.uses import (
    AttentionUse,
    ChunkUse,
    MatmulUse,
    NormUse,
    RopeUse,
    SealUse,
    Use,
)
from mlxserve.kernels.verdicts import Verdict
from mlxserve.report import one_line, show

# Kind of use -> the module that says, of one, why the kernel can't serve it (`unsupported`),
# whether it is right (`check`), how fast it is beside MLX's own (`measure`), and what follows
# (`judge`).
CHECKS: dict[type[Use], str] = {
    AttentionUse: "mlxserve.kernels.metal.attention_check",
    ChunkUse: "mlxserve.kernels.metal.chunk_check",
    MatmulUse: "mlxserve.kernels.metal.matmul_check",
    SealUse: "mlxserve.kernels.metal.pack_check",
    NormUse: "mlxserve.kernels.metal.norm_check",
    RopeUse: "mlxserve.kernels.metal.rope_check",
}
OPS = tuple(dict.fromkeys(kind.op for kind in CHECKS))  # that have Metal kernels
KINDS = {kind.__name__: kind for kind in CHECKS}
# What this process imports, the other imports too. Not by PYTHONPATH, which comes before the
# standard library even while Python starts.
START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from mlxserve.kernels import selfcheck
selfcheck.main()
"""
POLL_S = 0.1  # how often it is asked whether the caller still waits
REAP_S = 5.0  # for a killed process to go


def checks(use: Use) -> Any:
    """The module of the use's Metal kernel, out of CHECKS."""
    return importlib.import_module(CHECKS[type(use)])


def examine(
    use: Use, cancelled: Callable[[], bool] = lambda: False, spent_s: float = 0.0
) -> Verdict:
    """Whether the kernel compiles, is right and is fast for this use. Takes seconds.

    cancelled: asked now and then; once it is true, raises ModelError. spent_s: what checks before
    it took of the time that all have together. Raises OSError where no process can be started, or
    too little of that time is left, which says nothing about the kernel.
    """
    timeout_s = config.kernel_check_s()
    if not sys.executable:
        raise OSError("this program doesn't say which Python to run (sys.executable)")
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", START, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"MLXSERVE_KERNELS": "reference"},
        start_new_session=True,  # a group of its own, to be killed whole; and Ctrl-C is ours alone
    )
    question = json.dumps(
        {"kind": type(use).__name__, "use": asdict(use), "timeout_s": timeout_s}
    ).encode()
    try:
        return _wait(process, question, timeout_s, spent_s, cancelled)
    finally:
        if process.returncode is None:
            _kill(process)


def _wait(
    process: subprocess.Popen[bytes],
    question: bytes | None,
    timeout_s: float,
    spent_s: float,
    cancelled: Callable[[], bool],
) -> Verdict:
    begin = time.monotonic()
    while True:
        try:
            out, err = process.communicate(question, timeout=POLL_S)
        except subprocess.TimeoutExpired:
            question = None  # it is on its way
            if cancelled():
                raise ModelError("loading was cancelled") from None
            took_s = time.monotonic() - begin
            if took_s > timeout_s:
                return Verdict(failure=f"hang: no result within {timeout_s:g} s")
            if spent_s + took_s > timeout_s:
                raise TimeoutError(
                    f"all checks have {timeout_s:g} s, and others took {spent_s:.0f}; it has its "
                    "turn at the next start"
                ) from None
        else:
            return _verdict(process.returncode, out, err)


def _verdict(code: int, out: bytes, err: bytes) -> Verdict:
    said = err.decode(errors="replace").strip().rpartition("\n")[2][:200]
    if code < 0:
        return Verdict(failure=f"crash: {signal.strsignal(-code)}, signal {-code}: {said}")
    if code > 0:
        return Verdict(failure=f"exit code {code}: {said}")
    try:
        return Verdict.from_json(json.loads(out))
    except ValueError:
        return Verdict(failure=f"no verdict, but {show(out)}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    # It may have ended by now; then macOS says that it isn't allowed.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # one that the system won't let go is left behind
        process.communicate(timeout=REAP_S)


def _examine_here(use: Use) -> Verdict:
    run = launch.runner()
    if run is None:
        return Verdict(failure="MLX finds no Metal in another process")
    try:
        error = checks(use).check(use, run)
        return Verdict(error=error, timings=tuple(checks(use).measure(use, run)))
    except ArithmeticError as wrong:
        return Verdict(failure=f"wrong result: {wrong}")
    except Exception as error:  # such as a compiler's
        return Verdict(failure=f"{type(error).__name__}: {one_line(error)}")


def main() -> None:
    """The other process: a use from stdin, a verdict to stdout."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    question = json.load(sys.stdin)
    # Ends this process, whatever it waits for, if nobody is left to kill it.
    signal.alarm(math.ceil(question["timeout_s"] + REAP_S))
    with answers:
        use = KINDS[question["kind"]](**question["use"])
        json.dump(_examine_here(use).to_json(), answers)
