"""A sum and its norm in one launch, where MLX takes two, or three with a norm before the sum.

Bytes it has to move: of each row y and stream once, sum and result once; the weights.
"""

import mlx.core as mx

from mlxserve.kernels.metal.launch import Kernel, Launch, source

FOUR = 4  # numbers that a thread loads together
MAX_THREADS = 1024
MAX_WIDTH = 8 * FOUR * MAX_THREADS  # a thread keeps 32 numbers at the most


def sum_and_norm(
    y: mx.array, stream: mx.array, weight: mx.array, eps: float, inner: mx.array | None
) -> Launch:
    """`kernels.norm.add_rms_norm`, in float32; the sum is rounded, and then its norm.

    y, stream: `[T, D]`, float16 or bfloat16, D a multiple of 4; weight, inner: `[D]` in y's dtype.
    """
    count, width = y.shape
    threads = min(MAX_THREADS, -(-width // (32 * FOUR)) * 32)
    template = {
        "T": y.dtype,
        "ROUNDS": -(-width // (FOUR * threads)),
        "NSG": threads // 32,
        "INNER": inner is not None,
    }
    return Launch(
        kernel=KERNEL,
        # A kernel has all its inputs: one that isn't read stands for `inner`.
        arrays=(y, stream, weight, weight if inner is None else inner, mx.array(eps, mx.float32)),
        template=tuple(template.items()),
        grid=(threads * count, 1, 1),
        threadgroup=(threads, 1, 1),
        shapes=(y.shape, y.shape),
        dtypes=(y.dtype, y.dtype),
    )


KERNEL = Kernel(
    "add_rms_norm",
    ("y", "stream", "weight", "inner", "eps"),
    ("sums", "normed"),
    source("add_rms_norm.metal"),
    source("numbers.metal") + source("row_sums.metal"),
)
