"""Queries and keys turned by their positions in one launch; MLX takes two, or four with norms.

Bytes it has to move: queries and keys once, and the results. Angles come of the periods by an exact
product and a reduction in several parts, so that they are right at any position.
"""

import mlx.core as mx

from mlxserve.kernels.metal.launch import Kernel, Launch, source

SIMDGROUPS = 4  # heads that a threadgroup turns
PAIRS = 2  # neighbours that a lane loads together


def rotation(
    q: mx.array,
    k: mx.array,
    positions: mx.array,
    periods: mx.array,
    gain: float,
    norms: tuple[mx.array, mx.array] | None,
    eps: float,
) -> Launch:
    """`kernels.rope.rotate`, in float32 and rounded once.

    q: `[T, Hq, D]`, k: `[T, Hk, D]`, float16 or bfloat16, D a multiple of 4; positions: int32
    `[T]`; periods: float32 `[D / 2]`; norms: `[D]` of queries and of keys, in q's dtype.
    """
    (tokens, q_heads, dim), kv_heads = q.shape, k.shape[1]
    template = {
        "T": q.dtype,
        "DIM": dim,
        "Q_HEADS": q_heads,
        "K_HEADS": kv_heads,
        "ROUNDS": -(-dim // (2 * PAIRS * 32)),
        "NORMS": norms is not None,
    }
    groups = -(-(q_heads + kv_heads) // SIMDGROUPS)
    return Launch(
        kernel=KERNEL,
        # A kernel has all its inputs: one that isn't read stands for the norms.
        arrays=(q, k, positions, periods, *(norms or (q, q)), mx.array([gain, eps], mx.float32)),
        template=tuple(template.items()),
        grid=(groups * SIMDGROUPS * 32, tokens, 1),
        threadgroup=(SIMDGROUPS * 32, 1, 1),
        shapes=(q.shape, k.shape),
        dtypes=(q.dtype, q.dtype),
    )


KERNEL = Kernel(
    "rotate",
    ("q", "k", "positions", "periods", "q_norm", "k_norm", "numbers"),
    ("q_out", "k_out"),
    source("rotate.metal"),
    source("numbers.metal") + source("angles.metal"),
)
