"""The work itself: rows are read, quantised and written at the same time, a piece after the other.

At any time there are a few pieces of PIECE_BYTES in memory, whatever the model's size. A matrix can
be cut anywhere between its rows, because each is quantised alone.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlxserve.errors import ModelError
from mlxserve.kernels.quantize import quantize

from .plan import Item
from .source import all_finite
from .workspace import Squares, Workspace, checksum

PIECE_BYTES = 4 << 20  # of the source, about: it stays in the processor's cache until it is written
ROWS = 32  # in multiples of these, so that every part of a piece is a number of whole words
READ_AHEAD = 4
WRITES_QUEUED = 4
_BITS = {2: mx.uint16, 4: mx.uint32}


class _Piece(NamedTuple):
    """Rows start .. stop of an item; last: the item ends with it."""

    item: Item
    start: int
    stop: int

    @property
    def last(self) -> bool:
        return self.stop == self.item.tensor.shape[0]


def convert_items(
    items: Sequence[Item], workspace: Workspace, report: Callable[[int], None]
) -> None:
    """Write these items to the workspace. report: told how many bytes of the source were read.

    Raises ModelError for a source that can't be read or has numbers that aren't finite, and OSError
    for what can't be written.
    """
    writer = _Writer(workspace)
    with (
        ThreadPoolExecutor(1, "convert-read") as reading,
        ThreadPoolExecutor(1, "convert-write") as writing,
    ):
        ahead: deque[tuple[_Piece, Future[Any]]] = deque()
        behind: deque[Future[None]] = deque()
        pieces = _pieces(items)
        try:
            while True:
                while len(ahead) < READ_AHEAD and (piece := next(pieces, None)):
                    fetch = piece.item.tensor.fetch
                    ahead.append((piece, reading.submit(fetch, piece.start, piece.stop)))
                if not ahead:
                    break
                piece, fetched = ahead.popleft()
                arrays, squares = _convert(piece.item, fetched.result())
                while len(behind) >= WRITES_QUEUED:
                    behind.popleft().result()
                behind.append(writing.submit(writer.write, piece, arrays, squares))
                rows = piece.item.tensor.shape[0]
                report(piece.item.tensor.read_bytes * (piece.stop - piece.start) // rows)
            for write in behind:
                write.result()
        except BaseException:
            for _, fetched in ahead:
                fetched.cancel()
            raise


def _pieces(items: Sequence[Item]) -> Iterator[_Piece]:
    for item in items:
        rows = item.tensor.shape[0]
        row_bytes = max(1, item.parameters // rows * item.tensor.dtype.size)
        step = max(1, PIECE_BYTES // row_bytes // ROWS) * ROWS
        for start in range(0, rows, step):
            yield _Piece(item, start, min(start + step, rows))


def _convert(item: Item, fetched: Any) -> tuple[list[memoryview], Squares | None]:
    """A piece's rows of each of the item's parts, as bytes; and its sums if it is quantised."""
    w = item.tensor.array(fetched)
    if w.dtype != item.dtype:
        w = w.astype(item.dtype)
        if not all_finite(_numpy(w), item.dtype):
            raise ModelError(
                f"tensor {item.tensor.name} has numbers that are too large for "
                f"{str(item.dtype).removeprefix('mlx.core.')}; take bfloat16 or float32"
            )
    if item.scheme is None:
        return [_bytes(w)], None
    how = item.scheme
    made = quantize(w, how.bits, how.group_size, how.mode)
    parts = [part for part in (made.words, made.scales, made.biases) if part is not None]
    mx.eval(parts, made.errors)
    error, whole = np.array(made.errors, copy=False).sum(axis=0, dtype=np.float64).tolist()
    return [_bytes(part) for part in parts], Squares(error, whole)


def _numpy(array: mx.array) -> np.ndarray:
    """The array's own memory, floating numbers as their bits."""
    if mx.issubdtype(array.dtype, mx.floating):
        array = array.view(_BITS[array.dtype.size])
    return np.array(array, copy=False)


def _bytes(array: mx.array) -> memoryview:
    return _numpy(array).data.cast("B")


class _Writer:
    """Writes pieces in order and adds up what is known of the item they are of. On one thread.

    After one that failed no other is written: the thread that waits learns of it some pieces later.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._written: dict[str, int] = {}
        self._sums: dict[str, int] = {}
        self._squares: Squares | None = None
        self._failed = False

    def write(self, piece: _Piece, arrays: list[memoryview], squares: Squares | None) -> None:
        if self._failed:
            return
        self._failed = True
        for part, data in zip(piece.item.parts, arrays, strict=True):
            at = self._written.get(part.name, 0)
            self._workspace.write(part.name, data, at)
            self._written[part.name] = at + data.nbytes
            self._sums[part.name] = (self._sums.get(part.name, 0) + checksum(data)) % 2**64
        if squares is not None:
            before = self._squares or Squares(0, 0)
            self._squares = Squares(before.error + squares.error, before.whole + squares.whole)
        if piece.last:
            self._workspace.finished(self._sums, self._squares)
            self._written, self._sums, self._squares = {}, {}, None
        self._failed = False
