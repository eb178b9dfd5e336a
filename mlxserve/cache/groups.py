"""Layers of one spec share page ids; what such a group needs at a position. Integers only."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from mlxserve.cache.spec import (
    PAGE_TOKENS,
    UNPACKED,
    FullKV,
    KVBits,
    LayerSpec,
    State,
    WindowKV,
)
from mlxserve.errors import RequestError


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one spec.

    bits: of their sealed pages; page_tokens: 64, but in tests.
    """

    spec: LayerSpec
    layers: tuple[int, ...]
    bits: KVBits = UNPACKED
    page_tokens: int = PAGE_TOKENS

    @property
    def paged(self) -> bool:
        return not isinstance(self.spec, State)

    @property
    def window(self) -> int | None:
        return None if isinstance(self.spec, State) else self.spec.window

    @property
    def keep(self) -> int:
        return 0 if isinstance(self.spec, State) else self.spec.keep

    @property
    def kept_pages(self) -> int:
        """Pages at the beginning that a window never leaves behind."""
        return -(-self.keep // self.page_tokens)

    @property
    def cuts(self) -> bool:
        """Whether a prefix may end within a page: its tokens are as they were computed."""
        return self.spec.trims and not self.bits

    def first_seen(self, position: int) -> int:
        """Number of the oldest page that a query at `position`, or later, sees by its window."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.page_tokens

    @property
    def pages_at_most(self) -> int | None:
        """Sealed pages of a sequence that a later query may see; None: there is no bound."""
        if self.window is None:
            return None
        seen = (self.window + self.page_tokens - 2) // self.page_tokens + 1
        return seen + self.kept_pages


def group_layers(
    specs: Seq[LayerSpec], bits: KVBits = UNPACKED, page_tokens: int = PAGE_TOKENS
) -> list[LayerGroup]:
    """Layers of equal spec together, in the order of their first layer.

    Raises RequestError if pages are to be packed and a layer's can't be.
    """
    members: dict[LayerSpec, list[int]] = {}
    for index, spec in enumerate(specs):
        members.setdefault(spec, []).append(index)
        if bits and not spec.packs and not isinstance(spec, State):
            raise RequestError(
                f"layer {index} keeps {type(spec).__name__} pages, which can't be packed in 8 or 4 "
                "bits; leave kv_bits out"
            )
    return [
        LayerGroup(spec, tuple(layers), bits if spec.packs else UNPACKED, page_tokens)
        for spec, layers in members.items()
    ]


def rotating(specs: Seq[LayerSpec], max_tokens: int, keep: int) -> list[LayerSpec]:
    """The same layers with at most `max_tokens` tokens each, of which the first `keep` stay.

    Raises RequestError where a layer can't be bounded so, or `keep` leaves no room.
    """
    if not 0 <= keep < max_tokens:
        raise RequestError(
            f"keep is {keep}; it must be at least 0 and less than max_kv_size ({max_tokens})"
        )
    bounded: list[LayerSpec] = []
    for index, spec in enumerate(specs):
        match spec:
            case FullKV(heads, dim):
                spec = WindowKV(heads, dim, max_tokens - keep, keep)
            case WindowKV(window=window) if window > max_tokens:
                spec = replace(spec, window=max_tokens - keep, keep=keep)
            case WindowKV() | State():
                pass
            case _:
                raise RequestError(
                    f"layer {index} keeps {type(spec).__name__} pages, which max_kv_size can't "
                    "bound; leave it out"
                )
        bounded.append(spec)
    return bounded
