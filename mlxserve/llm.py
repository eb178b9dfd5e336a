"""The offline API over the engine: `generate`, `stream`, `score`, `prompt_logprobs`."""

import itertools
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self, overload

import numpy as np

from mlxserve.answers import Answer, chosen
from mlxserve.cache import file as cache_file
from mlxserve.cache import transfer
from mlxserve.checks import checked_integer, from_names
from mlxserve.config import EngineConfig
from mlxserve.distributed.leader import lead
from mlxserve.engine.core import EngineStats, TokenSink
from mlxserve.engine.engine import Engine
from mlxserve.errors import ModelError, RequestError
from mlxserve.opening import open_model
from mlxserve.report import show_json
from mlxserve.sources import fingerprint
from mlxserve.sources.checkpoint import Checkpoint
from mlxserve.sources.gguf_quant import Q6K
from mlxserve.text.stream import TextStream
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.types import (
    MAX_TOP_LOGPROBS,
    Batch,
    Completion,
    Logprob,
    OnProgress,
    Piece,
    Prompt,
    Request,
    SamplingParams,
    TokenOut,
)


class LLM:
    """A loaded model with its engine. Methods may be called from any thread, also at once.

    Close it, use it in a `with` block, or drop the last reference to give its memory back.
    Arguments and errors: see `mlxserve.load`.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        on_progress: OnProgress | None = None,
        gguf_q6_k: Q6K = "8bit",
        **options: Any,
    ) -> None:
        config = from_names(EngineConfig, "engine option", options)
        opened = open_model(model, config, on_progress=on_progress, gguf_q6_k=gguf_q6_k)
        self.path = opened.path
        leader, shard = lead(opened)  # first: a model that doesn't fit is refused at once
        try:
            self.tokenizer = tokenizer_of(opened.checkpoint)
        except BaseException:
            if leader is not None:
                leader.close()
            raise
        if on_progress is not None:
            on_progress("load", 0, None)
        cancelled = threading.Event()
        self._engine = Engine(
            lambda: opened.load(shard, cancelled.is_set),
            config,
            tokenizer=self.tokenizer,
            cancelled=cancelled,
            peers=leader,
        )
        self._finalizer = weakref.finalize(self, self._engine.close)
        self._ids = itertools.count()
        self._files: dict[str, str] | None = None
        if self.tokenizer.vocab_size > self._engine.info.vocab_size:
            self.close()
            raise ModelError(
                f"the tokenizer has {self.tokenizer.vocab_size} tokens and the model's embedding "
                f"{self._engine.info.vocab_size}; the files of {self.path} belong to different "
                "models"
            )

    @property
    def context_tokens(self) -> int:
        """Tokens of prompt and answer together, at the most."""
        return self._engine.info.context_tokens

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of a prompt that leaves room for an answer."""
        return self.context_tokens - 1

    @overload
    def generate(
        self, prompt: Batch, *, n: Literal[1] = 1, **sampling: Any
    ) -> list[Completion]: ...
    @overload
    def generate(self, prompt: Prompt, *, n: Literal[1] = 1, **sampling: Any) -> Completion: ...
    @overload
    def generate(self, prompt: Batch, *, n: int, **sampling: Any) -> list[list[Completion]]: ...
    @overload
    def generate(self, prompt: Prompt, *, n: int, **sampling: Any) -> list[Completion]: ...
    def generate(
        self, prompt: Prompt | Batch, **sampling: Any
    ) -> Completion | list[Completion] | list[list[Completion]]:
        """Continue a prompt (text, chat messages or token ids), or a list of them as one batch.

        With `n` over 1, each prompt has a list of n answers in place of its answer. Ctrl-C ends the
        answers, frees their pages, and is raised again. Raises RequestError for bad input, before
        any work starts.
        """
        params = from_names(SamplingParams, "sampling parameter", sampling)
        if params.drawn > 1 and params.temperature == 0.0:
            raise RequestError(
                f"{params.samples_asked}, and with temperature 0 all answers would be equal; set "
                "temperature, or ask for one",
                param="temperature",
            )
        batch = _as_batch(prompt)
        drawn = self._answers([prompt] if batch is None else batch, params)
        for _ in self._run(list(itertools.chain(*drawn))):
            pass
        kept = [chosen(samples, params) for samples in drawn]
        done = [answers[0] for answers in kept] if params.n == 1 else kept
        return done if batch is not None else done[0]

    def stream(self, prompt: Prompt, **sampling: Any) -> Iterator[Piece]:
        """Continue one prompt, piece by piece; closing the iterator ends the answer."""
        params = from_names(SamplingParams, "sampling parameter", sampling)
        params.check_single("stream")
        if _as_batch(prompt) is not None:
            raise RequestError("stream takes one prompt; use generate for a list of prompts")
        ((answer,),) = self._answers([prompt], params)
        return self._stream(answer)

    def score(self, tokens: str | list[int]) -> np.ndarray:
        """The logits after each token of a text: float32 `[T, V]`; row i predicts token i + 1.

        Of 8,192 tokens over 152,000 they take 5 GB; see `prompt_logprobs` for less.
        """
        deliveries = self._read(ids := self.encode(tokens))
        logits = np.empty((len(ids), self._engine.info.vocab_size), np.float32)
        filled = 0
        for out in deliveries:
            block: Any = out.prompt_logits
            logits[filled : filled + len(block)] = block
            filled += len(block)
        return logits

    def prompt_logprobs(self, tokens: str | list[int], top: int = 0) -> list[Logprob | None]:
        """How likely each token of a text is, given those before it; None for the first.

        top: the likeliest alternatives to report with each. A text may be longer than the context
        by the token that is only predicted. Raises RequestError for bad input.
        """
        top = checked_integer("top", top, 0, MAX_TOP_LOGPROBS)
        found: list[Logprob | None] = [None]
        for out in self._read(self.encode(tokens), top):
            found += out.prompt_logprobs
        return found

    def _read(self, ids: list[int], top: int | None = None) -> Iterator[TokenOut]:
        """Read a text without an answer: its logits, or, with `top`, log-probabilities."""
        request = Request(
            id=self._next_id(),
            prompt_ids=tuple(ids),
            params=SamplingParams(),
            score=True,
            prompt_logprobs=top,
        )
        self._engine.check([request])
        return self._deliveries(request)

    def _deliveries(self, request: Request) -> Iterator[TokenOut]:
        out: queue.SimpleQueue[TokenOut] = queue.SimpleQueue()
        try:
            self._engine.submit([request], out)
            while True:
                got = out.get()
                if got.error is not None:
                    raise got.error
                yield got
                if got.last:
                    return
        finally:
            self._engine.abort([request.id])

    def save_cache(self, path: str | PathLike[str], prompt: Prompt) -> int:
        """Compute a prompt and keep what the model made of it in a file, for `load_cache`.

        Returns the tokens that it covers: all of them, or as many as fill whole pages of 64 where
        pages are packed. Written as a whole or not at all; over several ranks it is the same file,
        whose numbers may differ in their last bits. Raises RequestError for a prompt or a
        path that can't be used, CapacityError where memory or the disk has no room.
        """
        self._check_prefix_cache()
        path = Path(path)
        cache_file.check_target(path)
        params = SamplingParams(max_tokens=1)
        ((answer,),) = self._answers([prompt], params)
        for _ in self._run([answer]):
            pass
        request, key = answer.request, object()
        ids = request.prompt_ids
        made_with = self._fingerprint()
        source = self._engine.call(
            lambda core: transfer.source(
                core.manager, core.whole, key, request.salt, ids, made_with
            )
        )
        try:
            cache_file.write(
                path,
                source.header,
                lambda name: self._engine.call(
                    lambda core: transfer.tensor(core.whole, source, ids, name)
                ),
            )
        finally:
            self._engine.call(lambda core: core.manager.shared.unpin(key))
        return source.header.tokens

    def load_cache(self, path: str | PathLike[str], *, tenant: str = "") -> int:
        """Put a prompt that `save_cache` kept into the cache: prompts that begin so start from it.

        tenant: whose prompts; see `Request`. It stays for as long as there is room. Returns its
        tokens. Raises DamagedError or ModelError for a file that isn't sound, RequestError for one
        of another model or other settings, and CapacityError where memory has no room.
        """
        self._check_prefix_cache()
        saved = cache_file.read(Path(path))
        cache_file.check_fingerprint(saved, self._fingerprint())
        cache_file.verify(saved)
        salt = Request(id="", prompt_ids=(), params=SamplingParams(), tenant=tenant).salt
        return self._engine.call(
            lambda core: transfer.restore(core.manager, core.whole, saved.path, salt, saved)
        )

    def _check_prefix_cache(self) -> None:
        if not self._engine.config.prefix_cache:
            raise RequestError("prefix_cache is off, and saved prompts need it; leave it on")

    def _fingerprint(self) -> dict[str, str]:
        """What a saved cache depends on."""
        if self._files is None:
            self._files = {
                "model": fingerprint.model(self.path),
                "tokenizer": fingerprint.tokenizer(self.path),
                "adapter": "none",
            }
        return self._files | self._engine.info.fingerprint

    def prepare(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        chat: bool = False,
        keep: Iterable[str] = (),
        **options: Any,
    ) -> list[Answer]:
        """The answers to draw for a prompt, for `submit`; as many as `params` asks for.

        chat: the answer opens a text; other continuations keep the space before a first word, as do
        those that have a form. keep: special tokens that are text all the same. options: further
        fields of Request, such as tenant. Raises RequestError for what this model can't run.
        """
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            # A config may name an id that the model doesn't have; it can't be drawn.
            vocab_size = self._engine.info.vocab_size
            stop_ids |= {token for token in self.tokenizer.eos_ids if token < vocab_size}
        prompt_ids, answers = tuple(ids), []
        for sample in (params.sample(index) for index in range(params.drawn)):
            fields = {"prompt_ids": prompt_ids, "params": sample, "stop_ids": stop_ids, **options}
            request = Request(id=self._next_id(), **fields)
            opens = chat and params.grammar is None
            text = TextStream(self.tokenizer, params.stop, at_start=opens, keep=keep)
            answers.append(Answer(request, params, text, self.tokenizer.vocab_size))
        self._engine.check([answers[0].request])
        return answers

    def submit(self, answers: Sequence[Answer], out: TokenSink) -> None:
        """Queue what `prepare` made; what the engine delivers goes to `out`. Raises EngineDead."""
        self._engine.submit([answer.request for answer in answers], out)

    def abort(self, answers: Iterable[Answer]) -> None:
        """End answers at the next step; those that are over already are left alone."""
        self._engine.abort([answer.request.id for answer in answers])

    def stats(self) -> EngineStats:
        """What the engine is doing and has done."""
        return self._engine.stats

    def idle_s(self) -> float | None:
        """Seconds since the engine last did something; None once it has stopped."""
        return self._engine.idle_s

    def wait(self) -> BaseException | None:
        """Wait until the engine has stopped, and say why; None if it was closed."""
        return self._engine.wait()

    def close(self) -> None:
        """Stop the engine and give its memory back. Running answers end with EngineDead."""
        self._finalizer.detach()
        self._engine.close()

    def __repr__(self) -> str:
        return f"LLM({str(self.path)!r}, context_tokens={self.context_tokens})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_id(self) -> str:
        return f"r{next(self._ids)}"

    def encode(self, prompt: Prompt, *, max_tokens: int | None = None) -> list[int]:
        """The token ids of a prompt: text, chat messages or ids. Raises RequestError.

        max_tokens: see `Tokenizer.encode`.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, max_tokens=max_tokens)
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        if not isinstance(prompt, list | tuple):
            raise RequestError(
                f"a prompt is {type(prompt).__name__}; it must be text, chat messages or token ids"
            )
        if _is_chat(prompt):
            text = self.tokenizer.render_chat(prompt)
            return self.tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens)
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise RequestError(
                    f"{show_json(token)} among token ids; they must be whole numbers",
                    param="prompt",
                )
        return [int(token) for token in prompt]  # type: ignore[arg-type]

    def _answers(self, prompts: list[Any], params: SamplingParams) -> list[list[Answer]]:
        """Of each prompt, the answers to draw."""
        most = self.max_prompt_tokens
        return [
            self.prepare(self.encode(prompt, max_tokens=most), params, chat=_is_chat(prompt))
            for prompt in prompts
        ]

    def _stream(self, answer: Answer) -> Iterator[Piece]:
        for piece in self._run([answer]):
            if piece:
                yield Piece(piece)
        yield Piece("", answer.completion())

    def _run(self, answers: list[Answer]) -> Iterator[str]:
        """Submit, then take tokens in as they come, until every answer is over."""
        out: queue.SimpleQueue[TokenOut] = queue.SimpleQueue()
        open_answers = {answer.request.id: answer for answer in answers}
        try:
            self.submit(answers, out)
            while open_answers:
                got = out.get()
                if got.error is not None:
                    raise got.error
                answer = open_answers[got.request_id]
                stopped = answer.stopped
                yield answer.feed(got)
                if answer.stopped and not stopped:
                    self.abort([answer])
                if got.last:
                    del open_answers[got.request_id]
        finally:
            self.abort(open_answers.values())


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """A model's tokenizer, from wherever its kind of files has it. Raises ModelError."""
    if checkpoint.gguf_metadata is not None:
        return Tokenizer.from_gguf(checkpoint.gguf_metadata)
    return Tokenizer.from_directory(checkpoint.path)


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], dict)


def _as_batch(prompt: Any) -> list[Prompt] | None:
    """The prompts of a batch, or None for a single prompt; an empty list is one without ids."""
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], str | list | tuple):
        return list(prompt)
    return None
