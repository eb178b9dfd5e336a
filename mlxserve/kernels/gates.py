"""Gated activations of the feed-forward layers (Shazeer 2020, arXiv:2002.05202)."""

from collections.abc import Callable
from functools import cache
from types import ModuleType

import mlx.core as mx

from mlxserve import device
from mlxserve.kernels.registry import check_close, native

Gate = Callable[[mx.array, mx.array], mx.array]


def gated(gate: mx.array, up: mx.array, kind: str) -> mx.array:
    """`activation(gate) * up`.

    gate, up: `[T, I]`. kind: a key of GATES, the name that config files give the activation.
    Returns `[T, I]` in their dtype. The native kernel takes float32. Raises ValueError for shapes
    that differ, other dtypes and other kinds.
    """
    kernels = native("gated") if gate.dtype == up.dtype == mx.float32 else None
    if kernels is not None:
        return kernels.gated(gate, up, kind)
    if kind not in GATES:
        raise ValueError(f"gated: unknown activation {kind}")
    if gate.shape != up.shape:
        raise ValueError(f"gated: up is {up.shape}, expected {gate.shape}")
    return _reference(kind)(gate, up)


@cache
def _reference(kind: str) -> Gate:
    """Fused into one kernel on Metal. On CPU mx.compile would run g++ at the first call."""
    return mx.compile(GATES[kind], shapeless=True) if device.has_metal() else GATES[kind]


def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


def _geglu_tanh(gate: mx.array, up: mx.array) -> mx.array:
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)  # sqrt(2 / pi)
    return 0.5 * gate * (1 + mx.tanh(inner)) * up


GATES: dict[str, Gate] = {
    "silu": _swiglu,
    "gelu_pytorch_tanh": _geglu_tanh,
}


def check(kernels: ModuleType) -> None:
    """Kernel against reference from tail to tail. Raises ArithmeticError."""
    gate = mx.linspace(-12.0, 12.0, 87)[None]
    up = mx.cos(gate)
    for kind, reference in GATES.items():
        check_close("gated", kernels.gated(gate, up, kind), reference(gate, up), 1e-6)
