"""What a layer keeps per token, and for how long.

Layers of equal spec form a group that shares page ids.
"""

from dataclasses import dataclass

PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class FullKV:
    """Keys and values of every token: `[tokens, heads, dim]` each."""

    heads: int
    dim: int

    @property
    def window(self) -> int | None:
        return None


@dataclass(frozen=True, slots=True)
class WindowKV:
    """Keys and values of the last `window` tokens, the query's own included (Mistral, Gemma)."""

    heads: int
    dim: int
    window: int


LayerSpec = FullKV | WindowKV
