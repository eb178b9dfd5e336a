"""What `/metrics` tells, in Prometheus' format; names are documented in docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from mlxserve.histogram import Distribution, Histogram
from mlxserve.llm import LLM

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
GAPS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


GATEWAY_NAMES = {
    "vllm:num_requests_running": "mlxserve_requests_running",
    "vllm:num_requests_waiting": "mlxserve_requests_waiting",
    "vllm:kv_cache_usage_perc": "mlxserve_kv_cache_utilization",
}
"""What the Gateway API inference extension reads by default to choose a server (its proposal 003,
"Model Server Protocol"), beside our own names."""


class Metrics:
    """Counts of one server. Used on the event loop's thread.

    gaps: a value for each token of each answer, so it must cost next to nothing.
    """

    def __init__(self, llm: LLM) -> None:
        self.ttft = Histogram(SECONDS)
        self.gaps = Histogram(GAPS_S)
        self.end_to_end = Histogram(SECONDS)
        self._registry = CollectorRegistry()
        self._registry.register(_Engine(llm))
        self._registry.register(_Times(self))
        self.requests = Counter(
            "mlxserve_requests",
            "HTTP requests that are over, by path and status.",
            ("path", "status"),
            registry=self._registry,
        )
        self.outcomes = Counter(
            "mlxserve_answers",
            "Answers that ended, by reason.",
            ("finish_reason",),
            registry=self._registry,
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)


def _histogram(name: str, text: str, found: Distribution) -> Metric:
    names = [*map(str, found.bounds), "+Inf"]
    buckets = list(zip(names, accumulate(found.counts), strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=found.sum)


class _Times(Collector):
    """The server's histograms."""

    def __init__(self, metrics: Metrics) -> None:
        self._told = {
            "mlxserve_time_to_first_token_seconds": (
                "From submission to the first token.",
                metrics.ttft,
            ),
            "mlxserve_inter_token_seconds": ("Between two tokens of an answer.", metrics.gaps),
            "mlxserve_request_seconds": (
                "From a request's head to its last byte.",
                metrics.end_to_end,
            ),
        }

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        for name, (text, histogram) in self._told.items():
            yield _histogram(name, text, histogram.snapshot())


class _Engine(Collector):
    """The engine's own figures, read when they are asked for."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        now = self._llm.stats()
        gauges = {
            "mlxserve_requests_running": ("Requests in the batch.", now.running),
            "mlxserve_requests_waiting": ("Requests in the queue.", now.waiting),
            "mlxserve_kv_cache_utilization": (
                "Share of the cache's pages that running requests hold.",
                now.pages_used / now.pages if now.pages else 0.0,
            ),
            "mlxserve_kv_pages_cached": ("Pages kept for prompts to come.", now.pages_cached),
            "mlxserve_kv_pages_used": ("Pages that running requests hold.", now.pages_used),
            "mlxserve_kv_cache_bytes": ("Bytes that the cache takes.", now.cache_bytes),
            "mlxserve_peak_memory_bytes": ("The most that MLX held.", now.peak_memory_bytes),
        }
        counters = {
            "mlxserve_steps": ("Steps computed.", now.steps),
            "mlxserve_prompt_tokens": (
                "Prompt tokens of requests that came in.",
                now.prompt_tokens,
            ),
            "mlxserve_cached_prompt_tokens": ("Those found in the cache.", now.cached_tokens),
            "mlxserve_prefix_hits": ("Requests that found some.", now.prefix_hits),
            "mlxserve_completion_tokens": ("Tokens drawn.", now.completion_tokens),
            "mlxserve_preemptions": ("Requests that had to start over.", now.preemptions),
            "mlxserve_refused": ("Requests refused for want of room or time.", now.refused),
        }
        for name, ours in GATEWAY_NAMES.items():
            gauges[name] = gauges[ours]
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)
        yield _histogram("mlxserve_step_seconds", "Of each step.", now.step_s)
        yield _histogram(
            "mlxserve_step_gap_seconds",
            "Of each step, the time in which the device waited for it.",
            now.step_gap_s,
        )
