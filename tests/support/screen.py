"""A terminal for tests: a pseudo-terminal to run a program in, and a screen that shows its output.

The screen knows what mlxserve itself writes (text, newlines, moves up, clearing, styles), and keeps
what scrolls off the top.
"""

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence

_ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


class Screen:
    """`lines`: everything that was ever visible, oldest first; a row may be redrawn until it
    scrolls off."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.columns, self.rows = columns, rows
        self.lines = [""]
        self._row = self._column = 0
        self.dimmed = ""
        self._dim = False

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            if found := _ESCAPE.match(text, at):
                self._escape(found[1], found[2])
                at = found.end()
                continue
            self._put(text[at])
            at += 1

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)

    def _escape(self, numbers: str, what: str) -> None:
        match what:
            case "A":
                top = max(0, len(self.lines) - self.rows)
                self._row = max(top, self._row - int(numbers or 1))
            case "J":
                self.lines[self._row] = self.lines[self._row][: self._column]
                del self.lines[self._row + 1 :]
            case "m":
                self._dim = numbers == "2" or (self._dim and numbers not in ("0", ""))
            case _:
                raise AssertionError(f"escape code {numbers}{what}, which this screen doesn't know")

    def _put(self, char: str) -> None:
        if char == "\r":
            self._column = 0
            return
        if char == "\n" or self._column == self.columns:
            self._row, self._column = self._row + 1, 0
            if self._row == len(self.lines):
                self.lines.append("")
            if char == "\n":
                return
        assert char.isprintable(), f"{char!r} reached the terminal"
        line = self.lines[self._row].ljust(self._column)
        self.lines[self._row] = line[: self._column] + char + line[self._column + 1 :]
        self._column += 1
        if self._dim:
            self.dimmed += char


class Terminal:
    """A program in a pseudo-terminal. `send` types, `until` waits for output."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], rows: int = 24) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 80, 0, 0))
        self.output = ""
        self._seen = 0
        # Without an answer to where the cursor is, prompt_toolkit waits for one.
        env = {**env, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
            # So that Ctrl-C, typed, is a signal for the program.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)

    def send(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, text: str, timeout_s: float = 30) -> str:
        """The output since the last call, up to and with `text`."""
        end = time.monotonic() + timeout_s
        while text not in self.output[self._seen :]:
            left = end - time.monotonic()
            if left <= 0 or not self._read(left):
                raise AssertionError(f"no {text!r} in {self.output[self._seen :]!r}")
        start, self._seen = self._seen, self.output.index(text, self._seen) + len(text)
        return self.output[start : self._seen]

    def wait(self) -> int:
        """Read to the end; returns the exit code."""
        while self._read(30):
            pass
        return self.process.wait(60)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._ours], [], [], timeout_s)[0]:
            return False
        data = b""
        with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
            data = os.read(self._ours, 65536)
        self.output += data.decode(errors="replace")
        return bool(data)
