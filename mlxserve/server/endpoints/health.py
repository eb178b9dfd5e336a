"""GET /health, /ready, /metrics and /openapi.json."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxserve.server.metrics import CONTENT_TYPE
from mlxserve.server.service import service

STALLED_S = 120.0
"""Without a step for so long, while there is work, the engine is stuck: no step takes as long."""


async def health(request: Request) -> Response:
    """200 while the engine is alive and, if it has work, makes progress."""
    served = service(request)
    idle_s = served.llm.idle_s()
    if idle_s is None:
        return JSONResponse({"status": "dead"}, 503)
    if served.mailbox and idle_s > STALLED_S:
        return JSONResponse({"status": "stalled", "seconds": round(idle_s)}, 503)
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """200 while new requests are taken: the model is loaded, and the server isn't shutting down."""
    served = service(request)
    if served.draining or served.llm.idle_s() is None:
        return JSONResponse({"status": "not ready"}, 503)
    return JSONResponse({"status": "ready"})


async def metrics(request: Request) -> Response:
    """Figures in Prometheus' text format."""
    return Response(service(request).metrics.text(), media_type=CONTENT_TYPE)


async def openapi(request: Request) -> Response:
    """What there is to ask, and the form of the answers."""
    return JSONResponse(service(request).openapi)
