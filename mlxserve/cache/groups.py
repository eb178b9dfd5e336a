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
    window_pages,
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
        return self.spec.window

    @property
    def kept_pages(self) -> int:
        """Pages at the beginning that a window never leaves behind."""
        return -(-self.spec.keep // self.page_tokens)

    @property
    def cuts(self) -> bool:
        """Whether a prefix may end within a page: its tokens are as they were computed."""
        return self.spec.trims and not self.bits

    def first_seen(self, position: int) -> int:
        """Number of the oldest page that a query at `position`, or later, sees by its window."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.page_tokens

    @property
    def pages_at_most(self) -> int | None:
        """Sealed pages of a sequence, with one that isn't dropped yet; None: there is no bound."""
        bound = None if isinstance(self.spec, State) else window_pages(self.spec, self.page_tokens)
        return None if bound is None else bound + 1

    def held(self, pages: int) -> int:
        """How many of so many sealed pages a sequence holds at most."""
        bound = self.pages_at_most
        return pages if bound is None else min(pages, bound)


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

    keep: less than max_tokens. Raises RequestError where a layer can't be bounded so.
    """
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
