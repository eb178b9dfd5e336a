"""GET /v1/models, POST /tokenize and /detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from mlxserve.server import openai, turn
from mlxserve.server.body import ignored_header, parse
from mlxserve.server.problems import Problem
from mlxserve.server.schema import (
    DetokenizeReply,
    DetokenizeRequest,
    ModelList,
    ModelReply,
    TokenizeReply,
    TokenizeRequest,
)
from mlxserve.server.service import Service, read, reply, service
from mlxserve.server.tools import check_tools


async def models(request: Request) -> Response:
    """The model, under each of its names."""
    served = service(request)
    return reply(ModelList([_model(served, name) for name in served.config.names]))


async def model(request: Request) -> Response:
    """The model under one name; 404 for another."""
    served, name = service(request), request.path_params["name"]
    served.check_model(name)
    return reply(_model(served, name))


def _model(served: Service, name: str) -> ModelReply:
    return ModelReply(id=name, created=served.created, max_model_len=served.llm.context_tokens)


async def tokenize(request: Request) -> Response:
    """The ids of a text, or of a chat as the model would get it."""
    served, data = service(request), await read(request)

    def work() -> tuple[list[int], list[str]]:
        words = served.llm.tokenizer.template_words
        asked, ignored = parse(data, TokenizeRequest, openai.DIALECT, words)
        served.check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise Problem(400, "give one of prompt and messages")
        tokenizer = served.llm.tokenizer
        if asked.messages is not None:
            if asked.add_special_tokens is not None:
                raise Problem(
                    400,
                    "add_special_tokens is the template's to decide with messages; leave it out",
                    param="add_special_tokens",
                )
            tools = check_tools(asked.tools, None, None, served.config.max_tools)
            openai.check_conversation(asked.messages, words)
            variables = asked.chat_template_kwargs or {}
            ids = turn.prompt_of(served, asked.messages, tools, variables)[1]
            unread = turn.unread(served, tools, variables)
            return ids, ignored + [f"chat_template_kwargs.{name}" for name in unread]
        special = True if asked.add_special_tokens is None else asked.add_special_tokens
        return tokenizer.encode(asked.prompt or "", add_special_tokens=special), ignored

    ids, ignored = await served.prepare(work)
    told = TokenizeReply(ids, len(ids), served.llm.context_tokens)
    return reply(told, ignored_header(ignored, strict=served.config.strict))


async def detokenize(request: Request) -> Response:
    """The text of ids."""
    served, data = service(request), await read(request)

    def work() -> tuple[str, list[str]]:
        asked, ignored = parse(data, DetokenizeRequest, openai.DIALECT)
        served.check_model(asked.model)
        return served.llm.tokenizer.decode(asked.tokens), ignored

    text, ignored = await served.prepare(work)
    return reply(DetokenizeReply(text), ignored_header(ignored, strict=served.config.strict))
