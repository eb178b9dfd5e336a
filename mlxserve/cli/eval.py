"""`mlxserve eval`: how well a model predicts a text, alone or beside another."""

import json
import math
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxserve.cli import options, terminal
from mlxserve.config import DEFAULT_MODEL
from mlxserve.errors import RequestError
from mlxserve.perplexity import perplexity, windows

if TYPE_CHECKING:
    from mlxserve.llm import LLM

DEFAULT_CONTEXT = 512
_number = partial(typer.Option, parser=options.whole, metavar="N")

Other = Annotated[str | None, typer.Argument(metavar="OTHER", help="A second model, to compare.")]
Perplexity = Annotated[
    str | None,
    typer.Option("--perplexity", metavar="FILE", help="The text for one model, as UTF-8."),
]
Text = Annotated[
    str | None,
    typer.Option(
        "--text",
        metavar="FILE",
        help="The text for two. [default: the one that `convert` measures with]",
    ),
]
Context = Annotated[
    int | None,
    _number("--context", help=f"Tokens the model sees at most. [default: {DEFAULT_CONTEXT}]"),
]
Stride = Annotated[
    int | None,
    _number(
        "--stride",
        help="Tokens from window to window. [default: half the context, for two all of it]",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="For scripts: one JSON object.")]


@options.takes_engine
def evaluate(
    model: options.ModelArgument = DEFAULT_MODEL,
    other: Other = None,
    perplexity: Perplexity = None,
    text: Text = None,
    context: Context = None,
    stride: Stride = None,
    as_json: Json = False,
    quiet: options.Quiet = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Measure a model's perplexity on a text, and its bits per byte; or compare two models.

    The text is read in windows of --context tokens that begin --stride tokens apart. All of the
    first window's tokens count, and of the others only those that are new. A smaller stride gives
    each token more context and takes longer. Bits per byte compare models whose tokens differ.
    With --kv-bits, they are those of the model with a packed cache.

    Of two models with one vocabulary: both perplexities, the Kullback-Leibler divergence of the
    second's next-token distributions from the first's (mean and 95th percentile, in nats), and for
    which share of tokens both find the same one likeliest.
    """
    terminal.end_on_broken_pipe()
    for name, value in (("--context", context), ("--stride", stride)):
        if value is not None and value < 1:
            raise RequestError(f"{name} is {value}; it must be at least 1")
    if context is not None:
        _check_stride(stride, context)
    model = terminal.check_text("MODEL", model)
    shown = {"as_json": as_json, "quiet": quiet}
    if other is None:
        file = _check_single(perplexity, text)
        code = _evaluate_one(model, file, engine, context=context, stride=stride, **shown)
        raise typer.Exit(code)
    if perplexity is not None:
        raise RequestError("--perplexity is for one model; give the text of two as --text")
    pair = (model, terminal.check_text("OTHER", other))
    words = _shipped_text() if text is None else _read("--text", text)
    from mlxserve.cli.eval_pair import evaluate_pair

    evaluate_pair(pair, words, engine, context=context, stride=stride, **shown)


def _check_single(perplexity: str | None, text: str | None) -> str:
    """The file that one model reads. Raises RequestError."""
    if perplexity is None:
        hint = "--text is for two models" if text is not None else "or give two models to compare"
        raise RequestError(f"--perplexity is missing; give a text file with it ({hint})")
    if text is not None:
        raise RequestError("--text is for two models, and this is one; give only --perplexity")
    return perplexity


def _evaluate_one(
    model: str,
    file: str,
    engine: dict[str, Any],
    *,
    context: int | None,
    stride: int | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Print a model's perplexity; returns the exit code."""
    text = _read("--perplexity", file)
    from mlxserve.cli import models

    with models.load(model, engine, quiet=quiet) as llm:
        context = _check_context(context, llm.context_tokens)
        _check_stride(stride, context)
        measured = _Perplexity(llm, file, text, context, stride or max(1, context // 2))
        code = measured.run(quiet=quiet)
    if measured.tokens:
        measured.show(as_json=as_json, complete=code == 0)
    return code


def _read(option: str, file: str) -> str:
    text = terminal.read_text(option, terminal.check_text(option, file))
    if not text:
        raise RequestError(f"{file} is empty; give a text of at least two tokens")
    return text


def _shipped_text() -> str:
    from mlxserve_convert.quality import HELD_OUT  # pyright: ignore[reportMissingImports]

    return HELD_OUT.read_text(encoding="utf-8")


def _check_context(context: int | None, limit: int) -> int:
    if context is None:
        return min(DEFAULT_CONTEXT, limit)
    if context > limit:
        raise RequestError(f"--context is {context}, and this model can take {limit} tokens here")
    return context


def _check_stride(stride: int | None, context: int) -> None:
    if stride is not None and stride > context:
        raise RequestError(
            f"--stride is {stride}, over the context of {context}, which would leave tokens out; "
            "make it smaller"
        )


class _Perplexity:
    """The sums over the tokens that were judged so far."""

    def __init__(self, llm: "LLM", file: str, text: str, context: int, stride: int) -> None:
        self.context = context
        self.stride = stride
        self.tokens = 0
        self._llm = llm
        self._ids = llm.tokenizer.encode(text)
        if len(self._ids) < 2:
            raise RequestError(f"{file} is a single token; perplexity needs at least two")
        self._size_bytes = len(text.encode())
        self._loss = 0.0

    def run(self, *, quiet: bool) -> int:
        """Judge window after window; return the exit code: 0, or that of Ctrl-C or SIGTERM."""

        ids = self._ids
        todo = windows(len(ids), self.context, self.stride)
        if not quiet and not sys.stderr.isatty():
            terminal.note(f"scoring {len(ids) - 1} tokens in {len(todo)} windows ...")
        code = 0
        try:
            for start, end, scored_from in todo:
                read = self._llm.prompt_logprobs(ids[start:end])
                judged = [found.logprob for found in read[scored_from - start :] if found]
                self._loss -= math.fsum(judged)
                self.tokens += end - scored_from
                self._show_progress(quiet)
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            self._clear_progress(quiet)
        if code:
            what = "the text's beginning" if self.tokens else "before the first window's end"
            terminal.note(f"interrupted: {what}")
        return code

    def _show_progress(self, quiet: bool) -> None:
        if not quiet and sys.stderr.isatty():
            share = self.tokens / (len(self._ids) - 1)
            print(
                f"\r{share:4.0%} of {len(self._ids) - 1} tokens, perplexity {self.perplexity:.4f} ",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def _clear_progress(self, quiet: bool) -> None:
        if not quiet and sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    @property
    def perplexity(self) -> float:
        return perplexity(self._loss / self.tokens)

    @property
    def counted_bytes(self) -> int:
        """Bytes of the text that the judged tokens stand for: all of it, but for a first token.

        As a share of the file's: where a tokenizer normalises, its tokens have other bytes.
        """
        tokenizer = self._llm.tokenizer
        sizes = [
            len(tokenizer.token_bytes(token)) if token < tokenizer.vocab_size else 0
            for token in self._ids
        ]
        if self._ids[0] in tokenizer.special_ids:  # most often the beginning-of-text token
            sizes[0] = 0
        return round(self._size_bytes * sum(sizes[1 : self.tokens + 1]) / (sum(sizes) or 1))

    def show(self, *, as_json: bool, complete: bool) -> None:
        """Print the results: one `name: value` per line, or one JSON object."""
        counted_bytes = self.counted_bytes
        bits = self._loss / math.log(2)
        numbers = {
            "perplexity": self.perplexity,
            "bits_per_byte": bits / counted_bytes if counted_bytes else math.nan,
        }
        counts = {
            "tokens": self.tokens,
            "bytes": counted_bytes,
            "context": self.context,
            "stride": self.stride,
        }
        if as_json:
            plain = {name: x if math.isfinite(x) else None for name, x in numbers.items()}
            print(json.dumps({**plain, **counts, "complete": complete}))
            return
        for name, x in numbers.items():
            print(f"{name}: {x:.4f}")
        for name, n in counts.items():
            print(f"{name}: {n}")
