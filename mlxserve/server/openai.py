"""OpenAI's dialect: from a body's fields to ours, and from our answers to its replies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from mlxserve.answers import Answer
from mlxserve.config import ServerConfig
from mlxserve.errors import RequestError
from mlxserve.grammar import Grammar
from mlxserve.report import show_json
from mlxserve.server.body import Dialect
from mlxserve.server.forms import Form, asked_form
from mlxserve.server.problems import Problem
from mlxserve.server.schema import (
    ChatRequest,
    CompletionDetails,
    CompletionRequest,
    PromptDetails,
    Sampling,
    StreamOptions,
    TokenLogprob,
    TopToken,
    UsageReply,
)
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.types import Logprob, SamplingParams

DIALECT = Dialect(
    known={
        "stream_options": StreamOptions.__struct_fields__,
        "messages[]": {
            *("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"),
        },
        "messages[].content[]": {"type", "text"},
        "messages[].tool_calls[]": {"id", "type", "function", "index"},
        "messages[].tool_calls[].function": {"name", "arguments"},
        "tools[]": {"type", "function"},
        "tools[].function": {"name", "description", "parameters", "strict"},
        "tool_choice": {"type", "function"},
        "tool_choice.function": {"name"},
        "response_format": {"type", "json_schema"},
        "response_format.json_schema": {"name", "description", "schema", "strict"},
    },
    rendered="messages[]",
    refused={
        "audio": "this server makes no sound; leave it out",
        "best_of": "it belongs to /v1/completions; use n",
        "ebnf": "it is called grammar here, and is Lark",
        "echo": "it belongs to /v1/completions; leave it out",
        "enable_thinking": "it goes into chat_template_kwargs",
        "extra_body": "its fields stand beside the others; your client should put them there",
        "function_call": "it is replaced by tool_choice",
        "functions": "it is replaced by tools",
        "guided_choice": "it is called choice here",
        "guided_grammar": "it is called grammar here, and is Lark",
        "guided_json": "it is response_format here, with json_schema.schema",
        "guided_regex": "it is called regex here",
        "json_schema": "it is response_format here, with json_schema.schema",
        "messages[].audio": "this server makes no sound; leave it out",
        "messages[].function_call": "it is replaced by tool_calls",
        "modalities": "this server answers in text; leave it out",
        "prediction": "predicted outputs aren't supported; leave it out",
        "reasoning": "it is called reasoning_effort here",
        "response_format.schema": "a schema goes with type json_schema, as json_schema.schema",
        "service_tier": "there is one tier; leave it out",
        "store": "nothing is stored; leave it out",
        "stream_options.include_obfuscation": "streams aren't padded; leave it out",
        "structured_outputs": "they are response_format, regex, choice and grammar here",
        "suffix": "text can't be inserted; leave it out",
        "verbosity": "no model here knows it; leave it out",
        "web_search_options": "this server has no access to the web; leave it out",
    },
    harmless={
        "best_of": (1,),
        "echo": (False,),
        "function_call": ("none",),
        "messages[].annotations": ([],),
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "stream_options.include_obfuscation": (False,),
    },
)

MAX_SALT_CHARS = 256
MAX_LOGIT_BIASES = 300  # OpenAI's; each is put into the logits at every step
ROLES = ("system", "developer", "user", "assistant", "tool")

DEFAULTS = {"temperature": 1.0, "max_tokens": None}
"""OpenAI's, where they differ from those of SamplingParams."""

_SAMPLING = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "n",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)


def sampling_params(asked: Sampling, config: ServerConfig, **more: Any) -> SamplingParams:
    """more: what only one endpoint knows, over all else. Raises RequestError, Problem."""
    values = {**DEFAULTS, **config.sampling}
    values |= {name: value for name in _SAMPLING if (value := getattr(asked, name)) is not None}
    if asked.logit_bias is not None:
        values["logit_bias"] = _logit_bias(asked.logit_bias)
    if -(2**63) <= (values.get("seed") or 0) < 0:  # OpenAI's are signed
        values["seed"] %= 2**64
    return SamplingParams(**{**values, **more})


def answer_form(asked: ChatRequest | CompletionRequest) -> Form | None:
    """The form that the answer is to have. Raises RequestError, Problem."""
    return asked_form(
        {
            "response_format": (asked.response_format, _response_format),
            "regex": (asked.regex, Grammar.regex),
            "choice": (asked.choice, Grammar.choice),
            "grammar": (asked.grammar, Grammar.lark),
        }
    )


def _response_format(given: dict[str, Any]) -> Grammar | None:
    match given:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Grammar.json_object()
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return Grammar.json_schema(schema)
    raise RequestError(
        f"response_format is {show_json(given)}; it must be of type text, json_object, or "
        "json_schema with a json_schema.schema"
    )


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    if len(given) > MAX_LOGIT_BIASES:
        raise Problem(
            400,
            f"logit_bias has {len(given)} tokens; at most {MAX_LOGIT_BIASES} are taken",
            param="logit_bias",
        )
    biases = {}
    for name, bias in given.items():
        try:
            token = int(name)
        except ValueError:
            token = None
        if token is None or str(token) != name:  # so that no two keys are one id
            raise Problem(
                400, f"logit_bias has {show_json(name)}; its keys must be token ids",
                param="logit_bias",
            )  # fmt: skip
        biases[token] = bias
    return biases


def check_conversation(messages: Sequence[dict[str, Any]], template_words: Collection[str]) -> None:
    """What OpenAI's API asks of messages beyond what templates need. Raises Problem.

    template_words: further roles, which the template knows, are among them.
    """
    for i, message in enumerate(messages):
        role, call_id = message.get("role"), message.get("tool_call_id")
        if isinstance(role, str) and role and role not in ROLES and role not in template_words:
            raise Problem(
                400,
                f"messages[{i}].role is {show_json(role)}; it must be {', '.join(ROLES[:-1])} or "
                f"{ROLES[-1]}",
                param=f"messages[{i}].role",
            )
        if role == "tool" and not isinstance(call_id, str):
            raise Problem(
                400,
                f"messages[{i}] has no tool_call_id; say which call it is the result of",
                param=f"messages[{i}].tool_call_id",
            )


def request_options(asked: Sampling, tenant: str) -> dict[str, Any]:
    """Fields of Request, but for the prompt and how it is sampled. Raises Problem."""
    salt = asked.cache_salt or ""
    if len(salt) > MAX_SALT_CHARS:
        raise Problem(
            400,
            f"cache_salt has {len(salt)} characters; use at most {MAX_SALT_CHARS}",
            param="cache_salt",
        )
    return {
        "tenant": tenant,
        "cache_salt": salt,
        "priority": asked.priority or 0,
        "ttft_budget_s": asked.ttft_budget_s,
    }


def includes_usage(asked: Sampling) -> bool:
    """Whether a stream ends with the usage. Raises Problem where there is no stream."""
    if asked.stream_options is None:
        return False
    if not asked.stream:
        raise Problem(
            400, "stream_options needs stream: true; give both or neither", param="stream_options"
        )
    return bool(asked.stream_options.include_usage)


def usage(answers: Sequence[Answer], drawn: int, reasoning_tokens: int = 0) -> UsageReply:
    """Of all answers; the `drawn` answers to one prompt count it once."""
    done = [answer.completion().usage for answer in answers]
    prompts = done[::drawn]
    prompt = sum(one.prompt_tokens for one in prompts)
    completion = sum(one.completion_tokens for one in done)
    cached = PromptDetails(sum(one.cached_tokens for one in prompts))
    details = CompletionDetails(reasoning_tokens)
    return UsageReply(prompt, completion, prompt + completion, cached, details)


def token_logprob(tokenizer: Tokenizer, found: Logprob) -> TokenLogprob:
    """What is known of a token, as chats report it."""
    text, data = token_text(tokenizer, found.token_id)
    top = [TopToken(*_named(tokenizer, token, value)) for token, value in found.top]
    return TokenLogprob(text, found.logprob, data, top)


def _named(tokenizer: Tokenizer, token: int, value: float) -> tuple[str, float, list[int]]:
    text, data = token_text(tokenizer, token)
    return text, value, data


def token_text(tokenizer: Tokenizer, token: int) -> tuple[str, list[int]]:
    """A token as text, with U+FFFD for what isn't, and as bytes; nothing for one that pads."""
    if token >= tokenizer.vocab_size:
        return "", []
    data = tokenizer.token_bytes(token)
    return data.decode(errors="replace"), list(data)
