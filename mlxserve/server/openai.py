"""OpenAI's dialect: from a body's fields to ours, and from our answers to its replies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mlxserve.answers import Answer
from mlxserve.config import ServerConfig
from mlxserve.grammar import Grammar
from mlxserve.server.problems import Problem
from mlxserve.server.schema import (
    ChatRequest,
    CompletionDetails,
    CompletionRequest,
    PromptDetails,
    Sampling,
    TokenLogprob,
    TopToken,
    UsageReply,
)
from mlxserve.server.service import Dialect
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.types import Logprob, SamplingParams

DIALECT = Dialect(
    refused={
        "audio": "this server makes no sound; leave it out",
        "function_call": "it is replaced by tool_choice",
        "functions": "it is replaced by tools",
        "modalities": "this server answers in text; leave it out",
        "prediction": "predicted outputs aren't supported; leave it out",
        "store": "nothing is stored; leave it out",
        "suffix": "text can't be inserted; leave it out",
        "verbosity": "no model here knows it; leave it out",
        "web_search_options": "this server has no access to the web; leave it out",
    },
    harmless={
        "modalities": (["text"],),
        "store": (False,),
        "function_call": ("none",),
        "service_tier": ("auto", "default"),
    },
)

MAX_SALT_CHARS = 256

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
        values["logit_bias"] = {_token(name): bias for name, bias in asked.logit_bias.items()}
    return SamplingParams(**{**values, **more})


def answer_grammar(asked: ChatRequest | CompletionRequest) -> Grammar | None:
    """The form that the answer is to have. Raises RequestError, Problem."""
    forms = {
        "response_format": asked.response_format and _response_format(asked.response_format),
        "regex": asked.regex is not None and Grammar.regex(asked.regex),
        "choice": asked.choice is not None and Grammar.choice(asked.choice),
        "grammar": asked.grammar is not None and Grammar.lark(asked.grammar),
    }
    given = {name: grammar for name, grammar in forms.items() if grammar}
    if len(given) > 1:
        raise Problem(400, f"{' and '.join(given)} can't be asked for at once; choose one")
    return next(iter(given.values()), None)


def _response_format(given: dict[str, Any]) -> Grammar | None:
    match given:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Grammar.json_object()
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return Grammar.json_schema(schema)
    raise Problem(
        400,
        f"response_format is {json.dumps(given)[:100]}; it must be of type text, json_object, or "
        "json_schema with a json_schema.schema",
        param="response_format",
    )


def _token(name: str) -> int:
    try:
        return int(name)
    except ValueError:
        raise Problem(
            400, f"logit_bias has {name!r}; its keys must be token ids", param="logit_bias"
        ) from None


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
