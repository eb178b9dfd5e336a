"""OpenAI's dialect: from a body's fields to ours, and from our answers to its replies."""

from __future__ import annotations

from typing import Any

from mlxserve.answers import Answer
from mlxserve.config import ServerConfig
from mlxserve.server.problems import Problem
from mlxserve.server.schema import (
    CompletionDetails,
    PromptDetails,
    Sampling,
    TokenLogprob,
    TopToken,
    UsageReply,
)
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.types import Logprob, SamplingParams, Usage

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


def usage(answers: list[Answer], drawn: int) -> UsageReply:
    """Of all answers; the `drawn` answers to one prompt count it once."""
    done = [answer.completion().usage for answer in answers]
    prompts = done[::drawn]
    prompt = sum(one.prompt_tokens for one in prompts)
    completion = sum(one.completion_tokens for one in done)
    return UsageReply(
        prompt, completion, prompt + completion, _cached(prompts), CompletionDetails()
    )


def _cached(prompts: list[Usage]) -> PromptDetails:
    return PromptDetails(sum(one.cached_tokens for one in prompts))


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
