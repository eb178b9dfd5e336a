"""`mlxserve chat`: a conversation at the terminal, or one question per line of stdin."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from mlxserve.cli import conversation, options, terminal
from mlxserve.cli.conversation import Conversation
from mlxserve.config import DEFAULT_MODEL
from mlxserve.errors import EngineDead, InvariantError, MlxserveError, RequestError

if TYPE_CHECKING:
    from collections.abc import Generator

    from mlxserve.cli.line_input import LineInput
    from mlxserve.llm import LLM
    from mlxserve.types import Completion, Piece

EPILOG = """\b
Examples:
  mlxserve chat --system 'Answer in one sentence.' --temp 0.7
  printf 'My name is Ada.\\nWhat is my name?\\n' | mlxserve chat --quiet
"""


@options.takes_engine
@options.takes_sampling
def chat(
    model: options.ModelArgument = DEFAULT_MODEL,
    system: options.System = None,
    plain: Annotated[bool, typer.Option("--plain", help="Don't render markdown.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Numbers after each answer.")] = False,
    quiet: options.Quiet = False,
    prompt_cache: options.PromptCache = None,
    no_prefix_cache: options.NoPrefixCache = False,
    *,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Talk with a model. It remembers the conversation; /help lists the commands.

    Enter sends, Alt-Enter starts a new line. Ctrl-C stops an answer, Ctrl-D leaves. Where stdin is
    no terminal, each of its lines is a message, and the exit code is 2 if one couldn't be answered.
    """
    terminal.end_on_broken_pipe()
    system = None if system is None else terminal.check_text("--system", system)
    name = terminal.check_text("MODEL", model)
    engine["prefix_cache"] = not no_prefix_cache
    saved = options.saved_prompt(prompt_cache, prefix_cache=not no_prefix_cache)

    from mlxserve.cli import models

    with models.load(name, engine, quiet=quiet, saved=saved) as llm:
        if llm.tokenizer.chat_template is None:
            raise RequestError(
                f"{name} has no chat template; continue texts with `mlxserve generate --raw`"
            )
        session = _Session(llm, system, sampling, plain=plain, stats=stats, quiet=quiet)
        if session.interactive and not quiet:
            terminal.note(f"{name}: /help lists the commands, Ctrl-D leaves.")
        raise typer.Exit(session.run())


class _Session:
    """One chat from its first line to its last."""

    def __init__(
        self,
        llm: "LLM",
        system: str | None,
        sampling: dict[str, Any],
        *,
        plain: bool,
        stats: bool,
        quiet: bool,
    ) -> None:
        self._llm = llm
        self._sampling = sampling
        self._chat = Conversation(system or None)
        self._stats = stats
        self._quiet = quiet
        self._last: Completion | None = None
        self._failed = False
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._styled = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._markdown = self._styled and not plain

    def run(self) -> int:
        """Read and answer until the end; return the exit code."""
        lines = self._lines()
        while True:
            try:
                line = lines.read()
                if line.strip() == "/quit":
                    break
                self._take(line)
            except EOFError:
                break
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self._note("Ctrl-D or /quit leaves.")
            except (EngineDead, InvariantError):
                raise
            except MlxserveError as error:
                terminal.note(f"error: {error}")
                self._failed = not self.interactive
        return 2 if self._failed else 0

    def _lines(self) -> "LineInput":
        from mlxserve.cli.line_input import EditedLines, PipedLines

        return EditedLines([*_COMMANDS, "/quit"]) if self.interactive else PipedLines()

    def _take(self, line: str) -> None:
        if not line.startswith("/"):
            if line.strip():
                self._answer(line.strip())
            return
        name, _, argument = line.partition(" ")
        if name.strip() not in _COMMANDS:
            raise RequestError(
                f"unknown command {name.strip()}; there are {', '.join(_COMMANDS)}, /quit. "
                "A space before it makes it a message"
            )
        _COMMANDS[name.strip()](self, argument.strip())

    def _answer(self, question: str) -> None:
        """Ask the model, show what it says, and remember both."""
        from mlxserve.cli.answer_view import AnswerView
        from mlxserve.text.thinking import Part, ThinkingSplitter, opens_thinking

        messages = self._chat.prompt(question)
        prompt = self._llm.tokenizer.render_chat(messages)
        self._check_length(prompt)
        splitter = ThinkingSplitter(thinking=opens_thinking(prompt))
        view = AnswerView(sys.stdout, markdown=self._markdown, styled=self._styled)
        said: list[Part] = []

        def take(parts: list[Part]) -> None:
            for part in parts:
                said.append(part)
                view.show(part)

        done = None
        stopped = False
        try:
            stream = cast("Generator[Piece]", self._llm.stream(messages, **self._sampling))
            with closing(stream) as pieces, _no_echo():
                for piece in pieces:
                    take(splitter.feed(piece.text))
                    done = piece.completion
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            stopped = True
        finally:
            take(splitter.finish())
            view.finish()
        answer = "".join(part.text for part in said if not part.thinking)
        thinking = "".join(part.text for part in said if part.thinking).strip()
        if stopped and not said:
            self._note("stopped before the first word; the question is taken back.")
            return
        if thinking:
            answer = answer.lstrip("\n")
        self._chat.add(question, answer, thinking, interrupted=stopped)
        self._last = done
        self._report(done)

    def _check_length(self, prompt: str) -> None:
        n = len(self._llm.tokenizer.encode(prompt, add_special_tokens=False))
        room = self._llm.context_tokens - 1
        if n > room:
            raise RequestError(
                f"with this message the conversation has {n} tokens, and this model can take "
                f"{room} here; /save FILE keeps it, /reset starts over"
            )

    def _report(self, done: "Completion | None") -> None:
        """What there is to say after an answer."""
        if done is None:
            self._note("stopped; the model remembers what it said so far.")
            return
        if done.finish_reason == "length":
            total = done.usage.prompt_tokens + done.usage.completion_tokens
            if total >= self._llm.context_tokens:
                self._note("cut off: the context is full; /reset starts over.")
            else:
                self._note(f"cut off after {done.usage.completion_tokens} tokens (--max-tokens).")
        if self._stats:
            terminal.note(terminal.statistics(done))

    def _note(self, message: str) -> None:
        if not self._quiet:
            terminal.note(message)

    def _reset(self, argument: str) -> None:
        _no_argument("/reset", argument)
        self._chat.messages.clear()
        self._last = None
        kept = "" if self._chat.system is None else "; the system prompt stays"
        self._note(f"a new conversation{kept}.")

    def _system(self, argument: str) -> None:
        if argument:
            self._chat.system = None if argument == "-" else argument
        self._note(f"system prompt: {terminal.harmless(self._chat.system or 'none')}")

    def _save(self, argument: str) -> None:
        path = _path("/save", argument)
        self._chat.save(path)
        self._note(f"saved {len(self._chat.messages) // 2} turns to {path}")

    def _load(self, argument: str) -> None:
        path = _path("/load", argument)
        self._chat = conversation.load(path)
        self._last = None
        self._note(f"loaded {len(self._chat.messages) // 2} turns from {path}")

    def _show_stats(self, argument: str) -> None:
        _no_argument("/stats", argument)
        terminal.note(f"turns: {len(self._chat.messages) // 2}")
        messages = self._chat.all_messages()
        used = 0
        if messages:
            prompt = self._llm.tokenizer.render_chat(messages, add_generation_prompt=False)
            used = len(self._llm.tokenizer.encode(prompt, add_special_tokens=False))
        terminal.note(f"context: {used} of {self._llm.context_tokens} tokens")
        if self._last is not None:
            head = "last: "
            terminal.note(head + terminal.statistics(self._last, columns=80 - len(head)))

    def _help(self, argument: str) -> None:
        _no_argument("/help", argument)
        terminal.note(_HELP)


def _no_argument(name: str, argument: str) -> None:
    if argument:
        raise RequestError(f"{name} takes nothing after it, and there is {argument!r}")


def _path(name: str, argument: str) -> Path:
    if not argument:
        raise RequestError(f"{name} needs a file: {name} chat.json")
    return Path(argument).expanduser()


_COMMANDS: dict[str, Callable[[_Session, str], None]] = {
    "/help": _Session._help,
    "/reset": _Session._reset,
    "/system": _Session._system,
    "/save": _Session._save,
    "/load": _Session._load,
    "/stats": _Session._show_stats,
}

_HELP = """\
/reset        forget the conversation; the system prompt stays
/system TEXT  set the system prompt; - removes it, nothing shows it
/save FILE    write the conversation as JSON
/load FILE    go on with a saved conversation
/stats        how long the conversation is, and how fast the last answer was
/quit         leave (also Ctrl-D)
Enter sends, Alt-Enter starts a new line, Ctrl-C stops an answer.
A space before a message lets it begin with /."""


@contextmanager
def _no_echo() -> Iterator[None]:
    """Keep what is typed meanwhile off the screen, where an answer is being drawn."""
    if not sys.stdin.isatty():
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    # Not line by line either: a Ctrl-D would be gone by the next prompt, which it is meant for.
    modes = before[3] & ~(termios.ECHO | termios.ICANON)
    silent = [*before[:3], modes, *before[4:]]
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
