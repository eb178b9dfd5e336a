"""The prompt-cache file: what a prompt's computation left in the cache, for a later process.

`file_header.py` says how it is laid out. It is written tensor by tensor and mapped for reading, so
that neither takes memory of its size. Every byte is covered by a CRC-32, which the standard library
computes faster than a disk reads (`verify`).
"""

import errno
import itertools
import json
import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mlxserve import files
from mlxserve.cache.file_header import (
    CHECKSUM,
    DTYPES,
    FORMAT,
    MAX_HEADER_BYTES,
    VERSION,
    Entry,
    Form,
    Header,
    Layout,
    decode,
    layout,
)
from mlxserve.errors import CapacityError, DamagedError, RequestError
from mlxserve.report import count_bytes, damaged, show, unsupported

PEEK_BYTES = 4096  # FORMAT is in them
THREADS = 2
REBUILD = "build it again with `mlxserve cache build`"

# Layers, names of parts, and whether they are states: what two files' groups are paired by.
_Key = tuple[tuple[int, ...], tuple[str, ...], bool]
# Gives the tensor of a name; for bfloat16 its bits, as uint16.
Tensors = Callable[[str], np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class SavedCache:
    """A file that `read` has mapped. Its pages and states aren't checked before `verify`."""

    path: Path
    header: Header
    layout: Layout
    data: mmap.mmap

    def tensor(self, name: str) -> np.ndarray:
        """One of the tensors that `file_header.py` lists: read-only, mapped, not copied.

        bfloat16 comes as its bits, uint16. Raises KeyError for one that isn't there.
        """
        entry = self.layout.entries[name]
        dtype, shape = DTYPES[entry.form.dtype][1], entry.form.shape
        return np.frombuffer(self.data, dtype, math.prod(shape), entry.offset).reshape(shape)

    @property
    def tokens(self) -> np.ndarray:
        """The prompt's ids, int32 `[tokens]`."""
        return self.tensor("tokens")


def check_target(path: Path) -> None:
    """Raises RequestError if `write` can't make a file there: to ask before a long computation.

    It replaces an older cache, and nothing else: a slip must not cost somebody the prompt's text.
    """
    if os.path.isdir(path):
        raise RequestError(f"{path} is a directory; give the name of a file")
    if os.path.exists(path) and not (os.path.isfile(path) and _replaceable(path)):
        raise RequestError(f"{path} is there and no prompt cache; remove it or give another name")
    if not os.path.isdir(path.parent):
        raise RequestError(f"{path}: there is no directory {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise RequestError(f"{path}: files can't be made in {path.parent}; choose another place")


def _replaceable(path: Path) -> bool:
    """Whether it is empty or begins as our files do, be it a damaged one."""
    try:
        with path.open("rb") as f:
            start = f.read(PEEK_BYTES)
    except OSError as e:
        raise RequestError(f"{path}: {e.strerror}; choose another place") from None
    return not start or FORMAT.encode() in start


def write(path: Path, header: Header, tensors: Tensors) -> None:
    """Write a whole file, or nothing: until the end, who opens `path` gets the one before.

    tensors: is asked for one tensor of `header` after the other, `tokens` first, in the form that
    the header gives. In a last page that isn't full, rows after the last token must be 0: what
    another request left there is not for this file. Raises ValueError for tensors that aren't what
    the header says, RequestError where no file can be made, and CapacityError where it has no room.
    """
    path = Path(path)
    check_target(path)
    where = layout(header)
    sums = [0] * where.entries["checksums"].form.shape[0]
    sums[0] = zlib.crc32(where.prefix)
    at = len(where.prefix) + 4 * len(sums)
    try:
        with files.replacing(path) as f:
            f.seek(at)  # the checksums come at the end
            for name, entry in where.entries.items():
                if name != "checksums":
                    rows = slice(entry.checksum, entry.checksum + entry.rows)
                    sums[rows] = _put(f, name, entry, tensors(name), sums[rows])
            f.seek(0)
            f.write(where.prefix + _sealed(sums))
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            size = count_bytes(where.size_bytes)
            raise CapacityError(
                f"{path}: it takes {size}, which have no room there ({e.strerror}); make room, or "
                "choose another place"
            ) from None
        raise RequestError(f"{path}: it can't be written ({e.strerror})") from None


def _put(f: BinaryIO, name: str, entry: Entry, array: np.ndarray, sums: Sequence[int]) -> list[int]:
    """Write a tensor, and carry on the checksums of its rows."""
    form, dtype = entry.form, DTYPES[entry.form.dtype][1]
    if array.dtype != dtype or array.shape != form.shape:
        raise ValueError(
            f"{name} is {array.dtype} {array.shape}, expected {dtype} {form.shape} ({form.dtype})"
        )
    if entry.blank and array[-1, :, -entry.blank :].any():
        raise ValueError(f"{name} has numbers other than 0 after the last token")
    data = np.ascontiguousarray(array).data.cast("B")
    f.write(data)
    return _add(sums, data)


def _add(sums: Sequence[int], data: memoryview) -> list[int]:
    """Each row's checksum, carried on over its part of a tensor's bytes."""
    step = len(data) // len(sums)
    return [zlib.crc32(data[i * step : (i + 1) * step], old) for i, old in enumerate(sums)]


def _sealed(sums: Sequence[int]) -> bytes:
    """The checksums' bytes; the last is that of the others."""
    data = np.array(sums[:-1], CHECKSUM).tobytes()
    return data + zlib.crc32(data).to_bytes(4, "little")


def read(path: Path) -> SavedCache:
    """Map a file, once its header, tokens and checksums are found to be sound.

    It must not be written in place meanwhile; `write` never does. Raises DamagedError, or
    ModelError for a file that can't be opened, is none of these or comes from another version.
    """
    path = Path(path)
    # To open a pipe would wait for its writer.
    if os.path.exists(path) and not os.path.isfile(path):
        raise unsupported(path, "it is not a regular file; give a prompt cache")
    try:
        with path.open("rb") as f:
            if FORMAT.encode() not in f.read(PEEK_BYTES):
                raise unsupported(
                    path, "it is not a prompt cache; `mlxserve cache build` makes them"
                )
            data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as e:
        raise unsupported(path, f"{e.strerror}; check the path") from None
    header, where = _read_header(path, data)
    if where.size_bytes != len(data):
        raise _damaged(path, f"it has {len(data)} bytes and should have {where.size_bytes}")
    saved = SavedCache(path, header, where, data)
    sums = saved.tensor("checksums")
    if sums.tobytes() != _sealed(sums.tolist()):
        raise _damaged(path, "its checksums aren't as they were written")
    if sums[1] != zlib.crc32(saved.tokens.data):
        raise _damaged(path, "its tokens aren't as they were written")
    return saved


def _read_header(path: Path, data: mmap.mmap) -> tuple[Header, Layout]:
    length = int.from_bytes(data[:8], "little")
    if length > min(len(data) - 12, MAX_HEADER_BYTES - 8):
        raise _damaged(path, f"a header of {length} bytes can't be in {len(data)} bytes")
    prefix, checksum = data[: 8 + length], data[8 + length : 12 + length]
    if zlib.crc32(prefix) != int.from_bytes(checksum, "little"):
        raise _damaged(path, "its header isn't as it was written")
    try:
        listed = json.loads(prefix[8:])
        metadata = listed["__metadata__"]
        if metadata["version"] != str(VERSION):
            version = show(metadata["version"])
            raise unsupported(path, f"it has version {version}, this reads {VERSION}; {REBUILD}")
        header = decode(metadata["contents"], len(listed) - 1)
        where = layout(header)
    except (ValueError, TypeError, LookupError, RecursionError) as e:
        raise _damaged(path, f"its header can't be right ({show(str(e))})") from None
    if where.prefix != prefix:
        raise _damaged(path, "its header can't be right (it isn't what describes its contents)")
    return header, where


def _damaged(path: Path, what: str) -> DamagedError:
    return damaged(path, what, REBUILD)


def verify(saved: SavedCache) -> None:
    """Raises DamagedError, which names the first of them, if a page or a state has changed."""
    if found := damage(saved):
        more = f", and {len(found) - 1} more" if found[1:] else ""
        raise _damaged(saved.path, f"{found[0]} isn't as it was written{more}")


def damage(saved: SavedCache) -> list[str]:
    """The pages and states that aren't as they were written, by name; none in a sound file.

    Reads everything, in two threads: 366 MB that the system had in memory took 70 to 115 ms with
    two on a shared 2-core EPYC, and 175 ms with one.
    """
    sharing: dict[int, list[Entry]] = {}
    for entry in saved.layout.entries.values():
        sharing.setdefault(entry.checksum, []).append(entry)
    jobs: list[tuple[list[Entry], range]] = []
    for first in sorted(sharing)[2:]:  # 0 and 1, `read` checked
        rows = sharing[first][0].rows
        step = -(-rows // THREADS)
        jobs += [(sharing[first], range(rows)[at : at + step]) for at in range(0, rows, step)]
    with memoryview(saved.data) as data, ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda job: _sums(data, *job), jobs))
    written = saved.tensor("checksums")[2:-1].tolist()
    names = _names(saved.header)
    return [
        name
        for name, old, new in zip(names, written, itertools.chain(*found), strict=True)
        if old != new
    ]


def _sums(data: memoryview, entries: Sequence[Entry], rows: range) -> list[int]:
    """The checksums of some rows, over all tensors that share them."""
    sums = [0] * len(rows)
    for entry in entries:
        step = entry.form.nbytes // entry.rows
        begin = entry.offset + rows.start * step
        sums = _add(sums, data[begin : begin + step * len(rows)])
    return sums


def _names(header: Header) -> Iterator[str]:
    """What each checksum is of, from the third on."""
    for group in header.groups:
        if group.pages is None:
            for layer, part in itertools.product(group.layers, group.parts):
                yield f"{part.replace('.', ' ')} of layer {layer}"
        for page in group.pages or ():
            first = page * header.page_tokens
            last = min(first + header.page_tokens, header.tokens) - 1
            yield f"page {page} (tokens {first:,} to {last:,}) of {layer_names(group.layers)}"


def layer_names(layers: Sequence[int]) -> str:
    """`layers 0 to 4, 6`"""
    return f"layer{'s' * (len(layers) > 1)} {ranges(layers)}"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers for people: `0 to 4, 6`."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    return ", ".join(" to ".join(f"{n:,}" for n in run) for run in runs)


def check_fingerprint(saved: SavedCache, expected: Mapping[str, str]) -> None:
    """Raises RequestError, which names what differs, unless the fingerprint is the expected one."""
    old = saved.header.fingerprint
    found = [f"{name} {_shown(a)}, not {_shown(b)}" for name, a, b in _differing(old, expected)]
    if found:
        raise RequestError(f"{saved.path}: it was made with {'; '.join(found)}; {REBUILD}")


def _differing(
    a: Mapping[str, str], b: Mapping[str, str]
) -> Iterator[tuple[str, str | None, str | None]]:
    for name in dict.fromkeys([*a, *b]):
        if a.get(name) != b.get(name):
            yield name, a.get(name), b.get(name)


def _shown(value: str | None) -> str:
    return "unknown" if value is None else show(value, 200)


def diff(a: SavedCache, b: SavedCache) -> list[str]:
    """What differs between two files, a line each; none if they hold the same.

    Goes by their checksums, so that pages aren't read: `verify` both first where that matters.
    """
    lines = [
        f"{name}: {_shown(old)} and {_shown(new)}"
        for name, old, new in _differing(a.header.fingerprint, b.header.fingerprint)
    ]
    if not np.array_equal(a.tokens, b.tokens):
        n = min(len(a.tokens), len(b.tokens))
        first = int(np.append(a.tokens[:n] != b.tokens[:n], True).argmax())
        lines.append(
            f"tokens: {len(a.tokens):,} and {len(b.tokens):,}, the first {first:,} are the same"
        )
    if a.header.page_tokens != b.header.page_tokens:
        lines.append(f"page_tokens: {a.header.page_tokens} and {b.header.page_tokens}")
    old, new = _groups(a), _groups(b)
    for key in dict.fromkeys([*old, *new]):
        name = f"{layer_names(key[0])}, {' '.join(key[1])}"
        if key not in old or key not in new:
            lines.append(f"{name}: only in {(a if key in old else b).path}")
        elif old[key][0] != new[key][0]:
            lines.append(f"{name}: {_forms(old[key][0])} and {_forms(new[key][0])}")
        else:
            what = f"{name}: {'states' if key[2] else 'pages'}"
            lines += _diff_rows(what, (a.path, old[key][1]), (b.path, new[key][1]))
    if a.layout.size_bytes != b.layout.size_bytes:
        lines.append(f"bytes: {a.layout.size_bytes:,} and {b.layout.size_bytes:,}")
    return lines


def _diff_rows(
    what: str, a: tuple[Path, dict[int, int]], b: tuple[Path, dict[int, int]]
) -> Iterator[str]:
    """Two groups' pages or states, numbers to checksums, each with its file's path."""
    for (path, rows), (_, others) in ((a, b), (b, a)):
        if only := sorted(rows.keys() - others):
            yield f"{what} {ranges(only)} only in {path}"
    both = a[1].keys() & b[1]
    if differing := sorted(row for row in both if a[1][row] != b[1][row]):
        yield f"{what} {ranges(differing)} differ, {len(both) - len(differing):,} are the same"


def _groups(saved: SavedCache) -> dict[_Key, tuple[list[Form], dict[int, int]]]:
    """Of each group, the forms of its parts, and the checksums of its pages or states."""
    sums = iter(saved.tensor("checksums")[2:].tolist())
    found: dict[_Key, tuple[list[Form], dict[int, int]]] = {}
    for group in saved.header.groups:
        states = range(len(group.layers) * len(group.parts))
        rows = states if group.pages is None else group.pages
        key = (group.layers, tuple(group.parts), group.pages is None)
        found[key] = list(group.parts.values()), {row: next(sums) for row in rows}
    return found


def _forms(forms: list[Form]) -> str:
    return ", ".join(f"{form.dtype} {list(form.shape)}" for form in forms)
