"""Which implementation each op uses on this device, and why. `mlxserve doctor` prints it.

An op is a public function in a module of this folder, with its reference in MLX operations. Where
it also has a native CPU kernel, that is used once it has agreed with the reference on this machine.
"""

import importlib
import threading
import warnings
from dataclasses import dataclass
from types import ModuleType

import mlx.core as mx

from mlxserve import config
from mlxserve.errors import RequestError
from mlxserve.kernels.native import load

# op -> its module, whose `check(native)` raises ArithmeticError where kernel and reference differ.
OPS = {
    "attention": "mlxserve.kernels.attention",
    "append": "mlxserve.kernels.append",
    "matmul": "mlxserve.kernels.matmul",
    "norm": "mlxserve.kernels.norm",
    "rope": "mlxserve.kernels.rope",
    "gated": "mlxserve.kernels.gates",
    "select": "mlxserve.kernels.select",
    "quantize": "mlxserve.kernels.quantize",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """One op's implementation ("native" or "reference") and the reason for it."""

    op: str
    implementation: str
    reason: str


_lock = threading.Lock()
_chosen: dict[str, tuple[Choice, ModuleType | None]] = {}


def native(op: str) -> ModuleType | None:
    """The module with this op's native kernel, or None where its reference is used.

    Chosen once per process. Raises RequestError for overrides that can't be followed.
    """
    return (_chosen.get(op) or _choose(op))[1]


def report() -> list[Choice]:
    """The choices in force, for every op."""
    return [(_chosen.get(op) or _choose(op))[0] for op in OPS]


def recorder() -> ModuleType | None:
    """The module that records graphs and runs them again, where every op has a native kernel."""
    every = all(choice.implementation == "native" for choice in report())
    return load().module if every else None


def forget() -> None:
    """Choose anew, after the environment was changed: for tests."""
    with _lock:
        _chosen.clear()
        load.cache_clear()


def _choose(op: str) -> tuple[Choice, ModuleType | None]:
    with _lock:
        if op not in _chosen:
            _chosen[op] = _decide(op)
        return _chosen[op]


def _decide(op: str) -> tuple[Choice, ModuleType | None]:
    asked = _asked(op)
    if asked == "reference":
        return Choice(op, "reference", "asked for by MLXSERVE_KERNELS"), None
    if mx.metal.is_available():
        return Choice(op, "reference", "MLX's own Metal kernels"), None
    found = load()
    if found.module is None:
        if asked == "native":
            raise RequestError(
                f"MLXSERVE_KERNELS asks for native {op}: {found.reason}; {found.fix}"
            )
        if found.fix:
            _warn(
                f"the native CPU kernels are off ({found.reason}): expect a twentieth of the "
                f"speed. To mend it, {found.fix}"
            )
        return Choice(op, "reference", found.reason), None
    try:
        importlib.import_module(OPS[op]).check(found.module)
    except ArithmeticError as error:
        _warn(f"the native {op} kernel is off: {error}. Please report this")
        return Choice(op, "reference", f"the native kernel failed its check: {error}"), None
    return Choice(op, "native", f"{found.reason}; agrees with the reference"), found.module


def _asked(op: str) -> str | None:
    overrides = config.kernel_overrides()
    if unknown := sorted(overrides.keys() - OPS.keys() - {""}):
        raise RequestError(f"MLXSERVE_KERNELS names {unknown[0]!r}; the ops are {', '.join(OPS)}")
    return overrides.get(op, overrides.get(""))


_warned: set[str] = set()


def _warn(message: str) -> None:
    """Once per process: every op would say the same."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def check_close(op: str, got: mx.array, expected: mx.array, tolerance: float) -> None:
    """Raise ArithmeticError where they differ by more than `tolerance` of the largest number."""
    difference = mx.abs(got.astype(mx.float32) - expected.astype(mx.float32)).max()
    size = mx.maximum(mx.abs(expected.astype(mx.float32)).max(), 1e-6)
    worst = float(difference / size)
    if not worst <= tolerance:  # also where it is not a number
        raise ArithmeticError(
            f"{op} is {worst:.1e} away from its reference, {tolerance:.0e} is allowed"
        )
