"""Which implementation each op uses on this device, and why. `mlxserve doctor` prints it.

An op is a public function in a module of this folder, with its reference in MLX operations. Where
it also has a native CPU kernel, that is used once it has agreed with the reference on this machine.
"""

import importlib
import logging
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import mlx.core as mx

from mlxserve import config
from mlxserve.errors import RequestError
from mlxserve.kernels.native import load

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


@dataclass(frozen=True, slots=True)
class Choice:
    """One op's implementation ("native" or "reference") and the reason for it."""

    op: str
    implementation: str
    reason: str


class _Decision(NamedTuple):
    """warning: what to tell the user when the op is first used, or ""."""

    choice: Choice
    module: ModuleType | None = None
    warning: str = ""


_lock = threading.Lock()
_decided: dict[str, _Decision] = {}
_used: dict[str, ModuleType | None] = {}
_warned: set[str] = set()


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


def _decision(op: str) -> _Decision:
    with _lock:
        if op not in _decided:
            _decided[op] = _decide(op)
        return _decided[op]


def _decide(op: str) -> _Decision:
    asked = _asked(op)
    if asked == "reference":
        return _Decision(Choice(op, "reference", "asked for by MLXSERVE_KERNELS"))
    if mx.metal.is_available():
        return _Decision(Choice(op, "reference", "MLX's own Metal kernels"))
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
        failed = Choice(op, "reference", f"the native kernel failed its check: {error}")
        warning = f"the native {op} kernel is off, please report this: {error}"
        return _Decision(failed, warning=warning)
    agrees = Choice(op, "native", f"{found.reason}; agrees with the reference")
    return _Decision(agrees, found.module)


def _asked(op: str) -> str | None:
    overrides = config.kernel_overrides()
    if unknown := sorted(overrides.keys() - OPS.keys() - {""}):
        raise RequestError(f"MLXSERVE_KERNELS names {unknown[0]!r}; the ops are {', '.join(OPS)}")
    return overrides.get(op, overrides.get(""))


def check_close(op: str, got: mx.array, expected: mx.array, tolerance: float) -> None:
    """Raise ArithmeticError where they differ by more than `tolerance` of the largest number."""
    difference = mx.abs(got.astype(mx.float32) - expected.astype(mx.float32)).max()
    size = mx.maximum(mx.abs(expected.astype(mx.float32)).max(), 1e-6)
    worst = float(difference / size)
    if not worst <= tolerance:  # also where it is not a number
        raise ArithmeticError(
            f"{op} is {worst:.1e} away from its reference, {tolerance:.0e} is allowed"
        )
