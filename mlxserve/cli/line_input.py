"""Where a chat's lines come from: an editor at the terminal, or stdin line by line."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mlxserve import config
from mlxserve.errors import RequestError

if TYPE_CHECKING:
    from prompt_toolkit.history import History


class LineInput(Protocol):
    """Raises EOFError at the end, and KeyboardInterrupt for Ctrl-C, which drops the line."""

    def read(self) -> str:
        """The next message."""
        ...


class PipedLines:
    """Each line of stdin is a message. Raises RequestError for a line that isn't UTF-8."""

    def __init__(self) -> None:
        self._n = 0

    def read(self) -> str:
        """The next line, without its end."""
        data = sys.stdin.buffer.readline()
        if not data:
            raise EOFError
        self._n += 1
        try:
            return data.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise RequestError(
                f"line {self._n} of stdin isn't valid UTF-8: byte 0x{data[error.start]:02x} at "
                f"offset {error.start}; convert it first"
            ) from None


class EditedLines:
    """Line editing: Enter sends, Alt-Enter starts a new line, arrows find earlier messages.

    commands: words that Tab completes at the beginning of a line.
    """

    def __init__(self, commands: Sequence[str]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.key_binding import KeyBindings

        keys = KeyBindings()

        @keys.add("enter")
        def _send(event: Any) -> None:
            event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def _new_line(event: Any) -> None:
            event.current_buffer.insert_text("\n")

        self._session: PromptSession[str] = PromptSession(
            history=_history(config.home() / "chat_history"),
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            multiline=True,
            prompt_continuation="  ",
            key_bindings=keys,
        )

    def read(self) -> str:
        """The next message; it may have several lines."""
        return self._session.prompt("> ")


def _history(path: Path) -> "History":
    """Lines of earlier chats, kept in a file that only its owner can read."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class KeptHistory(FileHistory):
        """A line that can't be kept must not end the chat."""

        def store_string(self, string: str) -> None:
            with suppress(OSError):
                super().store_string(string.encode(errors="replace").decode())

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return KeptHistory(path)
