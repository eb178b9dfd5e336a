"""Matmul of a few rows against packed weights, in which a row has the same bits in every batch.

MLX's own kernels read weights once per row up to a few rows, and sum in another order for more.

Bytes it has to move, for M rows: N * K codes of 4 or 8 bits and N * K / group scales and biases,
once; x and the result. Beyond those, each threadgroup reads all of x again, M * K numbers for 32
outputs, which the GPU's cache has: with 4 bits, 2 rows of x are as much as 0.22 of the weights'
bytes, and 8 rows 0.89.
"""

from typing import cast

import mlx.core as mx

from mlxserve.kernels.metal.launch import Kernel, Launch, source
from mlxserve.kernels.quantized import PackedWeight

BITS = (4, 8)
GROUPS = (32, 64, 128)
OUTPUTS = 32  # of a threadgroup
# What it is compiled for; other numbers of rows take the next, and compute rows of zeros.
ROWS = (1, 2, 4, 8, 12, 16)
MAX_ROWS = ROWS[-1]


def quantized_rows(x: mx.array, packed: PackedWeight) -> Launch:
    """`x @ packed.T`: `[M, N]` in x's dtype, summed in float32 and rounded once.

    x: `[M, K]`, float16 or bfloat16, of which 16 rows at a time share a reading of the weights;
    packed: `[N, K]` in affine mode, with 4 or 8 bits, a group of 32, 64 or 128, and scales in x's
    dtype. Such as `matmul_check.unsupported` gives a reason for aren't checked for here.
    """
    (count, _), (outputs, groups) = x.shape, packed.scales.shape
    rows = next((rows for rows in ROWS if rows >= count), MAX_ROWS)
    # Sums that a lane keeps in registers: 32 at the most.
    outs = 4 if rows <= 8 else 2
    simdgroups = OUTPUTS // outs
    template = {
        "T": x.dtype,
        "BITS": packed.bits,
        "GROUP": packed.group_size,
        "PAIR": 2 if groups % 2 == 0 else 1,
        "ROWS": rows,
        "OUTS": outs,
        "NSG": simdgroups,
    }
    threads = 32 * simdgroups
    return Launch(
        kernel=KERNEL,
        arrays=(x, packed.weight, packed.scales, cast(mx.array, packed.biases)),
        template=tuple(template.items()),
        grid=(-(-outputs // OUTPUTS) * threads, -(-count // rows), 1),
        threadgroup=(threads, 1, 1),
        shapes=((count, outputs),),
        dtypes=(x.dtype,),
    )


KERNEL = Kernel(
    "quantized_matmul",
    ("x", "words", "scales", "biases"),
    ("out",),
    source("quantized_matmul.metal"),
    source("numbers.metal") + source("packed_weights.metal"),
)
