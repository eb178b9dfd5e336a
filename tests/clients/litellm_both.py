"""litellm against a server, in both dialects: prints what it was told, as JSON.

python litellm_both.py URL KEY LIMITED_URL
"""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch prices from the web

import litellm
from asking import BIG, CHAT, LONG, MODEL, SCHEMA, TOOL

URL, KEY, LIMITED_URL = sys.argv[1:]
litellm.suppress_debug_info = True
BASES = {"openai": "/v1", "anthropic": ""}


def ask(dialect, url=URL, **more):
    asked = {"messages": CHAT, "max_tokens": 24, "temperature": 0.0, "num_retries": 0, **more}
    asked = {"api_base": url + BASES[dialect], "api_key": KEY, **asked}
    return litellm.completion(**{"model": f"{dialect}/{MODEL}", **asked})


def whole(dialect):
    got = ask(dialect)
    return {
        "text": got.choices[0].message.content,
        "finish_reason": got.choices[0].finish_reason,
        "completion_tokens": got.usage.completion_tokens,
    }


def streamed(dialect):
    pieces, reason, tokens = [], None, None
    for chunk in ask(dialect, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            reason = choice.finish_reason or reason
        if usage := getattr(chunk, "usage", None):
            tokens = usage.completion_tokens
    return {"text": "".join(pieces), "finish_reason": reason, "completion_tokens": tokens}


def tool(dialect, stream):
    got = ask(
        dialect,
        max_tokens=600,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        stream=stream,
    )
    if stream:
        got = litellm.stream_chunk_builder(list(got))
    (call,) = got.choices[0].message.tool_calls
    return {
        "finish_reason": got.choices[0].finish_reason,
        "name": call.function.name,
        "arguments": call.function.arguments,
    }


def form():
    asked = {"name": "answer", "strict": True, "schema": SCHEMA}
    form = {"type": "json_schema", "json_schema": asked}
    got = ask("openai", max_tokens=300, temperature=1.0, seed=1, response_format=form)
    return got.choices[0].message.content


def logprobs():
    got = ask("openai", max_tokens=5, logprobs=True, top_logprobs=2)
    return [
        {
            "token": one.token,
            "logprob": one.logprob,
            "top": [top.logprob for top in one.top_logprobs],
        }
        for one in got.choices[0].logprobs.content
    ]


def several():
    got = ask("openai", n=3, temperature=1.0, seed=5)
    return [choice.message.content for choice in got.choices]


def error(dialect, **asked):
    try:
        ask(dialect, **asked)
    except Exception as caught:  # its classes have no other base
        return {
            "class": type(caught).__name__,
            "status": getattr(caught, "status_code", None),
            "message": str(caught),
        }
    return None


def errors(dialect):
    long = [{"role": "user", "content": LONG}]
    big = [{"role": "user", "content": BIG}]
    return {
        "bad value": error(dialect, top_p=7),
        "too long": error(dialect, messages=long),
        "wrong key": error(dialect, api_key="not the key"),
        "no such model": error(dialect, model=f"{dialect}/other"),
        "too big": error(dialect, messages=big),
        "too many": error(dialect, url=LIMITED_URL),
    }


ask("openai", url=LIMITED_URL)
print(
    json.dumps(
        {
            dialect: {
                "whole": whole(dialect),
                "streamed": streamed(dialect),
                "tool": tool(dialect, stream=False),
                "streamed tool": tool(dialect, stream=True),
                "errors": errors(dialect),
            }
            for dialect in BASES
        }
        | {"form": form(), "logprobs": logprobs(), "several": several()}
    )
)
