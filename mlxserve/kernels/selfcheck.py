"""Checks a Metal kernel in a process of its own: a bad one may hang the GPU, or end its process.

`examine` starts another Python with `main`, which takes a use on stdin and gives a verdict on
stdout, both JSON. MLX waits for a GPU without end, so only killing the process helps there.
"""

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

from mlxserve import config
from mlxserve.errors import ModelError
from mlxserve.kernels.uses import AttentionUse
from mlxserve.kernels.verdicts import Verdict
from mlxserve.report import one_line, show

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


def examine(use: AttentionUse, cancelled: Callable[[], bool] = lambda: False) -> Verdict:
    """Whether the kernel compiles, is right and is fast for this use. Takes seconds.

    cancelled: asked now and then; once it is true, raises ModelError. Raises OSError where no
    process can be started, which says nothing about the kernel.
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
    question = json.dumps({"use": asdict(use), "timeout_s": timeout_s}).encode()
    try:
        return _wait(process, question, timeout_s, cancelled)
    finally:
        if process.returncode is None:
            _kill(process)


def _wait(
    process: subprocess.Popen[bytes],
    question: bytes | None,
    timeout_s: float,
    cancelled: Callable[[], bool],
) -> Verdict:
    end = time.monotonic() + timeout_s
    while True:
        try:
            out, err = process.communicate(question, timeout=POLL_S)
        except subprocess.TimeoutExpired:
            question = None  # it is on its way
            if cancelled():
                raise ModelError("loading was cancelled") from None
            if time.monotonic() > end:
                return Verdict(failure=f"hang: no result within {timeout_s:g} s")
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


def _examine_here(use: AttentionUse) -> Verdict:
    from mlxserve.kernels.metal import attention_check, launch

    run = launch.runner()
    if run is None:
        return Verdict(failure="MLX finds no Metal in another process")
    try:
        error = attention_check.check(use, run)
        return Verdict(error=error, timings=tuple(attention_check.measure(use, run)))
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
        json.dump(_examine_here(AttentionUse(**question["use"])).to_json(), answers)
