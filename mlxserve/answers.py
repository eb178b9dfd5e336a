"""What comes of a request, token by token, and which of several samples is kept."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from mlxserve.text.stream import TextStream
from mlxserve.types import (
    Completion,
    FinishReason,
    Logprob,
    Request,
    SamplingParams,
    Timings,
    TokenOut,
    Usage,
)


@dataclass(eq=False, slots=True)
class Answer:
    """What has come of one request; owned by the thread that waits for it.

    asked: what the caller wanted; the request has what it takes to choose among samples as well.
    text_ids: ids below it have a text; a model's vocabulary may be padded beyond the tokenizer's.
    """

    request: Request
    asked: SamplingParams
    text: TextStream
    text_ids: int
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: FinishReason = "cancelled"
    timings: Timings = field(default_factory=Timings)
    usage: Usage | None = None
    stopped: bool = False

    def feed(self, out: TokenOut) -> str:
        """Take a delivery in; returns the text that is complete now."""
        piece = ""
        if out.token_id is not None and not self.stopped:
            self.token_ids.append(out.token_id)
            if out.logprob is not None:
                self.logprobs.append(out.logprob)
            # An end token is no text, nor is an id that only pads the model's vocabulary.
            if out.finish_reason != "stop" and out.token_id < self.text_ids:
                piece = self.text.feed(out.token_id)
            self.stopped = self.text.stopped
        if out.last:
            self.timings = out.timings or self.timings
            self.usage = out.usage
            self.finish_reason = "stop" if self.stopped else out.finish_reason or "cancelled"
            piece += "" if self.stopped else self.text.finish()
            if self.text.stopped:
                self.finish_reason = "stop"
        self.pieces.append(piece)
        return piece

    def _usage(self) -> Usage:
        """Tokens drawn after a stop string are none of the answer's."""
        prompt, made = len(self.request.prompt_ids), len(self.token_ids)
        if self.usage is None:
            return Usage(prompt, made)
        return replace(self.usage, completion_tokens=made)

    def completion(self) -> Completion:
        """The answer as it stands."""
        return Completion(
            text="".join(self.pieces),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            usage=self._usage(),
            timings=self.timings,
            logprobs=tuple(self.logprobs) if self.asked.logprobs else None,
        )

    @property
    def mean_logprob(self) -> float:
        """Of its tokens, which must have been asked for."""
        return fmean(token.logprob for token in self.logprobs)


def chosen(samples: Sequence[Answer], params: SamplingParams) -> list[Completion]:
    """The `n` answers to keep of those drawn for one prompt; see `SamplingParams.best_of`."""
    if params.best_of is not None:
        samples = sorted(samples, key=lambda answer: answer.mean_logprob, reverse=True)
    return [answer.completion() for answer in samples[: params.n]]
