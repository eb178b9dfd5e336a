"""Rotary position embedding of a step's queries and keys."""

from functools import cache
from types import ModuleType

import mlx.core as mx

from mlxserve.kernels.metal.rotate import rotation
from mlxserve.kernels.pages import dtype_name
from mlxserve.kernels.registry import check_close, metal, native
from mlxserve.kernels.uses import RopeUse


def rotate(
    q: mx.array,
    k: mx.array,
    positions: mx.array,
    periods: mx.array,
    gain: float = 1.0,
    *,
    q_norm: mx.array | None = None,
    k_norm: mx.array | None = None,
    eps: float = 1e-6,
) -> tuple[mx.array, mx.array]:
    """Turns pair (i, i + D/2) of each head by `position / periods[i]` radians and scales it by gain
    (Su et al. 2021, arXiv:2104.09864).

    q: `[T, Hq, D]`; k: `[T, Hk, D]`; positions: int32 `[T]`; periods: float32 `[D / 2]`. q_norm,
    k_norm: `[D]`, both or none: weights of an RMS norm of each head before that, with `eps`.
    Returns q and k, rotated, in their dtypes. The native kernel takes float32 and D up to 1024, the
    Metal kernel 16 bits; the angles of both are exact to 1e-6 radians at any position. Raises
    ValueError for other shapes and dtypes.
    """
    norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("rope: q_norm and k_norm come together")
    kernels = native("rope") if q.dtype == k.dtype == mx.float32 else None
    if kernels is not None:
        turned_q, turned_k = kernels.rope(q, k, positions, periods, gain, q_norm, k_norm, eps)
        return turned_q, turned_k
    if (run := metal(use(q.shape[1], *k.shape[1:], q.dtype, norms is not None))) is not None:
        turned_q, turned_k = run(rotation(q, k, positions, periods, gain, norms, eps))
        return turned_q, turned_k
    return reference(q, k, positions, periods, gain, norms, eps)


def reference(
    q: mx.array,
    k: mx.array,
    positions: mx.array,
    periods: mx.array,
    gain: float,
    norms: tuple[mx.array, mx.array] | None,
    eps: float,
) -> tuple[mx.array, mx.array]:
    """`rotate` in MLX operations. norms: q_norm and k_norm."""
    q_norm, k_norm = norms or (None, None)
    return (
        _rotate(_normed(q, q_norm, eps), positions, periods, gain),
        _rotate(_normed(k, k_norm, eps), positions, periods, gain),
    )


@cache
def use(q_heads: int, kv_heads: int, dim: int, dtype: mx.Dtype, norms: bool) -> RopeUse:
    """What layers with such queries and keys ask of the op."""
    return RopeUse(q_heads, kv_heads, dim, dtype_name(dtype), norms)


def _normed(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    return x if weight is None else mx.fast.rms_norm(x, weight, eps)


def _rotate(x: mx.array, positions: mx.array, periods: mx.array, gain: float) -> mx.array:
    T, H, D = x.shape
    if positions.shape != (T,):
        raise ValueError(f"rope: positions is {positions.shape}, expected {(T,)}")
    if gain != 1.0:
        x = x * gain
    # Every token is a batch row of length 1, because mx.fast.rope takes one offset per row.
    y = mx.fast.rope(
        x.reshape(T, H, 1, D),
        D,
        traditional=False,
        base=None,
        scale=1.0,
        offset=positions,
        freqs=periods,
    )
    return y.reshape(T, H, D)


def check(kernels: ModuleType) -> None:
    """Kernel against reference, with and without norms. Raises ArithmeticError."""
    for dim in (2, 6, 64):
        q = mx.random.normal((3, 4, dim), key=mx.random.key(dim))
        k = q[:, 1:3] * 2.0
        positions = mx.array([0, 7, 511], mx.int32)
        periods = 3.0 ** mx.arange(dim // 2)
        for weight in (None, q[0, 0]):
            got = kernels.rope(q, k, positions, periods, 1.5, weight, weight, 1e-6)
            for turned, x in zip(got, (q, k), strict=True):
                expected = _rotate(_normed(x, weight, 1e-6), positions, periods, 1.5)
                # The reference's angles are float32: at 511 radians they are 3e-5 off.
                check_close("rope", turned, expected, 2e-4)
