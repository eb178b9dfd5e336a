"""Soft caps of logits (Gemma Team 2024, arXiv:2408.00118)."""

from types import ModuleType

import mlx.core as mx

from mlxserve.kernels.registry import check_close, native


def soft_cap(x: mx.array, cap: float | None) -> mx.array:
    """`cap * tanh(x / cap)`, which keeps values within +-cap; None leaves them alone.

    x: any shape. Returns its shape in its dtype. The native kernel takes float32. Raises ValueError
    for a cap that isn't a positive number.
    """
    if cap is None:
        return x
    if not 0 < cap < float("inf"):
        raise ValueError(f"soft_cap: cap is {cap}, expected a positive number")
    kernels = native("soft_cap") if x.dtype == mx.float32 else None
    return _reference(x, cap) if kernels is None else kernels.soft_cap(x, cap)


def _reference(x: mx.array, cap: float) -> mx.array:
    return mx.tanh(x / cap) * cap


def check(kernels: ModuleType) -> None:
    """Kernel against reference, from one bound to the other. Raises ArithmeticError."""
    x = mx.linspace(-90.0, 90.0, 87)
    check_close("soft_cap", kernels.soft_cap(x, 30.0), _reference(x, 30.0), 1e-6)
