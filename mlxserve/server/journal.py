"""One line and some counts for every request that is over."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from mlxserve.answers import Answer
from mlxserve.server.metrics import Metrics
from mlxserve.server.problems import Problem, problem_of
from mlxserve.server.tenants import Tenant

if TYPE_CHECKING:
    from mlxserve.server.exchange import Exchange

logger = logging.getLogger("mlxserve.access")

QUIET_PATHS = ("/health", "/ready", "/metrics")
"""Asked all the time; they are counted, and no line is written unless they fail."""

MAX_ERROR_CHARS = 300
SANE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


@dataclass(slots=True, kw_only=True)
class Entry:
    """What is known of a request, filled in on its way; `entry` in its scope.

    id: the client's own, if it gave one, in its answer's headers and in the log. problem: why it
    has no answer, or only a part; cut: because the client went away, or the server ends. reserved:
    of its tenant's tokens.
    """

    id: str
    started_s: float = field(default_factory=time.perf_counter)
    tenant: Tenant | None = None
    exchange: Exchange | None = None
    problem: Problem | None = None
    cut: bool = False
    reserved: int = 0

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Entry:
        """Of a request that begins."""
        given = headers.get("x-request-id", "")
        return cls(id=given if SANE_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}")

    def fail(self, error: BaseException) -> Problem:
        """Take down what ended it."""
        self.problem = problem_of(error)
        self.cut = self.problem.status == 499 or isinstance(error, asyncio.CancelledError)
        return self.problem

    @property
    def answers(self) -> list[Answer]:
        """As they stand."""
        return [] if self.exchange is None else list(self.exchange.delivery.answers)

    @property
    def prompts(self) -> list[Answer]:
        """The first answer to each prompt, which may have several."""
        firsts: dict[int, Answer] = {}
        for answer in self.answers:
            firsts.setdefault(id(answer.request.prompt_ids), answer)
        return list(firsts.values())

    @property
    def tokens(self) -> int:
        """Read and written, each prompt once; none where the engine took nothing in."""
        if self.problem is not None and self.problem.status == 429:
            return 0
        read = sum(len(answer.request.prompt_ids) for answer in self.prompts)
        return read + sum(len(answer.token_ids) for answer in self.answers)

    def most_tokens(self, context_tokens: int) -> int:
        """Read, and written if no answer ends by itself, each prompt once."""
        most = sum(len(answer.request.prompt_ids) for answer in self.prompts)
        for answer in self.answers:
            room = context_tokens - len(answer.request.prompt_ids)
            most += min(answer.request.params.max_tokens or room, room)
        return most

    def finish_reasons(self) -> list[str]:
        """Of each answer, in OpenAI's words, or "cancelled", "error" or "refused"."""
        if self.exchange is None:
            return []
        reasons = [self.exchange.finish_reason(index) for index in range(len(self.answers))]
        if self.problem is None or self.cut:
            return reasons
        instead = "refused" if self.problem.status == 429 else "error"
        return [instead if reason == "cancelled" else reason for reason in reasons]


class Journal:
    """Writes a line per request to the `mlxserve.access` logger, as text or as JSON.

    route: the route that a path belongs to, by which it is counted, or None. prompts: with the ids
    of prompts, which are left out otherwise, as are all texts.
    """

    def __init__(
        self,
        metrics: Metrics,
        route: Callable[[str], str | None],
        model: str,
        log_format: str,
        *,
        prompts: bool,
    ) -> None:
        self._metrics = metrics
        self._route = route
        self._model = model
        self._as_json = log_format == "json"
        self._prompts = prompts

    def note(self, scope: Scope, status: int) -> None:
        """A request is over. status: 499 if the client went away before the answer began."""
        entry: Entry = scope["entry"]
        took_s = time.perf_counter() - entry.started_s
        route = self._route(scope["path"])
        self._metrics.requests.labels(route or "other", str(status)).inc()
        self._metrics.end_to_end.observe(took_s)
        for reason in entry.finish_reasons():
            if reason != "refused":
                self._metrics.outcomes.labels(reason).inc()
        if route in QUIET_PATHS and status == 200:
            return
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status,
            "seconds": round(took_s, 3),
            "id": entry.id,
        }
        if entry.tenant is not None:
            line |= {"tenant": entry.tenant.name} if entry.tenant.name else {}
            line["model"] = self._model
        if entry.exchange is not None:
            line |= self._told(entry, entry.exchange)
        if entry.problem is not None:
            line["error"] = entry.problem.message[:MAX_ERROR_CHARS]
        logger.info(json.dumps(line) if self._as_json else _text(line))

    def _told(self, entry: Entry, exchange: Exchange) -> dict[str, Any]:
        line: dict[str, Any] = {
            "model": exchange.model,
            "answers": len(entry.answers),
            "prompt_tokens": sum(len(answer.request.prompt_ids) for answer in entry.prompts),
            "cached_tokens": sum(one.completion().usage.cached_tokens for one in entry.prompts),
            "completion_tokens": sum(len(answer.token_ids) for answer in entry.answers),
            "finish_reason": ",".join(dict.fromkeys(entry.finish_reasons())),
        }
        paces = exchange.delivery.paces.values()
        if firsts := [pace.ttft_s for pace in paces if pace.ttft_s is not None]:
            line["ttft_s"] = round(min(firsts), 3)
        if gaps := sum(pace.gaps for pace in paces):
            line["itl_s"] = round(sum(pace.gaps_s for pace in paces) / gaps, 4)
            line["max_itl_s"] = round(max(pace.longest_gap_s for pace in paces), 4)
        if self._prompts:
            line["prompt_ids"] = [list(answer.request.prompt_ids) for answer in entry.prompts]
        return line


def _text(line: dict[str, Any]) -> str:
    """`TIME POST '/v1/chat/completions' 200 0.123 s, id req_..., ...`: for people."""
    head = f"{line.pop('time')} {line.pop('method')} {line.pop('path')!a} {line.pop('status')}"
    head += f" {line.pop('seconds')} s"
    return ", ".join([head, *(f"{name} {value}" for name, value in line.items())])
