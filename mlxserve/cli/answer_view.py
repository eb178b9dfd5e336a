"""How an answer looks on the screen while it is made, and when it is done.

Text appears as it comes. A paragraph, list, table or code block that is complete is taken back and
printed again as rendered markdown, once; earlier ones are never touched, so nothing flickers and a
long answer scrolls away like any other output. What can't be taken back (a block taller than the
screen) or would lose characters in the rendering stays as the model wrote it.
"""

import io
import os
import re
from collections import Counter
from typing import Protocol, TextIO

from mlxserve.cli import terminal
from mlxserve.text.thinking import CLOSE, OPEN, Part

_DIM, _NORMAL = "\x1b[2m", "\x1b[0m"
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_FENCE = re.compile(r"`{3,}|~{3,}")
# What markdown says by shape and not by letters: languages of code blocks, numbers of lists.
_SHAPE = re.compile(r"^\s*(?:[`~]{3,}.*|\d{1,9}[.)]\s)", re.MULTILINE)
_SLACK_COLUMNS = 4


class AnswerText(Protocol):
    """Shows a text that arrives in pieces; `finish` ends its last line."""

    def feed(self, text: str) -> None: ...
    def finish(self) -> None: ...


class PlainText:
    """Text as it comes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last = "\n"

    def feed(self, text: str) -> None:
        """Show more of the text."""
        if text:
            self._out.write(text)
            self._out.flush()
            self._last = text

    def finish(self) -> None:
        """End the last line."""
        if not self._last.endswith("\n"):
            self.feed("\n")


class MarkdownText:
    """Markdown, block by block. For a terminal that understands ANSI escape codes.

    Lines are broken here, a little before the right edge, and not by the terminal: terminals
    differ in how wide they draw some characters, and to take a block back its height must be known.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._shown_any = False
        self._start_block()

    def _start_block(self) -> None:
        self._size = os.get_terminal_size(self._out.fileno())
        self._block: list[str] = []
        self._line = ""
        self._fence = ""
        self._after_blank = False
        self._newlines = 0  # seen, and written only with what follows them
        self._rows = 0
        self._column = 0

    def feed(self, text: str) -> None:
        """Show more of the text."""
        shown: list[str] = []
        for char in text:
            # An indented line goes on with a list's item, also after a blank line.
            if self._after_blank and not self._line and not char.isspace():
                self._write(shown)
                shown = []
                self._end_block()
            if not self._block:
                if char == "\n":
                    continue
                shown.append("\n" * self._shown_any)
            self._block.append(char)
            if char == "\n":
                self._newlines += 1
                self._end_line()
            else:
                self._line += char
                shown.append(self._place(char))
        self._write(shown)

    def finish(self) -> None:
        """Render what is left, and end the last line."""
        if self._block:
            self._end_block()

    def _place(self, char: str) -> str:
        """The character with the line breaks before it."""
        from rich.cells import cell_len

        char = "    " if char == "\t" else char
        width = cell_len(char)
        breaks, self._newlines = self._newlines, 0
        if not breaks and self._column + width > self._size.columns - _SLACK_COLUMNS:
            breaks = 1
        self._rows += breaks
        self._column = width if breaks else self._column + width
        return "\n" * breaks + char

    def _end_line(self) -> None:
        line, self._line = self._line.strip(), ""
        if self._fence:
            if line.startswith(self._fence) and not line.strip(self._fence[0]):
                self._fence = ""
        elif found := _FENCE.match(line):
            self._fence = found[0]
        self._after_blank = not line and not self._fence

    def _end_block(self) -> None:
        rendered = None
        # A block that began above the screen, or that a new size has wrapped anew, is out of reach.
        same_size = os.get_terminal_size(self._out.fileno()) == self._size
        if same_size and self._rows < self._size.lines - 1:
            rendered = render("".join(self._block), self._size.columns)
        up = f"\x1b[{self._rows}A" if self._rows else ""
        self._write(["\n"] if rendered is None else ["\r", up, "\x1b[J", rendered, "\n"])
        self._shown_any = True
        self._start_block()

    def _write(self, parts: list[str]) -> None:
        if parts:
            self._out.write("".join(parts))
            self._out.flush()


def render(markdown: str, columns: int) -> str | None:
    """Markdown with the terminal's colours and styles, or None if letters would be lost."""
    from markdown_it import MarkdownIt
    from rich.console import Console
    from rich.markdown import Markdown

    # rich leaves HTML out, so it is parsed as text; and it joins lines that a model has broken.
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    document = Markdown("", code_theme="ansi_dark", hyperlinks=False)
    document.parsed = parser.parse(markdown)
    for token in document.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    console = Console(file=io.StringIO(), force_terminal=True, width=columns, highlight=False)
    with console.capture() as captured:
        console.print(document)
    lines = [line.rstrip(" ") for line in captured.get().split("\n")]
    while lines and not _STYLE.sub("", lines[0]).strip():
        del lines[0]
    while lines and not _STYLE.sub("", lines[-1]).strip():
        del lines[-1]
    rendered = "\n".join(lines)
    lost = _letters(_SHAPE.sub("", markdown)) - _letters(_STYLE.sub("", rendered))
    return None if lost or not lines else rendered


def _letters(text: str) -> Counter[str]:
    return Counter(char for char in text if char.isalnum())


class AnswerView:
    """Shows an answer's parts: the thinking dimmed, and then the answer itself.

    markdown: render the answer. styled: `out` understands ANSI escape codes; where it doesn't,
    thinking keeps its tags. A terminal never gets a control character of the model's.
    """

    def __init__(self, out: TextIO, *, markdown: bool, styled: bool) -> None:
        self._out = out
        self._markdown = markdown
        self._styled = styled
        self._harmless = out.isatty()
        self._text: AnswerText | None = None
        self._thinking = False
        self._space = ""  # at the end of the thinking so far; written with what follows

    def show(self, part: Part) -> None:
        """Show the next part."""
        text = terminal.harmless(part.text) if self._harmless else part.text
        if part.thinking:
            self._think(text)
            return
        if self._thinking:
            self._write(f"{_NORMAL}\n\n" if self._styled else self._space + CLOSE)
            self._thinking = False
        if self._text is None:
            text = text.lstrip("\n") if self._styled else text
            if not text:
                return
            self._text = MarkdownText(self._out) if self._markdown else PlainText(self._out)
        self._text.feed(text)

    def finish(self) -> None:
        """End the last line, and all styles."""
        if self._text is not None:
            self._text.finish()
            self._text = None
        if self._thinking:
            self._write(f"{_NORMAL}\n" if self._styled else "\n")
            self._thinking = False

    def _think(self, text: str) -> None:
        if not self._thinking:
            text = text.lstrip() if self._styled else text
            if not text:
                return
            if self._text is not None:  # some models think again
                self.finish()
                self._write("\n")
            self._write(_DIM if self._styled else OPEN)
            self._thinking, self._space = True, ""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._write(shown)

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
