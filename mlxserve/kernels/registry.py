"""Which implementation each op uses on this device, and why. `mlxserve doctor` prints it.

An op is a public function in a module of this folder, with its reference in MLX operations. Where
it also has a native CPU kernel, that is used once it has agreed with the reference on this machine.
A Metal kernel is chosen for each use that a model makes of the op, when the model loads: where it
agrees with the reference on this machine, and is faster. Ops that have one: `selfcheck.OPS`.
"""

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import NamedTuple

import mlx.core as mx

from mlxserve import config, device
from mlxserve.errors import RequestError
from mlxserve.kernels import selfcheck, verdicts
from mlxserve.kernels.metal import launch
from mlxserve.kernels.native import load
from mlxserve.kernels.uses import Use
from mlxserve.kernels.verdicts import Verdict

logger = logging.getLogger(__name__)

# op -> its module, whose `check(native)` raises ArithmeticError where kernel and reference differ.
OPS = {
    "attention": "mlxserve.kernels.attention",
    "append": "mlxserve.kernels.append",
    "matmul": "mlxserve.kernels.matmul",
    "gathered": "mlxserve.kernels.gathered",
    "norm": "mlxserve.kernels.norm",
    "rope": "mlxserve.kernels.rope",
    "gated": "mlxserve.kernels.gates",
    "soft_cap": "mlxserve.kernels.softcap",
    "select": "mlxserve.kernels.select",
    "quantize": "mlxserve.kernels.quantize",
}
# Of a Metal kernel that computes in float32 and rounds once: one unit in the last place of the
# largest number, where rounding takes half of that.
TOLERANCE = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True, slots=True)
class Choice:
    """One op's implementation ("native", "metal" or "reference") and the reason for it.

    use: the one that it is for; None: every. verdict: of the Metal kernel's check, if any.
    failed: whether there is a kernel, and it didn't pass its check. unsupported: whether the kernel
    doesn't take such a use.
    """

    op: str
    implementation: str
    reason: str
    use: Use | None = None
    verdict: Verdict | None = None
    failed: bool = False
    unsupported: bool = False


class _Decision(NamedTuple):
    """warning: what to tell the user when the op is first used, or ""."""

    choice: Choice
    module: ModuleType | None = None
    warning: str = ""


_lock = threading.Lock()
_decided: dict[str, _Decision] = {}
_used: dict[str, ModuleType | None] = {}
_warned: set[str] = set()
_metal_lock = threading.Lock()  # its own: a check takes seconds
_metal: dict[Use, Choice] = {}
_runners: dict[Use, launch.Runner] = {}
_noting = threading.local()  # uses: what `noting` notes, or None


def native(op: str) -> ModuleType | None:
    """The module with this op's native kernel, or None where its reference is used.

    Chosen once per process, with one warning where a kernel is missing that could be there. Raises
    RequestError for overrides that can't be followed.
    """
    try:
        return _used[op]
    except KeyError:
        decision = _decision(op)
        _used[op] = decision.module
        if decision.warning and decision.warning not in _warned:
            _warned.add(decision.warning)
            logger.warning("%s", decision.warning)
        return decision.module


def metal(use: Use) -> launch.Runner | None:
    """What runs the op's Metal kernel for this use, or None where that isn't to be used.

    `choose` has decided it before; for a use that no model was loaded with, the answer is None.
    """
    if (noted := getattr(_noting, "uses", None)) is not None:
        noted[use] = None
    return _runners.get(use)


@contextmanager
def noting() -> Iterator[dict[Use, None]]:
    """Notes the uses that `metal` is asked for in this thread, such as while a model is traced."""
    _noting.uses = {}
    try:
        yield _noting.uses
    finally:
        _noting.uses = None


def chosen(use: Use) -> Choice | None:
    """What `choose` decided for this use; None where it wasn't asked."""
    return _metal.get(use)


def choose(
    uses: Iterable[Use],
    *,
    afresh: bool = False,
    cancelled: Callable[[], bool] = lambda: False,
) -> list[Choice]:
    """Decide on the Metal kernel for each use, once per process, and before anything is served.

    A check takes seconds, in a process of its own, and is remembered on disk; `afresh` checks again
    what this process or the disk knows. All checks have MLXSERVE_KERNEL_CHECK_S together; a use
    that is left over has the reference. Without Metal, the choices are those of `native`. Raises
    RequestError for overrides that can't be followed, and ModelError once `cancelled` is true.
    """
    choices, spent_s = [], 0.0
    for use in uses:
        with _metal_lock:
            if afresh or use not in _metal:
                run, begin = launch.runner(), time.monotonic()
                _metal[use] = _decide_metal(use, run, afresh, cancelled, spent_s)
                spent_s += time.monotonic() - begin
                _runners.pop(use, None)
                if run is not None and _metal[use].implementation == "metal":
                    _runners[use] = run
            choices.append(_metal[use])
    return choices


@contextmanager
def references() -> Iterator[None]:
    """Use every op's reference, to compare with it. For a process with nothing else to compute."""
    with _metal_lock:
        used, runners = dict(_used), dict(_runners)
        _used.update(dict.fromkeys(OPS))
        _runners.clear()
    try:
        yield
    finally:
        _used.clear()
        _used.update(used)
        _runners.update(runners)


def report() -> list[Choice]:
    """The choices in force, for every op."""
    return [_decision(op).choice for op in OPS]


def recorder() -> ModuleType | None:
    """The module that records graphs and runs them again, where every op has a native kernel."""
    every = all(choice.implementation == "native" for choice in report())
    return load().module if every else None


def forget() -> None:
    """Choose anew, after the environment was changed: for tests."""
    with _lock:
        _decided.clear()
        _used.clear()
        _warned.clear()
        load.cache_clear()
    with _metal_lock:
        _metal.clear()
        _runners.clear()


def _decision(op: str) -> _Decision:
    with _lock:
        if op not in _decided:
            _decided[op] = _decide(op)
        return _decided[op]


def _decide(op: str) -> _Decision:
    asked = _asked(op)
    if asked == "reference":
        return _Decision(Choice(op, "reference", "asked for by MLXSERVE_KERNELS"))
    if asked == "metal" and launch.runner() is None:
        raise RequestError(f"MLXSERVE_KERNELS asks for metal {op}, and MLX has no Metal here")
    if device.has_metal() or asked == "metal":
        if asked == "native":
            raise RequestError(f"MLXSERVE_KERNELS asks for native {op}, which is for CPUs")
        ours = "; ours where a loaded model's layers gain by it" if op in selfcheck.OPS else ""
        return _Decision(Choice(op, "reference", f"MLX's own Metal kernels{ours}"))
    found = load()
    if found.module is None:
        if asked == "native":
            raise RequestError(
                f"MLXSERVE_KERNELS asks for native {op}: {found.reason}; {found.fix}"
            )
        slow = f"mlxserve is slow here ({found.reason}); to mend it, {found.fix}"
        return _Decision(Choice(op, "reference", found.reason), warning=slow if found.fix else "")
    try:
        importlib.import_module(OPS[op]).check(found.module)
    except Exception as error:  # whatever it is, the reference works
        reason = f"the native kernel failed its check: {error}"
        failed = Choice(op, "reference", reason, failed=True)
        warning = f"the native {op} kernel is off, please report this: {error}"
        return _Decision(failed, warning=warning)
    agrees = Choice(op, "native", f"{found.reason}; agrees with the reference")
    return _Decision(agrees, found.module)


def _decide_metal(
    use: Use,
    run: launch.Runner | None,
    afresh: bool,
    cancelled: Callable[[], bool],
    spent_s: float,
) -> Choice:
    op, checks = use.op, selfcheck.checks(use)
    asked = _asked(op)
    if run is None or asked == "native":
        return replace(_decision(op).choice, use=use)
    if asked == "reference":
        return Choice(op, "reference", "asked for by MLXSERVE_KERNELS", use)
    if reason := checks.unsupported(use):
        if asked == "metal":
            raise RequestError(f"MLXSERVE_KERNELS asks for metal {op}: {reason}")
        return Choice(op, "reference", reason, use, unsupported=True)
    if asked == "metal":
        return Choice(op, "metal", "asked for by MLXSERVE_KERNELS, not checked", use)
    try:
        verdict = _verdict(use, afresh, cancelled, spent_s)
    except OSError as error:
        return Choice(op, "reference", f"the kernel can't be checked: {error}", use)
    if verdict.failure:
        reason = f"the Metal kernel failed its check: {verdict.failure}"
        return Choice(op, "reference", reason, use, verdict, failed=True)
    used, reason = checks.judge(use, verdict)
    return Choice(op, "metal" if used else "reference", reason, use, verdict)


def _verdict(use: Use, afresh: bool, cancelled: Callable[[], bool], spent_s: float) -> Verdict:
    """Remembered, or found now; a failure is reported when it is found. Raises OSError."""
    if not afresh and (known := verdicts.recall(use)) is not None:
        return known
    machine = verdicts.machine()
    if not afresh:
        told = "checking the Metal %s kernel for %s on %s; this is done once, and takes seconds"
        logger.warning(told, use.op, use, machine)
    verdict = selfcheck.examine(use, cancelled, spent_s)
    verdicts.remember(use, verdict)
    if verdict.failure:
        logger.warning(
            "the Metal %s kernel is off for %s, and MLX's own is used; please report this line and "
            "what `mlxserve doctor --kernels` prints: %s; %s",
            use.op,
            use,
            machine,
            verdict.failure,
        )
    return verdict


def _asked(op: str) -> str | None:
    overrides = config.kernel_overrides()
    if unknown := sorted(overrides.keys() - OPS.keys() - {""}):
        raise RequestError(f"MLXSERVE_KERNELS names {unknown[0]!r}; the ops are {', '.join(OPS)}")
    ours = selfcheck.OPS
    for named, wanted in overrides.items():
        if wanted == "metal" and named and named not in ours:
            raise RequestError(
                f"MLXSERVE_KERNELS asks for metal {named}; only {', '.join(ours)} have Metal "
                "kernels"
            )
    return overrides.get(op, overrides.get(""))


def check_close(op: str, got: mx.array, expected: mx.array, tolerance: float) -> float:
    """The largest difference, as a share of the largest number expected.

    Raises ArithmeticError where it is more than `tolerance`, or not a number.
    """
    difference = mx.abs(got.astype(mx.float32) - expected.astype(mx.float32)).max()
    size = mx.maximum(mx.abs(expected.astype(mx.float32)).max(), 1e-6)
    worst = float(difference / size)
    if not worst <= tolerance:  # also where it is not a number
        raise ArithmeticError(
            f"{op} is {worst:.1e} away from its reference, {tolerance:.0e} is allowed"
        )
    return worst
