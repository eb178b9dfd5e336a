"""The work itself: rows are read, quantised and written, a piece at a time on each thread.

So there are a few pieces of PIECE_BYTES in memory, whatever the model's size, and each stays in the
caches of one core. A matrix can be cut anywhere between its rows, because each is quantised alone.
"""

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxserve import config
from mlxserve.errors import ModelError
from mlxserve.kernels.native import usable_cores
from mlxserve.kernels.quantize import quantize
from mlxserve.kernels.registry import native

from .plan import Item
from .source import Buffer
from .workspace import Squares, Workspace, checksum

PIECE_BYTES = 2 << 20  # of the source, about
ROWS = 32  # in multiples of these, so that every part of a piece is a number of whole words
QUEUED = 2  # pieces for each thread
# The smallest bits without a sign that stand for no finite number: infinity's.
INFINITY = {mx.float32: 0x7F800000, mx.float16: 0x7C00, mx.bfloat16: 0x7F80}
LOOK_NUMBERS = 1 << 17  # looked at together, while they are in the processor's cache


class _Piece(NamedTuple):
    """Rows start .. stop of an item; last: the item ends with it."""

    item: Item
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def last(self) -> bool:
        return self.stop == self.item.tensor.shape[0]


class _Written(NamedTuple):
    """A piece that is written. checksums: of its rows of each of the item's parts."""

    piece: _Piece
    checksums: list[int]
    squares: Squares | None


def convert_items(
    items: Sequence[Item], workspace: Workspace, report: Callable[[int], None]
) -> None:
    """Write these items to the workspace. report: told how many bytes of the source were read.

    Raises ModelError for a source that can't be read or has numbers that aren't finite, and OSError
    for what can't be written.
    """
    local = threading.local()
    largest = max((min(_step(i), i.tensor.shape[0]) * _row_bytes(i) for i in items), default=0)
    # On a GPU all would queue for it anyway.
    turn = threading.Lock() if native("quantize") is None else nullcontext()

    def start() -> None:
        local.buffer = Buffer(largest)

    def work(piece: _Piece) -> _Written:
        piece.item.tensor.fetch(piece.start, piece.stop, local.buffer)
        with turn:
            arrays, squares = _convert(piece, local.buffer)
        return _Written(piece, _write(piece, arrays, workspace), squares)

    threads = config.cpu_threads() or usable_cores()
    pieces, totals = _pieces(items), _Totals(workspace)
    queue: deque[Future[_Written]] = deque()
    with ThreadPoolExecutor(threads, "convert", initializer=start) as pool:
        try:
            while True:
                while len(queue) < QUEUED * threads and (piece := next(pieces, None)):
                    queue.append(pool.submit(work, piece))
                if not queue:
                    break
                written = queue.popleft().result()
                totals.add(written)
                tensor = written.piece.item.tensor
                report(tensor.read_bytes * written.piece.rows // tensor.shape[0])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _pieces(items: Sequence[Item]) -> Iterator[_Piece]:
    for item in items:
        rows, step = item.tensor.shape[0], _step(item)
        for start in range(0, rows, step):
            yield _Piece(item, start, min(start + step, rows))


def _step(item: Item) -> int:
    """Rows of a piece."""
    return max(1, PIECE_BYTES // max(1, _row_bytes(item)) // ROWS) * ROWS


def _row_bytes(item: Item) -> int:
    return math.prod(item.tensor.shape[1:]) * item.tensor.dtype.size


def _convert(piece: _Piece, buffer: Buffer) -> tuple[list[memoryview], Squares | None]:
    """A piece's rows of each of the item's parts, as bytes; and its sums if it is quantised."""
    item = piece.item
    source = item.tensor.array(buffer, piece.rows)
    w = source.astype(item.dtype)
    if item.scheme is None:
        _check_finite(item, source, w)
        return [_bytes(w)], None
    how = item.scheme
    made = quantize(w, how.bits, how.group_size, how.mode)
    parts = [part for part in (made.words, made.scales, made.biases) if part is not None]
    mx.eval(parts, made.errors)
    error, whole = np.array(made.errors, copy=False).sum(axis=0, dtype=np.float64).tolist()
    if not math.isfinite(whole):  # or the squares alone are too large
        _check_finite(item, source, w)
    return [_bytes(part) for part in parts], Squares(error, whole)


def _write(piece: _Piece, arrays: list[memoryview], workspace: Workspace) -> list[int]:
    """Write a piece's rows of each part, and return their checksums."""
    for part, data in zip(piece.item.parts, arrays, strict=True):
        workspace.write(part.name, data, piece.start * (data.nbytes // piece.rows))
    return [checksum(data) for data in arrays]


class _Totals:
    """Adds up what is known of an item, and notes it when all of its pieces are written."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._checksums: Counter[str] = Counter()
        self._squares: Squares | None = None

    def add(self, written: _Written) -> None:
        """One piece more, in their order."""
        piece, squares = written.piece, written.squares
        for part, value in zip(piece.item.parts, written.checksums, strict=True):
            self._checksums[part.name] = (self._checksums[part.name] + value) % 2**64
        if squares is not None:
            before = self._squares or Squares(0, 0)
            self._squares = Squares(before.error + squares.error, before.whole + squares.whole)
        if piece.last:
            self._workspace.finished(self._checksums, self._squares)
            self._checksums, self._squares = Counter(), None


def _check_finite(item: Item, source: mx.array, w: mx.array) -> None:
    """Raise ModelError if a number of a piece is NaN or infinite. w: the source in item's dtype."""
    if _all_finite(w):
        return
    if _all_finite(source):
        raise ModelError(
            f"tensor {item.tensor.name} has numbers that are too large for "
            f"{str(item.dtype).removeprefix('mlx.core.')}; take bfloat16 or float32"
        )
    raise ModelError(
        f"tensor {item.tensor.name} has numbers that are NaN or infinite; the model is damaged, "
        "download it again"
    )


def _all_finite(array: mx.array) -> bool:
    size, infinity = array.dtype.size, INFINITY[array.dtype]
    flat, sign = np.frombuffer(_bytes(array), f"<u{size}"), 1 << 8 * size - 1
    for start in range(0, flat.size, LOOK_NUMBERS):
        part = flat[start : start + LOOK_NUMBERS]
        # As whole numbers: with a sign the largest is a positive one, without it a negative one.
        if part.view(f"<i{size}").max() >= infinity or part.max() >= sign | infinity:
            return False
    return True


def _bytes(array: mx.array) -> memoryview:
    """The array's own memory."""
    return memoryview(array).cast("B")  # type: ignore[arg-type]
