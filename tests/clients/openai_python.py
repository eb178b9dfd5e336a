"""OpenAI's Python client against a server: prints what it was told, as JSON.

python openai_python.py URL KEY LIMITED_URL

LIMITED_URL: a server that takes one request a minute.
"""

import json
import sys

import openai
from asking import BIG, CHAT, LONG, MODEL, SCHEMA, TOOL

URL, KEY, LIMITED_URL = sys.argv[1:]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)


def ask(**more):
    asked = {"model": MODEL, "messages": CHAT, "max_tokens": 24, "temperature": 0.0, **more}
    return client.chat.completions.create(**asked)


def whole():
    got = ask()
    choice = got.choices[0]
    return {
        "text": choice.message.content,
        "finish_reason": choice.finish_reason,
        "completion_tokens": got.usage.completion_tokens,
    }


def streamed():
    pieces, reason, tokens = [], None, None
    for chunk in ask(stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            reason = choice.finish_reason or reason
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    return {"text": "".join(pieces), "finish_reason": reason, "completion_tokens": tokens}


def tool(stream):
    asked = {
        "model": MODEL,
        "messages": CHAT,
        "max_tokens": 600,
        "seed": 1,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    if stream:
        with client.chat.completions.stream(**asked) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**asked).choices[0]
    (call,) = choice.message.tool_calls
    return {
        "finish_reason": choice.finish_reason,
        "name": call.function.name,
        "arguments": call.function.arguments,
    }


def form():
    asked = {"name": "answer", "strict": True, "schema": SCHEMA}
    got = ask(
        max_tokens=300, temperature=1.0, seed=1,
        response_format={"type": "json_schema", "json_schema": asked},
    )  # fmt: skip
    return got.choices[0].message.content


def logprobs():
    got = ask(max_tokens=5, logprobs=True, top_logprobs=2)
    return [
        {
            "token": one.token,
            "logprob": one.logprob,
            "top": [top.logprob for top in one.top_logprobs],
        }
        for one in got.choices[0].logprobs.content
    ]


def several():
    got = ask(n=3, temperature=1.0, seed=5)
    return [choice.message.content for choice in got.choices]


def error(call):
    try:
        call()
    except openai.APIStatusError as caught:
        return {
            "class": type(caught).__name__,
            "status": caught.status_code,
            "message": caught.message,
            "param": caught.param,
            "code": caught.code,
        }
    return None


def at(url, key):
    other = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    return lambda: other.completions.create(model=MODEL, prompt="x", max_tokens=1)


limited = at(LIMITED_URL, KEY)
limited()
print(
    json.dumps(
        {
            "version": openai.__version__,
            "whole": whole(),
            "streamed": streamed(),
            "tool": tool(stream=False),
            "streamed tool": tool(stream=True),
            "form": form(),
            "logprobs": logprobs(),
            "several": several(),
            "errors": {
                "bad value": error(lambda: ask(top_p=7)),
                "wrong type": error(lambda: ask(extra_body={"seed": "x"})),
                "wrong key": error(at(URL, "not the key")),
                "no such model": error(lambda: ask(model="other")),
                "no such path": error(lambda: client.embeddings.create(model=MODEL, input="x")),
                "too big": error(lambda: ask(messages=[{"role": "user", "content": BIG}])),
                "too long": error(lambda: ask(messages=[{"role": "user", "content": LONG}])),
                "too many": error(limited),
                "streamed": error(lambda: ask(stream=True, top_p=7)),
            },
        }
    )
)
