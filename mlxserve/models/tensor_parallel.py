"""One model over several processes: which layers a rank holds, and which part of their matrices.

Consecutive layers are a stage of a pipeline (Huang et al. 2018, arXiv:1811.06965); the first stage
has the embedding and the head too, since rank 0 draws the tokens. A stage's matrices are divided
among its ranks (tensor parallelism) as in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): a
rank has some heads, some of the MLP's inner channels and some of the vocabulary. So the matrices
before them are cut by outputs, those after them by inputs, whose results are added up over the
ranks: twice a layer. What isn't named here, such as norms, is whole on every rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Literal, NamedTuple

from mlxserve.errors import RequestError
from mlxserve.models.base import ALONE, Group, Sizes
from mlxserve.models.tensors import Shape, layer_of

# Channels and vocabularies are cut at multiples of it, where they are large enough: the smallest
# number of inputs that all kernels take of a packed matrix.
UNIT = 32


class Cut(NamedTuple):
    """Along which axis of `[outputs, inputs]` a matrix is cut, and what that axis counts."""

    axis: int
    counts: Literal["heads", "kv_heads", "inner", "vocabulary"]


# By the last name of the module. A bias is cut with its outputs.
CUTS: dict[str, Cut] = {
    "q_proj": Cut(0, "heads"),
    "k_proj": Cut(0, "kv_heads"),
    "v_proj": Cut(0, "kv_heads"),
    "o_proj": Cut(1, "heads"),
    "gate_proj": Cut(0, "inner"),
    "up_proj": Cut(0, "inner"),
    "down_proj": Cut(1, "inner"),
    "embed_tokens": Cut(0, "vocabulary"),
    "lm_head": Cut(0, "vocabulary"),
}


@dataclass(frozen=True, eq=False, slots=True)
class Shard:
    """What one rank holds of a model.

    group: the ranks that share the matrices of its layers; all_kv_heads, vocabulary_widths: of
    these, in their order. first, last: whether the model's first and last layer are among them.
    """

    group: Group
    layers: range
    first: bool
    last: bool
    heads: range
    kv_heads: range
    head_dim: int
    inner: range
    vocabulary: range
    vocabulary_widths: tuple[int, ...]
    all_kv_heads: tuple[range, ...]

    def region(self, name: str, shape: Shape) -> tuple[range, ...] | None:
        """The part of a checkpoint's tensor, a range for each axis; None: nothing of it.

        See `sources.Checkpoint`.
        """
        if not self._holds(name):
            return None
        ranges = [range(n) for n in shape]
        cut = cut_of(name)
        if cut is not None and cut.axis < len(shape):
            some: range = getattr(self, cut.counts)
            numbers = self.head_dim if cut.counts in ("heads", "kv_heads") else 1
            ranges[cut.axis] = range(some.start * numbers, some.stop * numbers)
        return tuple(ranges)

    def _holds(self, name: str) -> bool:
        if (layer := layer_of(name)) is not None:
            return layer in self.layers
        return self.first if cut_of(name) else self.last


def cut_of(name: str) -> Cut | None:
    """How the tensor of this name is cut; None: not at all."""
    return CUTS.get(name.split(".")[-2]) if "." in name else None


def shard_of(
    sizes: Sizes,
    group: Group = ALONE,
    groups: Mapping[str, int] | None = None,
    layers: range | None = None,
) -> Shard:
    """The part of a model for this rank: parts are as even as can be, larger ones first.

    layers: those of its stage; None: all.

    A rank has whole groups of query heads with their KV head. Where there are more ranks than KV
    heads, each of these is on several, which share its query heads. groups: by name, the group
    sizes of quantised tensors; a matrix that is cut by its inputs is cut between groups.

    Raises RequestError where a rank would have nothing, or part of a group.
    """
    ranks, dim = group.size, sizes.head_dim
    shared = {"query heads": sizes.heads, "inner channels": sizes.inner, "ids": sizes.vocab_size}
    for what, n in shared.items():
        if ranks > n:
            raise RequestError(f"{ranks} processes can't share {n} {what}; use {n} at the most")
    largest = _largest_groups(groups or {})
    columns, matrix = largest.get("heads", (1, ""))
    heads = divide_heads(sizes.heads, sizes.kv_heads, ranks, unit=columns // gcd(columns, dim))
    if any(not q or q.start * dim % columns or q.stop * dim % columns for q, _ in heads):
        raise _between_groups(matrix, columns, f"{sizes.heads} heads of {dim}", ranks)
    columns, matrix = largest.get("inner", (1, ""))
    inner = divide(sizes.inner, ranks, unit=max(columns, _unit(sizes.inner, ranks)))
    if not inner[-1]:
        raise _between_groups(matrix, columns, f"{sizes.inner}", ranks)
    vocabulary = divide(sizes.vocab_size, ranks, _unit(sizes.vocab_size, ranks))
    layers = range(sizes.layers) if layers is None else layers
    return Shard(
        group,
        layers,
        layers.start == 0,
        layers.stop == sizes.layers,
        *heads[group.rank],
        sizes.head_dim,
        inner[group.rank],
        vocabulary[group.rank],
        tuple(len(ids) for ids in vocabulary),
        tuple(kv_heads for _, kv_heads in heads),
    )


def divide(total: int, parts: int, unit: int = 1) -> list[range]:
    """So many ranges that make up `range(total)` and begin at multiples of `unit`.

    As even as that allows, larger ones first; the last may be empty.
    """
    each, more = divmod(-(-total // unit), parts)
    ends = [min(total, unit * (each * i + min(i, more))) for i in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(ends)]


def divide_heads(heads: int, kv_heads: int, parts: int, unit: int = 1) -> list[tuple[range, range]]:
    """Query heads, and the KV heads that they attend with, in so many parts.

    unit: how many query heads stay together, where that is possible.
    """
    sharing = heads // kv_heads
    if parts <= kv_heads:
        together = unit // gcd(unit, sharing)
        return [
            (range(kv.start * sharing, kv.stop * sharing), kv)
            for kv in divide(kv_heads, parts, together)
        ]
    out = []
    for kv, ranks in enumerate(divide(parts, kv_heads)):
        first = kv * sharing
        for q in divide(sharing, len(ranks), unit):
            out.append((range(first + q.start, first + q.stop), range(kv, kv + 1)))
    return out


def _unit(total: int, parts: int) -> int:
    return UNIT if total >= UNIT * parts else 1


def _largest_groups(groups: Mapping[str, int]) -> dict[str, tuple[int, str]]:
    """Of what inputs count: the largest group that they may be cut between, and of which matrix.

    All sizes are powers of 2.
    """
    largest: dict[str, tuple[int, str]] = {}
    for name, size in groups.items():
        cut = cut_of(name)
        if cut is not None and cut.axis == 1 and size > largest.get(cut.counts, (0, ""))[0]:
            largest[cut.counts] = max(size, UNIT), name
    return largest


def _between_groups(matrix: str, columns: int, what: str, ranks: int) -> RequestError:
    return RequestError(
        f"{ranks} processes can't share the {what} columns of {matrix}, which is quantised and can "
        f"only be cut between groups of {columns}; use fewer processes, or convert the model with "
        "a smaller group size"
    )
