"""`mlxserve generate`: one prompt in, one answer out, as it is made."""

import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import typer

from mlxserve.cli import options, terminal
from mlxserve.config import DEFAULT_MODEL
from mlxserve.errors import RequestError

if TYPE_CHECKING:
    from mlxserve.llm import LLM, Completion

EPILOG = """\b
Examples:
  mlxserve generate --prompt 'Why is the sky blue?'
  mlxserve generate --prompt 'Name a cat' --temp 0.8 --top-p 0.95 --seed 7
  cat notes.txt | mlxserve generate --system 'Sum up in a line.' --prompt -
  mlxserve generate --raw --prompt 'Once upon a time' --stop . > story.txt
  cat book.txt question.txt | mlxserve generate --prompt-cache book.st -p -
"""


@options.takes_engine
@options.takes_sampling
def generate(
    prompt: options.Prompt,
    model: options.Model = DEFAULT_MODEL,
    system: options.System = None,
    raw: options.Raw = False,
    quiet: options.Quiet = False,
    prompt_cache: options.PromptCache = None,
    *,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Answer one prompt, word by word as the model makes it.

    Where the model has a chat template, the prompt is one message to it. The answer goes to stdout,
    and everything else to stderr.
    """
    terminal.end_on_broken_pipe()
    from mlxserve.cli import models

    system = options.check_system(system, raw=raw)
    model = terminal.check_text("--model", model)
    models.follow_if_told(model, engine)
    prompt = _read_prompt(prompt, raw=raw)
    saved = options.saved_prompt(prompt_cache)

    with models.load(model, engine, quiet=quiet, saved=saved) as llm:
        answer = _Answer(llm, models.as_prompt(llm, model, prompt, system, raw=raw))
        code = answer.stream(sampling)
        if not quiet:
            terminal.note(answer.statistics())
    raise typer.Exit(code)


def _read_prompt(prompt: str, *, raw: bool) -> str:
    if prompt == "-":
        if sys.stdin.isatty():
            terminal.note("reading the prompt; end it with Ctrl-D on a line of its own")
        prompt = terminal.decode(sys.stdin.buffer.read(), "stdin")
        # A message that came from `echo` should read like the same words after --prompt.
        prompt = prompt if raw else prompt.removesuffix("\n")
    if not prompt:
        raise RequestError("the prompt is empty; give --prompt some text")
    return terminal.check_text("--prompt", prompt)


class _Answer:
    """One answer on its way to stdout, and the numbers about it."""

    def __init__(self, llm: "LLM", prompt: str | list[dict[str, str]]) -> None:
        self._llm = llm
        self._prompt = prompt
        self._last = ""
        self._completion: Completion | None = None
        self._start_s = 0.0
        self._piece_s: list[float] = []

    def stream(self, sampling: dict[str, Any]) -> int:
        """Write the answer as it comes; return the exit code: 0, or that of Ctrl-C or SIGTERM."""
        import mlxserve

        self._start_s = time.perf_counter()
        try:
            for piece in mlxserve.stream(self._llm, self._prompt, **sampling):
                self._write(piece.text)
                self._completion = piece.completion
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except SystemExit as stop:
            return int(stop.code or 0)
        finally:
            if self._piece_s and not self._last.endswith("\n"):
                self._write("\n")
        return 0

    def _write(self, text: str) -> None:
        if text:
            self._last = text
            self._piece_s.append(time.perf_counter())
            sys.stdout.write(terminal.harmless(text) if sys.stdout.isatty() else text)
            sys.stdout.flush()

    def statistics(self) -> str:
        """One line of at most 80 columns: how much, how fast, and why it ended."""
        done = self._completion
        if done is None:
            if not self._piece_s:
                return "interrupted before the first token"
            first, last, n = self._piece_s[0], self._piece_s[-1], len(self._piece_s)
            rate = terminal.per_second((n - 1) / (last - first) if last > first else None)
            return f"interrupted: about {n} new{rate}, first after {first - self._start_s:.2f} s"
        return terminal.statistics(done)
