"""Tensors between ranks, over `mx.distributed`.

Ranks lie in a ring, in their order. Where layers are divided too, the ranks of a stage lie next to
each other, and stages follow each other:

    rank     0  1 | 2  3 | 4  5       three stages (pipeline) of two ranks each (tensor)

MLX's ring has collectives of all ranks only, and sends to neighbours. So all that goes between some
of them goes from neighbour to neighbour.
"""

import faulthandler
from collections.abc import Sequence
from functools import reduce

import mlx.core as mx

from mlxserve.errors import ModelError
from mlxserve.models.base import ALONE, Group

LEFT, RIGHT = -1, 1
MEET_S = 45  # for ranks to connect; MLX gives up after 31 s, but only where nobody listens
STDERR = 2


class Ranks:
    """All of them. See `models.base.Group`. rank: this process's; size: of how many."""

    def __init__(self, backend: str) -> None:
        """Meets the other ranks, and waits for them. Raises ModelError where that fails.

        MLX holds Python's lock while it waits for a rank, for ever: none of our threads would run.
        So where one doesn't come, the process ends with a traceback that shows this.
        """
        self._backend = backend
        faulthandler.dump_traceback_later(MEET_S, exit=True, file=STDERR)
        try:
            self._group = mx.distributed.init(strict=True, backend=backend)
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"the ranks can't reach each other over {backend}: {error}") from None
        finally:
            faulthandler.cancel_dump_traceback_later()
        self.rank: int = self._group.rank()
        self.size: int = self._group.size()
        self._ways: dict[int, mx.Stream] = {}

    def failed(self, error: Exception) -> bool:
        """Whether it's a collective's error: connections between ranks are broken."""
        return f"[{self._backend}]" in str(error)

    def sum(self, x: mx.array) -> mx.array:
        """x added up over all ranks, in the order of ranks: all get the same bits.

        Gathered and added here: MLX's own sum of more than two adds in an order that depends on a
        number's place in the array, and so on the batch; of two, it waits for two messages one
        after the other, and this for one.
        """
        parts = mx.distributed.all_gather(x[None], group=self._group)
        return reduce(mx.add, parts)

    def gather(self, x: mx.array, widths: Sequence[int]) -> mx.array:
        """`[..., widths[rank]]` of each rank, side by side: `[..., sum(widths)]`."""
        return _side_by_side(
            mx.distributed.all_gather(_widened(x, widths), group=self._group), widths
        )

    def send(self, x: mx.array, to: int) -> mx.array:
        """x for the neighbour to the LEFT or RIGHT. Returns what has to be evaluated.

        Each way has a stream of its own: one who waits for a neighbour goes on sending meanwhile,
        or two that send each other more than the system buffers would wait for ever.
        """
        if to not in self._ways:
            self._ways[to] = mx.new_stream(mx.cpu)
        neighbour = (self.rank + to) % self.size
        return mx.distributed.send(x, neighbour, group=self._group, stream=self._ways[to])

    def receive(self, shape: Sequence[int], dtype: mx.Dtype, at: int) -> mx.array:
        """What the neighbour to the LEFT or RIGHT sends."""
        return mx.distributed.recv(shape, dtype, (self.rank + at) % self.size, group=self._group)


class Neighbours:
    """Some ranks that lie next to each other, as a group of their own.

    first, size: which of all. They pass on what they have, both ways at once, until each has all.
    """

    def __init__(self, ranks: Ranks, first: int, size: int) -> None:
        self.rank = ranks.rank - first
        self.size = size
        self._ranks = ranks

    def sum(self, x: mx.array) -> mx.array:
        return reduce(mx.add, self._parts(x[None]))

    def gather(self, x: mx.array, widths: Sequence[int]) -> mx.array:
        return _side_by_side(self._parts(_widened(x, widths)), widths)

    def _parts(self, own: mx.array) -> mx.array:
        """`[1, ...]` of each rank: `[size, ...]`."""
        before, after = self.rank, self.size - 1 - self.rank
        shape, parts, sent = own.shape[1:], [own], []
        if before:
            parts.insert(0, self._ranks.receive((before, *shape), own.dtype, LEFT))
        if after:
            parts.append(self._ranks.receive((after, *shape), own.dtype, RIGHT))
            sent.append(self._ranks.send(mx.concatenate(parts[:-1]), RIGHT))
        if before:
            sent.append(self._ranks.send(mx.concatenate(parts[1:]), LEFT))
        (found,) = mx.depends([mx.concatenate(parts)], sent)
        return found


class Pipe:
    """See `engine.peers.Stage`. tensor: how many ranks a stage has.

    What a stage makes all its ranks have; the last one sends it to the first of the next stage,
    from which it goes from rank to rank.
    """

    def __init__(self, ranks: Ranks, tensor: int) -> None:
        number, place = divmod(ranks.rank, tensor)
        self.first = number == 0
        self.last = number == ranks.size // tensor - 1
        self._ranks = ranks
        self._at_end = place == tensor - 1

    def receive(self, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        x = self._ranks.receive(shape, dtype, LEFT)
        if not self._at_end:
            (x,) = mx.depends([x], [self._ranks.send(x, RIGHT)])
        return x

    def send(self, x: mx.array) -> mx.array:
        return self._ranks.send(x, RIGHT) if self._at_end else x


def divided(ranks: Ranks, tensor: int) -> tuple[Group, Pipe | None]:
    """Those that share each layer with this one, and its place in the pipeline, if there is one.

    tensor: how many share a layer, a divisor of the number of ranks.
    """
    if tensor == ranks.size:
        return ranks, None
    first = ranks.rank // tensor * tensor
    return (Neighbours(ranks, first, tensor) if tensor > 1 else ALONE), Pipe(ranks, tensor)


def _widened(x: mx.array, widths: Sequence[int]) -> mx.array:
    """x as wide as the widest, `[1, ..., max(widths)]`, so that all are alike."""
    return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, max(widths) - x.shape[-1])])[None]


def _side_by_side(parts: mx.array, widths: Sequence[int]) -> mx.array:
    return mx.concatenate([part[..., :n] for part, n in zip(parts, widths, strict=True)], -1)
