"""What crosses between the parts: requests in, tokens out, and the plan of a step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from mlxserve.checks import checked_integer, checked_number, checked_tuple
from mlxserve.errors import ContextError, RequestError
from mlxserve.grammar import Grammar
from mlxserve.report import show

if TYPE_CHECKING:
    import numpy as np

FinishReason = Literal["stop", "length", "cancelled"]
Messages = list[dict[str, Any]]
Prompt = str | Messages | list[int]
Batch = list[str] | list[Messages] | list[list[int]] | list[Prompt]
OnProgress = Callable[[str, int, int | None], None]
"""Called with (stage, done, total); total is None while it is not known."""

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024  # of one stop string
MAX_STOP_IDS = 256
MAX_SAMPLES = 128
MAX_PRIORITY = 100
MAX_PIN_S = 86_400.0
MAX_TTFT_S = 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    max_tokens: new tokens at the most; None fills the context.
    min_tokens: no stop id can be drawn before this many new tokens.
    temperature: 0 takes the likeliest token (greedy); otherwise logits are divided by it.
    top_k, top_p, min_p: applied in this order after the temperature; 0, 1 and 0 turn them off.
        top_p keeps the smallest set whose probability reaches p (Holtzman et al. 2020,
        arXiv:1904.09751); min_p keeps tokens at least min_p times as likely as the likeliest
        (Nguyen et al. 2024, arXiv:2407.01082).
    repetition_penalty: divides positive and multiplies negative logits of tokens already seen
        (Keskar et al. 2019, arXiv:1909.05858); presence_penalty and frequency_penalty are
        subtracted once, and once per occurrence, as OpenAI defines them. All count prompt and
        output.
    logit_bias: token id -> value added to its logit.
    seed: the same seed gives the same tokens, alone or in any batch; None draws a fresh one.
    stop: strings that end the answer and are not part of it, up to 16 of 1,024 characters;
        stop_token_ids: ids that do, up to 256.
    ignore_eos: go on past the model's own end-of-sequence ids.
    logprobs: report each token's log-probability under the model itself (before temperature,
        penalties and filters); top_logprobs adds the likeliest alternatives.
    n: answers to each prompt. Answer i is drawn with seed + i (modulo 2**64), and whole pages (64
        tokens) of the prompt are computed once for all of them. With temperature 0 all are equal.
    grammar: the form that the answer must have; see `Grammar`. Each token is drawn among those that
        keep to it, and the end id where it is complete.
    best_of: draw so many answers and return the n whose tokens are likeliest under the model, by
        the mean of their log-probabilities, the best first; None returns all n as they were drawn.

    Raises RequestError for a value out of range or not finite.
    """

    max_tokens: int | None = 512
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    n: int = 1
    best_of: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _NUMBERS.items():
            self._set(name, checked_number(name, getattr(self, name), low, high))
        for name, (low, high) in _INTEGERS.items():
            value = getattr(self, name)
            if not (value is None and name in ("max_tokens", "seed", "best_of")):
                self._set(name, checked_integer(name, value, low, high))
        for name in ("ignore_eos", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"{name} is {show(getattr(self, name))}; it must be True or False", param=name
                )
        if self.top_p == 0.0:
            raise RequestError(
                "top_p is 0, which keeps no token; use temperature 0 for greedy", param="top_p"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        if self.top_logprobs:
            self._set("logprobs", True)
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(
                f"best_of is {self.best_of} and n is {self.n}; best_of must be at least n",
                param="best_of",
            )
        self._check_grammar()
        self._set_stops()
        self._set_logit_bias()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # frozen once it is made

    def _check_grammar(self) -> None:
        if self.grammar is None:
            return
        if not isinstance(self.grammar, Grammar):
            raise RequestError(
                f"grammar is {show(self.grammar)}; make one, such as Grammar.json_schema(...)",
                param="grammar",
            )
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name):
                raise RequestError(
                    f"{name} is set, and a grammar alone says where the answer ends; drop one",
                    param=name,
                )

    def _set_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else checked_tuple("stop", self.stop)
        if len(stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"{len(stop)} stop strings; at most {MAX_STOP_STRINGS} work", param="stop"
            )
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(
                    f"stop string {show(text)} must be a non-empty string", param="stop"
                )
            if len(text) > MAX_STOP_CHARS:
                raise RequestError(
                    f"a stop string has {len(text)} characters; use at most {MAX_STOP_CHARS}",
                    param="stop",
                )
        self._set("stop", stop)
        given = checked_tuple("stop_token_ids", self.stop_token_ids)
        ids = tuple(
            dict.fromkeys(
                checked_integer("a stop token id", token, 0, param="stop_token_ids")
                for token in given
            )
        )
        if len(ids) > MAX_STOP_IDS:
            raise RequestError(
                f"{len(ids)} stop_token_ids; at most {MAX_STOP_IDS} work", param="stop_token_ids"
            )
        self._set("stop_token_ids", ids)

    def _set_logit_bias(self) -> None:
        biases = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(biases, Mapping):
            raise RequestError(
                f"logit_bias is {show(biases)}; it must map token ids to numbers",
                param="logit_bias",
            )
        checked = {}
        for given, bias in biases.items():
            token = checked_integer("a logit_bias token id", given, 0, param="logit_bias")
            checked[token] = checked_number(f"logit_bias[{show(token)}]", bias, -1e9, 1e9)
        self._set("logit_bias", checked)

    @property
    def drawn(self) -> int:
        """How many answers are drawn for a prompt."""
        return self.best_of or self.n

    @property
    def samples_asked(self) -> str:
        """What asks for several answers, in the caller's words."""
        return f"n is {self.n}" if self.best_of is None else f"best_of is {self.best_of}"

    def check_single(self, what: str) -> None:
        """Raise RequestError, for `what` takes no more, if several answers are drawn."""
        if self.drawn > 1:
            raise RequestError(
                f"{self.samples_asked}, and {what} takes one answer; use generate for several"
            )

    def sample(self, index: int) -> "SamplingParams":
        """Those of one of the answers that are drawn, with what is needed to choose among them."""
        return replace(
            self,
            n=1,
            best_of=None,
            seed=None if self.seed is None else (self.seed + index) % 2**64,
            logprobs=self.logprobs or self.best_of is not None,
        )

    @property
    def needs_history(self) -> bool:
        """Whether the choice of a token depends on which tokens came before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


_NUMBERS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
}
_INTEGERS: dict[str, tuple[int, int | None]] = {
    "max_tokens": (1, None),
    "min_tokens": (0, None),
    "top_k": (0, None),
    "seed": (0, 2**64 - 1),
    "top_logprobs": (0, MAX_TOP_LOGPROBS),
    "n": (1, MAX_SAMPLES),
    "best_of": (1, MAX_SAMPLES),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinkingBudget:
    """How many tokens an answer may think before the mark that closes its thinking is drawn.

    opening: the ids that begin it, in a row. closing: the one that ends it. inside: whether the
    prompt ends after the first.
    Raises RequestError for fewer than one token.
    """

    tokens: int
    opening: tuple[int, ...]
    closing: int
    inside: bool = False

    def __post_init__(self) -> None:
        checked_integer("a thinking budget", self.tokens, 1, param="thinking")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt to continue, or, with `score`, to read only.

    stop_ids: ids that end the answer: the model's own end ids and the caller's stop_token_ids.
    score: there is no answer; what is read of the prompt are the logits after each token, or, if
        prompt_logprobs is set, those.
    prompt_logprobs: report the log-probability of each prompt token but the first, given those
        before it, and so many of the likeliest alternatives; None: report nothing.
        Where the prompt is read, the prefix cache is neither used nor filled.
    priority: from -100 to 100; waiting requests of a smaller number start first.
    tenant: on whose behalf. Tenants get equal shares, and none finds another's prompts in the
        cache, where timing would tell them.
    cache_salt: the same within a tenant: only requests with one salt find each other's prompts.
    adapter: the name of the adapter to run with, "" for none.
    ttft_budget_s: refuse the request if its first token can't be there in so many seconds: at once,
        or when it has waited for so long; None waits as long as it takes.
    pin_s: keep what was computed for so many seconds after the end, before other prefixes, such as
        while a client's tools run; None: no longer than others.
    thinking: how long it may think; None: as long as it wants to.

    Raises RequestError for a value out of range or not finite.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    score: bool = False
    prompt_logprobs: int | None = None
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    adapter: str = ""
    ttft_budget_s: float | None = None
    pin_s: float | None = None
    thinking: ThinkingBudget | None = None

    def __post_init__(self) -> None:
        self.params.check_single("a request")
        priority = checked_integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        object.__setattr__(self, "priority", priority)
        if self.prompt_logprobs is not None:
            top = checked_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
            object.__setattr__(self, "prompt_logprobs", top)
        for name in ("tenant", "cache_salt", "adapter"):
            if not isinstance(getattr(self, name), str):
                raise RequestError(
                    f"{name} is {show(getattr(self, name))}; it must be a string", param=name
                )
        if self.ttft_budget_s is not None:
            budget = checked_number("ttft_budget_s", self.ttft_budget_s, 0.0, MAX_TTFT_S)
            if budget == 0.0:
                raise RequestError(
                    "ttft_budget_s is 0, in which no token comes; leave it out to wait as long as "
                    "it takes",
                    param="ttft_budget_s",
                )
            object.__setattr__(self, "ttft_budget_s", budget)
        if self.pin_s is not None:
            object.__setattr__(self, "pin_s", checked_number("pin_s", self.pin_s, 0.0, MAX_PIN_S))

    @property
    def salt(self) -> tuple[str, str, str]:
        """What separates the prefixes of one request from those of another."""
        return self.adapter, self.tenant, self.cache_salt

    @property
    def reads(self) -> bool:
        """Whether something is reported of every position of the prompt, so all are computed."""
        return self.score or self.prompt_logprobs is not None

    @property
    def unread(self) -> int:
        """Tokens at the end of the prompt that are only predicted and never computed: 0 or 1."""
        return int(self.score and self.prompt_logprobs is not None and len(self.prompt_ids) > 1)

    def validate(self, *, vocab_size: int, context_tokens: int) -> None:
        """Check what only the model can know. Raises RequestError."""
        if not self.prompt_ids:
            raise RequestError("the prompt is empty; give at least one token", param="prompt")
        n = len(self.prompt_ids)
        room = context_tokens + self.unread if self.score else context_tokens - 1
        if n > room:
            raise ContextError.of(n, room)
        stop_ids = self.stop_ids.union(self.params.stop_token_ids)
        named = (
            ("prompt token id", "prompt", self.prompt_ids),
            ("logit_bias token id", "logit_bias", self.params.logit_bias),
            ("stop token id", "stop_token_ids", stop_ids),
        )
        for name, param, ids in named:
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise RequestError(
                        f"{name} {show(token)} is out of range; this model's ids are 0 to "
                        f"{vocab_size - 1}",
                        param=param,
                    )
        if self.params.top_k > vocab_size:
            raise RequestError(
                f"top_k is {self.params.top_k}, over the vocabulary of {vocab_size}; "
                "use 0 to keep all",
                param="top_k",
            )


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability under the model, and the likeliest alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds on the engine's clock. Rates are None where there is nothing to divide.

    ttft_s: from submission to the first token; prefill_tokens_per_s: prompt tokens over the time
    from the first step to the first token; decode_tokens_per_s: later tokens over the time they
    took.
    """

    ttft_s: float | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and tokens written, the one that ended the answer included.

    cached_tokens: of the prompt, those that an earlier request had computed. diverged_at: how many
    agreed with what was cached, before the first that didn't: if prompts should begin alike, that
    is where something in them changes. None where the whole prompt agreed, or nothing is shared.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    diverged_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An answer.

    text: without the stop string or special tokens; token_ids: all new tokens, with the end token.
    finish_reason: "stop" (an end token or stop string), "length" (max_tokens or the context).
    logprobs: one per token where they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: tuple[Logprob, ...] | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that became complete; the last piece of a stream carries the whole answer."""

    text: str
    completion: Completion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOut:
    """What the engine delivers: a token, what was read of a prompt, or the end of a request.

    The last one of a request has `finish_reason` or `error` set, and `timings` and `usage`.
    prompt_logits: float32 `[n, V]`, for a scored request only; prompt_logprobs: of the next n
    tokens of the prompt. Both come in order of position, and the last of them with the first token.
    """

    request_id: str
    token_id: int | None = None
    logprob: Logprob | None = None
    prompt_logits: "np.ndarray | None" = None
    prompt_logprobs: tuple[Logprob, ...] = ()
    finish_reason: FinishReason | None = None
    timings: Timings | None = None
    usage: Usage | None = None
    error: Exception | None = None

    @property
    def last(self) -> bool:
        return self.finish_reason is not None or self.error is not None
