"""Matmul against weights that stay quantised in memory.

MLX's own layout (also what `mx.quantize` writes): along K, groups of `group_size` weights share a
scale and, in affine mode, a bias, so `w = scale * q + bias`; q is packed into uint32 words, low
bits first.
"""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, eq=False, slots=True)
class PackedWeight:
    """A quantised matrix `[N, K]`, or a stack of them `[E, N, K]`.

    weight: uint32 `[.., N, K * bits / 32]`; scales: `[.., N, K / group_size]`; biases: like scales,
    None where the mode has none (mxfp4, mxfp8, nvfp4).
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    bits: int
    group_size: int
    mode: str = "affine"

    @property
    def shape(self) -> tuple[int, ...]:
        *leading, words = self.weight.shape
        return *leading, words * 32 // self.bits


def column_ranges(columns: range, bits: int, group_size: int) -> tuple[range, range]:
    """Where some columns of a packed matrix lie: in its words, and in its scales and biases.

    Raises ValueError for columns that aren't whole groups.
    """
    if columns.start % group_size or columns.stop % group_size:
        raise ValueError(f"columns {columns} aren't whole groups of {group_size}")
    words = range(columns.start * bits // 32, columns.stop * bits // 32)
    return words, range(columns.start // group_size, columns.stop // group_size)


def quantized_matmul(x: mx.array, packed: PackedWeight) -> mx.array:
    """`x @ dequantise(packed).T`.

    x: `[T, K]`, floating. Returns `[T, N]` in x's dtype. Raises ValueError if K differs.
    """
    if x.shape[-1] != packed.shape[-1]:
        raise ValueError(f"x has K={x.shape[-1]}, the weight has K={packed.shape[-1]}")
    return mx.quantized_matmul(
        x,
        packed.weight,
        packed.scales,
        packed.biases,
        transpose=True,
        group_size=packed.group_size,
        bits=packed.bits,
        mode=packed.mode,
    )


def dequantize(packed: PackedWeight, dtype: mx.Dtype) -> mx.array:
    """`[N, K]` or `[E, N, K]` in `dtype`; scales are widened first, so that float32 is exact."""
    affine = packed.biases is not None
    return mx.dequantize(
        packed.weight,
        packed.scales.astype(dtype) if affine else packed.scales,
        packed.biases.astype(dtype) if packed.biases is not None else None,
        group_size=packed.group_size,
        bits=packed.bits,
        mode=packed.mode,
        dtype=dtype,
    )
