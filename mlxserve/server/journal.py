"""One line and some counts for every request that is over."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence, Set
from typing import Any

from starlette.types import Scope

from mlxserve.answers import Answer
from mlxserve.server.delivery import Delivery
from mlxserve.server.metrics import Metrics
from mlxserve.types import Completion

logger = logging.getLogger("mlxserve.access")

QUIET_PATHS = ("/health", "/ready", "/metrics")
"""Asked all the time; they are counted, and no line is written unless they fail."""


class Journal:
    """Writes a line per request to the `mlxserve.access` logger, as text or as JSON.

    paths: those that are counted by name; any other is "other". prompts: with the ids of prompts,
    which are left out otherwise, as are all texts.
    """

    def __init__(
        self, metrics: Metrics, paths: Set[str], log_format: str, *, prompts: bool
    ) -> None:
        self._metrics = metrics
        self._paths = paths
        self._as_json = log_format == "json"
        self._prompts = prompts

    def note(self, scope: Scope, status: int, started_s: float) -> None:
        """A request is over. status: 499 if the client went away before the answer began."""
        took_s = time.perf_counter() - started_s
        path = scope["path"] if scope["path"] in self._paths else "other"
        self._metrics.requests.labels(path, str(status)).inc()
        self._metrics.end_to_end.observe(took_s)
        if path in QUIET_PATHS and status == 200:
            return
        line: dict[str, Any] = {"method": scope["method"], "path": scope["path"][:200]}
        line |= {"status": status, "seconds": round(took_s, 3)}
        if tenant := scope.get("tenant"):
            line |= {"tenant": tenant.name} if tenant.name else {}
        if delivery := scope.get("delivery"):
            answers = [answer.completion() for answer in delivery.answers]
            for done in answers:
                self._metrics.note(done.finish_reason, done.timings, done.usage)
            line |= self._told(delivery, answers)
            if tenant and tenant.tokens:
                tenant.tokens.take(line["prompt_tokens"] + line["completion_tokens"])
        logger.info(json.dumps(line) if self._as_json else _text(line))

    def _told(self, delivery: Delivery, answers: Sequence[Completion]) -> dict[str, Any]:
        first = answers[0]
        line: dict[str, Any] = {
            "id": delivery.answers[0].request.id,
            "answers": len(answers),
            "prompt_tokens": _prompt_tokens(delivery.answers),
            "cached_tokens": first.usage.cached_tokens,
            "completion_tokens": sum(done.usage.completion_tokens for done in answers),
            "finish_reason": ",".join(dict.fromkeys(done.finish_reason for done in answers)),
        }
        if first.timings.ttft_s is not None:
            line["ttft_s"] = round(first.timings.ttft_s, 3)
        if first.timings.decode_tokens_per_s is not None:
            line["itl_s"] = round(1 / first.timings.decode_tokens_per_s, 4)
        if self._prompts:
            line["prompt_ids"] = [list(answer.request.prompt_ids) for answer in delivery.answers]
        return line


def _prompt_tokens(answers: Any) -> int:
    """Of each prompt once, however many answers it has."""
    prompts: dict[int, Answer] = {id(answer.request.prompt_ids): answer for answer in answers}
    return sum(len(answer.request.prompt_ids) for answer in prompts.values())


def _text(line: dict[str, Any]) -> str:
    """`POST /v1/chat/completions 200 0.123 s, tenant key1, ...`: for people."""
    head = f"{line.pop('method')} {line.pop('path')!a} {line.pop('status')} {line.pop('seconds')} s"
    return ", ".join([head, *(f"{name} {value}" for name, value in line.items())])
