"""The directory where a conversion grows, beside its target, until it takes the target's name.

It outlives an interruption: `state.json` says what it is a conversion of, and `journal` has a line
for each item that is written whole, with checksums of its tensors and, if it is quantised, sums of
squares. A line counts only if the tensors on the disk still have these checksums, so nothing
depends on what a crash lets through.
"""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TextIO

import numpy as np

from mlxserve.errors import ModelError
from mlxserve.files import read_json, replace
from mlxserve.report import count_bytes

from .shards import Place, Shard, create

logger = logging.getLogger(__name__)

STATE, JOURNAL, LOCK = "state.json", "journal", "lock"
PIECE_BYTES = 1 << 20
FLUSH_BYTES = 64 << 20  # written, until the disk is told to begin with them
FORMAT = 2  # of all this: a directory of another version starts over


class Squares(NamedTuple):
    """Sums over a matrix of the squares of what rounding changed, and of its numbers."""

    error: float
    whole: float


def checksum(data: bytes | memoryview) -> int:
    """The sum of 64-bit words; what is left over counts as one. Any page that is missing shows.

    Of pieces that are whole words, sums add up, modulo 2**64. Ten times as fast as a CRC.
    """
    whole = len(data) // 8 * 8
    rest = int.from_bytes(data[whole:], "little")
    words = np.frombuffer(data, "<u8", whole // 8)
    return (int(words.sum(dtype=np.uint64)) + rest) % 2**64


class Workspace:
    """A context manager: holds the lock, and the output files open. Used by one thread at a time.

    done: the names of the tensors that are written whole; squares: of those that are quantised, by
    the name of the first of their parts.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.parent / f".{target.name}.converting"
        self.done: set[str] = set()
        self.squares: dict[str, Squares] = {}
        self._lock: TextIO | None = None
        self._journal: TextIO | None = None
        self._files: dict[str, int] = {}
        self._places: Mapping[str, Place] = {}
        self._flusher: ThreadPoolExecutor | None = None
        self._flushes: list[Future[None]] = []
        self._unflushed_bytes = 0

    def held_bytes(self) -> int:
        """What an interrupted conversion has on the disk already."""
        if not self.path.is_dir():
            return 0
        return sum(f.stat().st_blocks * 512 for f in self.path.iterdir() if f.is_file())

    def __enter__(self) -> "Workspace":
        """Raises ModelError where another process works in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / LOCK).open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            self._lock = None
            raise ModelError(
                f"another process is converting to {self.target}; wait for it, or give another "
                "directory"
            ) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()
        if self._lock is not None:
            self._lock.close()

    def prepare(
        self, state: Mapping[str, Any], shards: Sequence[Shard], places: Mapping[str, Place]
    ) -> None:
        """Go on where an interrupted conversion of the same `state` was, or begin. Raises OSError.

        state: by what it is called -> its value; what differs is named in a warning.
        """
        state = {"format": FORMAT, **state}
        self._places = places
        if not self._resumable(state, shards):
            self.clear()
            for shard in shards:
                create(self.path, shard)
            replace(self.path / STATE, json.dumps(state).encode())
        for shard in shards:
            self._files[shard.file] = os.open(self.path / shard.file, os.O_RDWR)
        self._read_journal()
        self._journal = (self.path / JOURNAL).open("a", encoding="utf-8")
        self._flusher = ThreadPoolExecutor(1, "convert-flush")

    def write(self, name: str, data: memoryview, at: int) -> None:
        """Bytes of a tensor, `at` bytes after its first. Raises OSError."""
        place = self._places[name]
        at += place.offset
        while data:
            n = os.pwrite(self._files[place.file], data, at)
            data, at = data[n:], at + n

    def finished(self, checksums: Mapping[str, int], squares: Squares | None) -> None:
        """Note that an item is whole. checksums: `checksum` of each of its tensors."""
        if self._journal is None or self._flusher is None:
            raise ValueError("the workspace wasn't prepared")
        self._journal.write(json.dumps({"checksums": checksums, "squares": squares}) + "\n")
        self._journal.flush()
        self._note(checksums, squares)
        self._unflushed_bytes += sum(self._places[name].nbytes for name in checksums)
        if self._unflushed_bytes >= FLUSH_BYTES:  # or all would be waited for at the end
            self._unflushed_bytes = 0
            self._flushes.append(self._flusher.submit(self._flush))

    def publish(self) -> None:
        """Everything to the disk, and the target's name to this directory. Raises OSError."""
        for flush in self._flushes:  # an error is told to the call that met it, and to no other
            flush.result()
        self._flush()
        self._close()
        for name in (STATE, JOURNAL, LOCK):
            (self.path / name).unlink(missing_ok=True)
        os.rename(self.path, self.target)  # an empty directory gives way
        handle = os.open(self.target.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def clear(self) -> None:
        """Delete what an earlier conversion left, but for the lock."""
        self._close()
        for path in self.path.iterdir():
            if path.name == LOCK:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def discard(self) -> None:
        """Delete it."""
        self._close()
        shutil.rmtree(self.path, ignore_errors=True)

    def _resumable(self, state: Mapping[str, Any], shards: Sequence[Shard]) -> bool:
        if not (self.path / STATE).exists():
            return False
        try:
            before = read_json(self.path / STATE)
        except ModelError:
            before = {}
        changed = [key for key, value in state.items() if before.get(key) != value]
        if changed:
            logger.warning(
                "%s holds an interrupted conversion with another %s; starting over",
                self.path,
                " and ".join(changed),
            )
        return not changed and all(self._whole(shard) for shard in shards)

    def _whole(self, shard: Shard) -> bool:
        """Whether the file is there, in its size and with its header."""
        try:
            with (self.path / shard.file).open("rb") as f:
                return f.read(len(shard.header)) == shard.header and f.seek(0, 2) == shard.size
        except OSError:
            return False

    def _read_journal(self) -> None:
        path = self.path / JOURNAL
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        kept = []
        for line in text.splitlines():
            try:
                found = json.loads(line)
                checksums, squares = found["checksums"], found["squares"]
                squares = squares and Squares(*map(float, squares))
                whole = all(
                    name in self._places and self._checksum(name) == value
                    for name, value in checksums.items()
                )
            except (ValueError, TypeError, KeyError, AttributeError):  # the last line, cut off
                continue
            if whole:
                self._note(checksums, squares)
                kept.append(line + "\n")
        replace(path, "".join(kept).encode())
        if kept:
            size = count_bytes(sum(self._places[name].nbytes for name in self.done))
            logger.warning("going on with an interrupted conversion: %s are written", size)

    def _note(self, checksums: Mapping[str, int], squares: Squares | None) -> None:
        self.done |= checksums.keys()
        if squares is not None:
            self.squares[next(iter(checksums))] = squares

    def _checksum(self, name: str) -> int:
        place, total = self._places[name], 0
        for at in range(0, place.nbytes, PIECE_BYTES):
            n = min(PIECE_BYTES, place.nbytes - at)
            total += checksum(os.pread(self._files[place.file], n, place.offset + at))
        return total % 2**64

    def _flush(self) -> None:
        for handle in self._files.values():
            os.fsync(handle)

    def _close(self) -> None:
        if self._flusher is not None:
            self._flusher.shutdown(cancel_futures=True)
            self._flusher = None
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()
        if self._journal is not None:
            self._journal.close()
            self._journal = None
