"""Every kind of cache over two ranks, and all that the engine can do at once, over HTTP."""

import contextlib
import itertools
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import mlx.core as mx
import pytest

from mlxserve import LLM
from mlxserve.config import EngineConfig
from mlxserve.engine import cache_plan
from mlxserve.errors import CapacityError
from mlxserve.models.registry import build
from mlxserve.opening import Opened, open_model
from tests.distributed.asking import CLIENTS, Told, at_once, check_close, environment, serving, tell
from tests.support import serving as in_process
from tests.support.model_dir import write_model_dir
from tests.support.processes import TIMEOUT_S, Process
from tests.support.tiny import tiny_gemma3, tiny_llama, tiny_mistral

pytestmark = pytest.mark.full

SIZES = {"vocab_size": 260, "max_position_embeddings": 2048, "eos_token_id": 256}
MODELS = {"llama": tiny_llama, "mistral": tiny_mistral, "gemma3": tiny_gemma3}
BATCH = {"max_batch": 6, "max_batched_tokens": 48}  # so some wait, and prompts are cut


class Kind(NamedTuple):
    """A cache, by the model and the options of the engine. pages: of its largest group, at least.

    preempts: whether requests are sure to need more than they had room for when they started.
    """

    model: str
    options: dict[str, Any]
    pages: int = 8
    preempts: bool = False

    @property
    def packed(self) -> bool:
        return "kv_bits" in self.options


KEEP = {"max_kv_size": 100, "keep": 4}
KINDS = {
    "full": Kind("llama", {}, preempts=True),
    "windows": Kind("mistral", {}, 12),
    "full and windows": Kind("gemma3", {}),
    "keep": Kind("llama", KEEP, 12),
    "keep, over a page": Kind("llama", {"max_kv_size": 150, "keep": 70}, 12),
    "8 bits": Kind("llama", {"kv_bits": 8}),
    "4 bits": Kind("llama", {"kv_bits": 4}),
    "8/4 bits": Kind("llama", {"kv_bits": "8/4"}),
    "full and windows, 8 bits": Kind("gemma3", {"kv_bits": 8}),
    "keep, 8/4 bits": Kind("llama", KEEP | {"kv_bits": "8/4"}, 12),
    "full, nothing shared": Kind("llama", {"prefix_cache": False}),
}
QUICK = ((1, "keep, 8/4 bits"), (2, "full and windows, 8 bits"))  # stages, and the cache
SPARE_BYTES = 64 << 10  # that a rank may hold beside its part of the model
CLOSE, CLOSE_IF_PACKED = 1e-4, 5e-3  # what is packed may be rounded the other way

GREEDY = {"temperature": 0, "ignore_eos": True}
DRAWN = {"temperature": 0.8, "ignore_eos": True}
BEGIN = "All begins so. " * 9
LEAVES = GREEDY | {"prompt": BEGIN + "i" * 50, "max_tokens": 60, "stream": True}


def all_asked(tokens: int) -> list[dict[str, Any]]:
    """A client's each. tokens: of those answers that complete a third page, or a fourth as well."""
    form = f"[a-z ]{{{tokens - 1}}}!"
    return [
        GREEDY | {"prompt": BEGIN + "a" * 50, "max_tokens": tokens},
        GREEDY | {"prompt": BEGIN + "b" * 51, "max_tokens": tokens},
        GREEDY | {"prompt": "c" * 187, "max_tokens": 9, "echo": True, "logit_bias": {"65": 3}},
        GREEDY | {"prompt": "d" * 150, "max_tokens": 0, "echo": True},
        DRAWN | {"prompt": "e" * 184, "max_tokens": tokens, "top_p": 0.95, "seed": 5,
                 "repetition_penalty": 1.1},
        DRAWN | {"prompt": "f" * 60, "max_tokens": 10, "n": 2, "seed": 6},
        DRAWN | {"prompt": "g" * 183, "max_tokens": tokens, "seed": 7, "regex": form,
                 "ignore_eos": False},
        GREEDY | {"prompt": "h" * 186, "max_tokens": tokens, "presence_penalty": 0.5},
    ]  # fmt: skip


def leave(url: str) -> None:
    """Hang up once the answer has begun."""
    ask = httpx.stream("POST", f"{url}/v1/completions", json=LEAVES, timeout=TIMEOUT_S)
    with ask as answer:
        next(answer.iter_lines())


def ask_all(url: str, asked: Sequence[dict[str, Any]]) -> list[list[Told]]:
    def work(client: int) -> list[Told]:
        if client == CLIENTS - 1:
            leave(url)
        return tell(url, asked[client])

    return at_once(work)


def figures(server: Process) -> dict[str, float]:
    lines = httpx.get(f"{server.url}/metrics", timeout=TIMEOUT_S).text.splitlines()
    found = {}
    for line in lines:
        with contextlib.suppress(ValueError):
            name, _, value = line.partition(" ")
            found[name] = float(value)
    return found


class Half:
    """A group of two, as `models.base.Group`, that computes nothing."""

    rank, size = 0, 2

    def sum(self, x: mx.array) -> mx.array:
        return x

    def gather(self, x: mx.array, widths: Sequence[int]) -> mx.array:
        return x


def pages(opened: Opened, stages: int) -> int:
    """Of the largest group, as many as both ranks have memory for. Raises CapacityError."""
    if stages == 1:
        parts = [opened.part(Half())]
    else:
        n = build(opened.checkpoint.config).config.layers
        parts = [opened.part(layers=range(-(-n // 2))), opened.part(layers=range(-(-n // 2), n))]
    plans = [cache_plan.plan_of(opened.load(part), opened.config)[2] for part in parts]
    return max(min(counts) for counts in zip(*(p.pool_pages for p in plans), strict=True))


def memory_bytes(model: Path, kind: Kind, stages: int) -> int:
    """The least for a rank that leaves room for its pages, so that there is never enough."""
    low, high = 1 << 20, 16 << 20
    while high - low > 4096:
        middle = (low + high) // 2
        config = EngineConfig(**kind.options | BATCH, memory_limit_bytes=middle)
        try:
            enough = pages(open_model(model, config), stages) >= kind.pages
        except CapacityError:
            enough = False
        low, high = (low, middle) if enough else (middle, high)
    return high + SPARE_BYTES


def flags(options: dict[str, Any]) -> list[str]:
    args = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        args += ["--no-prefix-cache"] if name == "prefix_cache" else [f"--{flag}", str(value)]
    return args


@pytest.mark.parametrize(("stages", "name"), [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
    for case in itertools.product((1, 2), KINDS)
])  # fmt: skip
def test_two_ranks_answer_as_one_process_whatever_happens_meanwhile(tmp_path, stages, name):
    """The same to the last bit once more, from what is cached, and alone."""
    kind = KINDS[name]
    asked = all_asked(150 if kind.preempts else 14)
    model = write_model_dir(tmp_path / "model", MODELS[kind.model](**SIZES))
    with (
        LLM(model, **kind.options | {"prefix_cache": False}) as llm,
        in_process.serving(llm) as whole,
    ):
        right = [tell(whole.url, one) for one in asked]
    memory_gib = memory_bytes(model, kind, stages) / (1 << 30)
    args = [*flags(kind.options | BATCH), "--memory", f"{memory_gib:.9f}"]
    env = environment(tmp_path, timeout_s=20)
    with serving(model, ranks=2, stages=stages, env=env, args=args) as server:
        first, second = ask_all(server.url, asked), ask_all(server.url, asked)
        seen = figures(server)
        assert first == second
        for client in (1, 6):
            assert tell(server.url, asked[client]) == first[client]
        server.signal(signal.SIGTERM)
        assert server.end() == 0
    for one, ours, theirs in zip(asked, first, right, strict=True):
        if kind.packed and one["temperature"]:
            continue  # a number that moved may have drawn another token
        for got, expected in zip(ours, theirs, strict=True):
            check_close(got, expected, CLOSE_IF_PACKED if kind.packed else CLOSE)
    if kind.preempts:
        assert seen["mlxserve_preemptions_total"]
    assert bool(seen["mlxserve_prefix_hits_total"]) == kind.options.get("prefix_cache", True)
