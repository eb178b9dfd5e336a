"""What can go wrong with a request, as a status and as the body that a client's library expects."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Literal

import msgspec
from starlette.responses import Response

from mlxserve.errors import CapacityError, ContextError, EngineDead, ModelError, RequestError
from mlxserve.report import clip

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
MAX_MESSAGE_CHARS = 1000
SHUTTING_DOWN = "the server is shutting down; try another"
ENGINE_DEAD = "the engine has stopped, and the server ends; try again once it is back"

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class Problem(Exception):  # noqa: N818 (most of them are the client's)
    """A request that gets no answer. message: one line; param: the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _printable(_short(message))
        self.code = code
        self.param = param and _printable(clip(param))
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """When to try again, and how to say who one is."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status == 408:  # what still comes of the body isn't waited for
            headers["Connection"] = "close"
        return headers


def _short(text: str) -> str:
    """What a client sent may be part of a message, and as long as a body may be.

    Messages begin with what is wrong and end with what to do: the middle is left out.
    """
    half = MAX_MESSAGE_CHARS // 2
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:half]}...{text[-half:]}"


def _printable(text: str) -> str:
    """Of any letters, which a log keeps on one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def problem_of(error: BaseException) -> Problem:
    """Any error as a problem; a bug of ours is logged, and its details are kept from the client."""
    match error:
        case Problem():
            return error
        case ContextError():
            return Problem(400, str(error), code="context_length_exceeded", param=error.param)
        case RequestError():
            return Problem(400, str(error), param=error.param)
        case CapacityError():
            return Problem(429, str(error), code="overloaded", retry_after_s=RETRY_AFTER_S)
        case EngineDead():
            return Problem(503, ENGINE_DEAD, retry_after_s=10 * RETRY_AFTER_S)
        case ModelError():
            return Problem(500, str(error))
        case asyncio.CancelledError():  # what still runs when the server ends
            return Problem(503, SHUTTING_DOWN, retry_after_s=RETRY_AFTER_S)
    logger.error("a request failed", exc_info=error)
    return Problem(500, f"the server failed ({type(error).__name__}); its log says where")


class ErrorBody(msgspec.Struct):
    """param: the field that is wrong; code: for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct):
    """Every answer that isn't a success, in OpenAI's dialect."""

    error: ErrorBody

    @classmethod
    def of(cls, problem: Problem) -> ErrorReply:
        """A problem in this form."""
        kind = "invalid_request_error" if problem.status < 500 else "server_error"
        kind = _KINDS.get(problem.status, kind)
        return cls(ErrorBody(problem.message, kind, problem.param, problem.code))


class AnthropicError(msgspec.Struct):
    """What is wrong, in words; type: for programs."""

    type: str
    message: str


class AnthropicErrorReply(msgspec.Struct):
    """Every answer that isn't a success, in Anthropic's dialect; the words name the field."""

    error: AnthropicError
    type: Literal["error"] = "error"

    @classmethod
    def of(cls, problem: Problem) -> AnthropicErrorReply:
        """A problem in this form."""
        kind = "invalid_request_error" if problem.status < 500 else "api_error"
        kind = {413: "request_too_large", 503: "overloaded_error"}.get(problem.status, kind)
        named = problem.param is None or problem.param in problem.message
        message = problem.message if named else f"{problem.param}: {problem.message}"
        return cls(AnthropicError(_KINDS.get(problem.status, kind), message))


def error_form(path: str) -> type[ErrorReply] | type[AnthropicErrorReply]:
    """The form of errors that clients of this path know."""
    return AnthropicErrorReply if path.startswith("/v1/messages") else ErrorReply


def id_header(path: str) -> bytes:
    """The header in which clients of this path look for a request's id."""
    return b"request-id" if error_form(path) is AnthropicErrorReply else b"x-request-id"


def response(problem: Problem, path: str) -> Response:
    """The whole answer to a request that gets no other."""
    data = msgspec.json.encode(error_form(path).of(problem))
    return Response(data, problem.status, problem.headers, "application/json")
