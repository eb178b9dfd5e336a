"""The ASGI application: routes, and what lies around them."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.config import ServerConfig
from mlxserve.llm import LLM
from mlxserve.server import openapi
from mlxserve.server.delivery import Mailbox
from mlxserve.server.endpoints import chat, completions, health, messages, models
from mlxserve.server.formats import Formats
from mlxserve.server.gate import Gate
from mlxserve.server.journal import Journal
from mlxserve.server.metrics import Metrics
from mlxserve.server.problems import Problem, response
from mlxserve.server.service import Service
from mlxserve.server.tenants import Tenants

ROUTES = [
    Route("/v1/chat/completions", chat.chat_completions, methods=["POST"]),
    Route("/v1/completions", completions.completions, methods=["POST"]),
    Route("/v1/messages", messages.messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
    Route("/v1/models", models.models),
    Route("/v1/models/{name:path}", models.model),
    Route("/tokenize", models.tokenize, methods=["POST"]),
    Route("/detokenize", models.detokenize, methods=["POST"]),
    Route("/health", health.health),
    Route("/ready", health.ready),
    Route("/metrics", health.metrics),
    Route("/openapi.json", health.openapi),
]


def make_app(llm: LLM, config: ServerConfig) -> Starlette:
    """The server of one model, for the event loop that is running. It does not close the model."""
    metrics = Metrics(llm)
    journal = Journal(
        metrics, _route, config.names[0], config.log_format, prompts=config.log_prompts
    )
    served = Service(
        llm=llm,
        config=config,
        mailbox=Mailbox(asyncio.get_running_loop(), metrics),
        metrics=metrics,
        journal=journal,
        tenants=Tenants(config.api_keys, config.requests_per_minute, config.tokens_per_minute),
        formats=Formats.of(llm.tokenizer, config.tool_format, config.reasoning_format),
        openapi=openapi.document(version("mlxserve")),
    )
    middleware = [Middleware(Gate, config=config, tenants=served.tenants, journal=journal)]
    if config.cors_origins:
        middleware.insert(
            0,
            Middleware(
                CORSMiddleware,
                allow_origins=config.cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
            ),
        )
    app = Starlette(
        routes=ROUTES, middleware=middleware, exception_handlers={HTTPException: _no_such_route}
    )
    app.router.redirect_slashes = False
    app.state.service = served
    return app


async def _no_such_route(request: Request, error: Exception) -> Response:
    """404 and 405, in the form that all other problems have."""
    assert isinstance(error, HTTPException)
    path, headers = request.scope["path"], error.headers or {}
    what = f"{path} is nothing here; /openapi.json lists what is"
    if allowed := headers.get("Allow"):
        what = f"{path} takes {allowed}, not {request.method}"
    problem = request.scope["entry"].fail(Problem(error.status_code, what))
    answer = response(problem, path)
    answer.headers.update(headers)
    return answer


def _route(path: str) -> str | None:
    """The route that a path belongs to."""
    found = (route.path_format for route in ROUTES if route.path_regex.match(path))
    return next(found, None)
