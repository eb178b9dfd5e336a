"""What each step spent its time on, as a file for ui.perfetto.dev or chrome://tracing.

The format is the Trace Event Format: JSON, an object per event, times in microseconds.
"""

import json
import logging
import math
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from mlxserve.errors import RequestError

logger = logging.getLogger(__name__)

Track = Literal["engine", "device"]
MAX_BYTES = 1 << 30  # viewers take no more, and a server may run for months
TAIL = b'\n],"displayTimeUnit":"ms"}\n'


class Trace:
    """Writes a trace to `path`, which appears, complete, when it is closed. Engine thread only.

    Events go to a file next to it as they come, whose buffer is all the memory it takes. If that
    fails, a warning is logged, the file is deleted, and nothing more is recorded: requests go on.

    Raises RequestError if nothing can be written there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        head = b'{"traceEvents":[\n' + _metadata()
        self._bytes = len(head)
        try:
            if path.is_dir():
                raise IsADirectoryError(0, "it is a folder")
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            self._temporary = Path(temporary)
            self._file = os.fdopen(handle, "wb")
            self._file.write(head)
            self._file.flush()
        except OSError as error:
            self._discard()
            raise RequestError(
                f"{path}: a trace can't be written there ({error.strerror}); choose a file in a "
                "folder that can be written to"
            ) from None

    def span(
        self, name: str, start_s: float, end_s: float, *, track: Track = "engine", **args: Any
    ) -> None:
        """A phase of a step, in seconds of one clock; `args`, JSON values, are shown with it.

        Spans of one track follow each other or nest. Raises ValueError if it ends before it starts
        or isn't finite.
        """
        start, end = _nanoseconds(start_s), _nanoseconds(end_s)
        if end < start:
            raise ValueError(f"span {name!r} ends at {end_s} s, before its start at {start_s} s")
        # A difference of whole nanoseconds, so that spans which nest still do as written.
        self._event("X", name, start, track, dur=(end - start) / 1000, args=args)

    def counter(self, name: str, at_s: float, value: float) -> None:
        """The value of something over time, drawn as a graph. Raises ValueError if not finite."""
        self._event("C", name, _nanoseconds(at_s), "engine", args={"value": value})

    def close(self) -> None:
        """Complete the file and give it its name. It may be called again."""
        if self._file is None:
            return
        try:
            self._file.write(TAIL)
            self._file.close()
            os.replace(self._temporary, self.path)
        except OSError as error:
            self._fail(error)
        self._file = None

    def _event(self, ph: str, name: str, at_ns: int, track: Track, **fields: Any) -> None:
        if self._file is None:
            return
        event = b",\n" + _encode(ph, name, track, ts=at_ns / 1000, **fields)
        if self._bytes + len(event) > MAX_BYTES:
            logger.warning("the trace %s has %d bytes and is closed", self.path, self._bytes)
            self.close()
            return
        try:
            self._file.write(event)
            self._bytes += len(event)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        logger.warning("the trace %s is given up: %s", self.path, error.strerror)
        self._discard()

    def _discard(self) -> None:
        """Delete what was written, which also makes room on a full disk."""
        if self._file is None:
            return
        file, self._file = self._file, None
        with suppress(OSError):  # what is left in its buffer can't be written either
            file.close()
        with suppress(OSError):
            self._temporary.unlink()


def _metadata() -> bytes:
    """The events that name the process and its tracks."""
    events = [_encode("M", "process_name", "engine", args={"name": "mlxserve"})]
    for track in get_args(Track):
        events.append(_encode("M", "thread_name", track, args={"name": track}))
    return b",\n".join(events)


def _nanoseconds(seconds: float) -> int:
    if not math.isfinite(seconds):
        raise ValueError(f"a time of {seconds} s; it must be finite")
    return round(seconds * 1e9)


def _encode(ph: str, name: str, track: Track, **fields: Any) -> bytes:
    event = {"ph": ph, "name": name, "pid": os.getpid(), "tid": 1 + get_args(Track).index(track)}
    return json.dumps(event | fields, separators=(",", ":"), allow_nan=False).encode()
