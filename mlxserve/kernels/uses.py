"""What layers ask of an op: the sizes and options that a Metal kernel is compiled for."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class AttentionUse:
    """Attention of layers that are alike.

    q_heads, kv_heads, dim: of queries, of keys and values, of each head; dtype: the cache's, by
    MLX's name; window, softcap: None where there is none; sinks: whether the layers have them;
    keep: how many first tokens are seen beside the window; key_bits, value_bits: of packed pages, 0
    where they aren't packed.
    """

    op: ClassVar[str] = "attention"
    q_heads: int
    kv_heads: int
    dim: int
    dtype: str
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    keep: int = 0
    key_bits: int = 0
    value_bits: int = 0

    def __str__(self) -> str:
        parts = [f"{self.q_heads}/{self.kv_heads}/{self.dim} {self.dtype}"]
        if self.window is not None:
            parts.append(f"window {self.window}")
        if self.softcap is not None:
            parts.append(f"softcap {self.softcap:g}")
        if self.sinks:
            parts.append("sinks")
        if self.keep:
            parts.append(f"keep {self.keep}")
        if self.key_bits or self.value_bits:
            parts.append(f"packed {self.key_bits or 16}/{self.value_bits or 16}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class ChunkUse(AttentionUse):
    """The same of rows of several tokens, such as a prompt's chunks: they have their own kernel."""

    def __str__(self) -> str:
        return f"{AttentionUse.__str__(self)}, chunks"


@dataclass(frozen=True, slots=True)
class MatmulUse:
    """Matmul against packed weights `[outputs, inputs]` that are alike.

    bits, group, mode: of the weights, see `kernels.quantized`; dtype: of x and of scales, by MLX's
    name; deterministic: whether a row must get the same bits in every batch.
    """

    op: ClassVar[str] = "matmul"
    outputs: int
    inputs: int
    bits: int
    group: int
    dtype: str
    mode: str = "affine"
    deterministic: bool = False

    def __str__(self) -> str:
        sizes = f"{self.outputs}x{self.inputs} {self.dtype}"
        parts = [sizes, f"{self.bits} bits in groups of {self.group}"]
        if self.mode != "affine":
            parts.append(self.mode)
        if self.deterministic:
            parts.append("deterministic")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class SealUse:
    """Packing full pages of keys or values that are alike.

    side: "keys" or "values"; heads, dim: of it; dtype: of hot pages, by MLX's name; bits: 8 or 4.
    """

    op: ClassVar[str] = "append"
    side: str
    heads: int
    dim: int
    dtype: str
    bits: int

    def __str__(self) -> str:
        return f"{self.side} {self.heads}/{self.dim} {self.dtype} to {self.bits} bits"


@dataclass(frozen=True, slots=True)
class NormUse:
    """A sum and its norm over rows that are alike.

    width: of a row; dtype: of all, by MLX's name; inner: whether there is a norm before the sum.
    """

    op: ClassVar[str] = "norm"
    width: int
    dtype: str
    inner: bool = False

    def __str__(self) -> str:
        return f"{self.width} {self.dtype}{', one before the sum' if self.inner else ''}"


@dataclass(frozen=True, slots=True)
class RopeUse:
    """Rotary positions for queries and keys that are alike.

    q_heads, kv_heads, dim: as in `AttentionUse`; dtype: of queries and keys, by MLX's name; norms:
    whether each head has a norm first.
    """

    op: ClassVar[str] = "rope"
    q_heads: int
    kv_heads: int
    dim: int
    dtype: str
    norms: bool = False

    def __str__(self) -> str:
        sizes = f"{self.q_heads}/{self.kv_heads}/{self.dim} {self.dtype}"
        return f"{sizes}{', norms' if self.norms else ''}"


Use = AttentionUse | ChunkUse | MatmulUse | SealUse | NormUse | RopeUse
