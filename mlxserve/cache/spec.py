"""What a layer keeps of a sequence, and for how long. Integers only.

Layers of equal spec form a group that shares page ids. What a kind can't do is asked here, before
work starts: `packs`, whether its sealed pages may be packed in 8 or 4 bits; `trims`, whether its
newest tokens can be taken off again, and so whether a prefix may be cut within a page.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

PAGE_TOKENS = 64
VALUE_GROUP = 32  # channels of a token that share a scale, in packed values
STATE_ITEMSIZE = 4  # recurrent states are float32, whatever the model's dtype


@dataclass(frozen=True, slots=True)
class KVBits:
    """Bits of a number in sealed pages, of keys and of values: 8, 4, or 0, as it was computed."""

    keys: int = 0
    values: int = 0

    def __bool__(self) -> bool:
        return bool(self.keys or self.values)

    @classmethod
    def of(cls, keys: int, values: int) -> "KVBits":
        """From what users ask for, where 16 stands for no packing."""
        return cls(*(0 if bits == 16 else bits for bits in (keys, values)))


UNPACKED = KVBits()


@dataclass(frozen=True, slots=True)
class FullKV:
    """Keys and values of every token: `[tokens, heads, dim]` each."""

    heads: int
    dim: int
    window: ClassVar[int | None] = None
    keep: ClassVar[int] = 0
    packs: ClassVar[bool] = True
    trims: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class WindowKV:
    """Keys and values of the last `window` tokens, the query's own included (Mistral, Gemma).

    keep: and of the first so many tokens, always (attention sinks, Xiao et al. 2023,
    arXiv:2309.17453).
    """

    heads: int
    dim: int
    window: int
    keep: int = 0
    packs: ClassVar[bool] = True
    trims: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Latent:
    """One vector per token, `[tokens, 1, rank + rope_dim]`, for all heads' keys and values.

    Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): the values are its first `rank`
    channels; the others are the part of the keys that is rotated.
    """

    rank: int
    rope_dim: int
    window: ClassVar[int | None] = None
    keep: ClassVar[int] = 0
    packs: ClassVar[bool] = False
    trims: ClassVar[bool] = True

    @property
    def heads(self) -> int:
        return 1

    @property
    def dim(self) -> int:
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class State:
    """Arrays of fixed shapes per sequence, whatever its length (recurrent layers)."""

    shapes: tuple[tuple[int, ...], ...]
    window: ClassVar[int | None] = None
    keep: ClassVar[int] = 0
    packs: ClassVar[bool] = False
    trims: ClassVar[bool] = False


PagedSpec = FullKV | WindowKV | Latent
LayerSpec = PagedSpec | State


def window_pages(spec: PagedSpec, page_tokens: int = PAGE_TOKENS) -> int | None:
    """The most sealed pages of a sequence that a query may see; None where there is no bound.

    A query sees its own token, `window - 1` tokens before it, and the first `keep`. Its window
    touches the most sealed pages where the page of its own token has just begun.
    """
    if spec.window is None:
        return None
    return -(-spec.keep // page_tokens) - (1 - spec.window) // page_tokens


def state_bytes(spec: State) -> int:
    """Bytes of one sequence's state, or of one snapshot of it, in one layer."""
    return sum(math.prod(shape) for shape in spec.shapes) * STATE_ITEMSIZE


def page_bytes(
    spec: PagedSpec, itemsize: int, bits: KVBits = UNPACKED, page_tokens: int = PAGE_TOKENS
) -> int:
    """Bytes of one sealed page in one layer. itemsize: of a number that isn't packed."""
    return sum(side_bytes(spec, itemsize, bits, page_tokens))


def side_bytes(
    spec: PagedSpec, itemsize: int, bits: KVBits = UNPACKED, page_tokens: int = PAGE_TOKENS
) -> tuple[int, ...]:
    """The same of its keys and its values apart, or of the one array that is both.

    Packed (see kernels/pages.py): a float16 scale and bias for each channel of the keys, and for 32
    channels of each token of the values.
    """
    numbers = spec.heads * spec.dim * page_tokens
    if isinstance(spec, Latent):
        return (numbers * itemsize,)
    channels = -(-spec.dim // VALUE_GROUP) * VALUE_GROUP
    groups = spec.heads * page_tokens * channels // VALUE_GROUP
    keys = spec.heads * spec.dim * (-(-page_tokens * bits.keys // 32) * 4 + 4)
    values = groups * (VALUE_GROUP * bits.values // 8 + 4)
    plain = numbers * itemsize
    return (keys if bits.keys else plain, values if bits.values else plain)


def token_bytes(specs: Sequence[LayerSpec], itemsize: int, bits: KVBits = UNPACKED) -> float:
    """Bytes that one more token takes over all layers, while no window is full."""
    pages = (page_bytes(s, itemsize, bits) for s in specs if not isinstance(s, State))
    return sum(pages) / PAGE_TOKENS
