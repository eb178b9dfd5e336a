"""What the commands share: answers go to stdout, everything else goes through here to stderr."""

import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mlxserve import config
from mlxserve.errors import RequestError

if TYPE_CHECKING:
    from rich.progress import TaskID

    from mlxserve.types import Completion

# What a model must not send to a terminal: escape sequences move the cursor and set the clipboard.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


def note(message: str) -> None:
    """Print a line for the person at the terminal."""
    print(message, file=sys.stderr, flush=True)


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines in which the cells of a column begin alike."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


def end_on_broken_pipe() -> None:
    """Let `mlxserve ... | head` end this process quietly, as it ends any other Unix program.

    Not for a command that writes to sockets: there, too, a peer that went away would end it. So a
    rank leaves it out, too.
    """
    if config.placement() is not None:
        return
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def check_text(name: str, text: str) -> str:
    """Return `text`, or raise RequestError if the command line's bytes weren't valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} isn't valid UTF-8 at character {error.start}; check the terminal's encoding"
        ) from None
    return text


def decode(data: bytes, name: str) -> str:
    """What a file or stdin, `name`, holds as UTF-8. Raises RequestError."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} isn't valid UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}; "
            "convert it first"
        ) from None


def read_text(option: str, file: str) -> str:
    """The text of a file that an option names. Raises RequestError."""
    try:
        return decode(Path(file).read_bytes(), file)
    except OSError as error:
        raise RequestError(f"{option} {file}: {error.strerror}; give a text file") from None


def harmless(text: str) -> str:
    """`text` without control characters, but for tabs and newlines."""
    return text.translate(_CONTROLS)


def statistics(done: "Completion", columns: int = 80) -> str:
    """One line: how much, how fast, and why it ended; without rates where it would be too long."""
    line = _statistics(done, rates=True)
    return line if len(line) <= columns else _statistics(done, rates=False)


def _statistics(done: "Completion", *, rates: bool) -> str:
    usage, speed = done.usage, done.timings
    prompt = new = ""
    if rates:
        # What was in the cache took no time, and a rate over it would mislead.
        prompt = "" if usage.cached_tokens else per_second(speed.prefill_tokens_per_s)
        new = per_second(speed.decode_tokens_per_s)
    parts = [f"{usage.prompt_tokens} prompt tokens{prompt}"]
    if usage.cached_tokens:
        parts.append(f"{usage.cached_tokens} cached")
    parts.append(f"{usage.completion_tokens} new{new}")
    if speed.ttft_s is not None:
        parts.append(f"first after {speed.ttft_s:.2f} s")
    return f"{', '.join(parts)} ({done.finish_reason})"


def per_second(rate: float | None) -> str:
    """` at 12.3/s`, or nothing where there is no rate."""
    return "" if rate is None else f" at {rate:.1f}/s"


_STAGES = {
    "wait": "waiting for another pull",
    "download": "downloading",
    "check": "checking",
    "unpack": "unpacking",
    "load": "loading the model",
    "convert": "converting",
    "compare": "comparing",
    "upload": "uploading",
}


class Progress:
    """A context manager to hand over as `on_progress`: one bar on stderr, gone at the end.

    Where stderr is no terminal it prints the name of each stage that takes long once; `quiet`
    prints nothing.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bars: Any = None
        self._task: TaskID | None = None
        self._stage: str | None = None

    def __enter__(self) -> "Progress":
        return self

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Show that `done` of `total` bytes (None: not known) of `stage` are behind us."""
        if self._quiet:
            return
        if not sys.stderr.isatty() or stage == "upload":  # that has bars of huggingface_hub's
            self._stop()
            if stage != self._stage and stage != "load":
                note(f"{_STAGES.get(stage, stage)} ...")
            self._stage = stage
            return
        if stage != self._stage:
            self._start(stage, total)
        self._stage = stage
        if self._task is not None:
            self._bars.update(self._task, completed=done, total=total)

    def _start(self, stage: str, total: int | None) -> None:
        """Show another stage, in place of the one before."""
        self._stop()
        text = _STAGES.get(stage, stage)
        if stage == "load":
            self._bars, self._task = _spinner(text), None
        else:
            self._bars = _bars(in_bytes=stage != "compare")
            self._task = self._bars.add_task(text, total=total)
        self._bars.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = self._task = None


def _spinner(text: str) -> Any:
    from rich.console import Console

    return Console(stderr=True).status(text)


def _bars(*, in_bytes: bool) -> Any:
    # Imported late: it takes a tenth of a second, and a warm start shows no bar.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars

    return Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn() if in_bytes else TaskProgressColumn(),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        transient=True,
    )
