"""Requests of OpenAI's dialect, as msgspec structs: they check types and give /openapi.json.

A field that is null is as one left out. What a model must know of a message, a tool or a schema is
checked where it is used; here it is any object.
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

Scalar = str | int | float | bool | None
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(Struct, kw_only=True):
    """include_usage: a last chunk with the usage and no choices."""

    include_usage: bool | None = None


class Sampling(Struct, kw_only=True):
    """What both endpoints take, with the meaning of OpenAI's reference; see `SamplingParams`.

    logit_bias takes 300 tokens at most.

    Ours: top_k, min_p, repetition_penalty, min_tokens, stop_token_ids, ignore_eos; priority: of
    waiting requests, a smaller number starts first; cache_salt: only prompts with the same one
    share what is computed; ttft_budget_s: refuse the request if its first token can't be there
    in so many seconds: at once, or when it has waited for so long.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    ttft_budget_s: float | None = None
    metadata: dict[str, Scalar] | None = None
    user: str | None = None


class ChatRequest(Sampling, kw_only=True):
    """POST /v1/chat/completions.

    Ours: chat_template_kwargs: further variables for the model's template; regex, choice, grammar
    (Lark): the form of the answer. reasoning_effort: a variable of the template, too.
    """

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class CompletionRequest(Sampling, kw_only=True):
    """POST /v1/completions. prompt: text, token ids, or several of either.

    logprobs: report each token's log-probability, and so many of the likeliest alternatives. echo:
    begin the text with the prompt, whose tokens are reported too.
    """

    prompt: str | list[Any]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


# ---- Answers.


class PromptDetails(Struct):
    """cached_tokens: of the prompt, those that needed no computing."""

    cached_tokens: int = 0


class CompletionDetails(Struct):
    """reasoning_tokens: of the answer, those that the model thought with."""

    reasoning_tokens: int = 0


class UsageReply(Struct):
    """Tokens read and written, all answers together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TopToken(Struct):
    """One of the likeliest tokens at a place."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """A token, its bytes (a character may be spread over several), and what it competed with."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopToken]


class ChatLogprobs(Struct):
    """Of each token of an answer, in order."""

    content: list[TokenLogprob]


class FunctionCall(Struct):
    """arguments: a JSON object, as text."""

    name: str
    arguments: str


class ToolCallReply(Struct, kw_only=True, omit_defaults=True):
    """A call of one of the client's tools. index: of the call, in a stream."""

    index: int | UnsetType = UNSET
    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(Struct, omit_defaults=True):
    """Of an answer, or, in a stream, what is new of one."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallReply] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """One answer."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatDelta(Struct, kw_only=True):
    """What is new of one answer."""

    index: int
    delta: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatReply(Struct, kw_only=True):
    """All answers to a chat."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply


class ChatChunk(Struct, kw_only=True):
    """What is new of a chat; the last one may have the usage and no choices."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatDelta]
    usage: UsageReply | UnsetType | None = UNSET


class TextLogprobs(Struct):
    """Lists of one length, an entry per token; None for the first, which nothing predicts."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Struct, kw_only=True):
    """One text, or in a stream what is new of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None


class TextReply(Struct, kw_only=True):
    """All texts, or in a stream what is new of one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageReply | UnsetType | None = UNSET


class ModelReply(Struct, kw_only=True):
    """max_model_len: tokens of prompt and answer together, at the most."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mlxserve"
    max_model_len: int


class ModelList(Struct):
    """The models served here."""

    data: list[ModelReply]
    object: Literal["list"] = "list"


class TokenizeReply(Struct):
    """count: of the ids; max_model_len: how many would fit."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeReply(Struct):
    """prompt: the text, special tokens left out."""

    prompt: str
