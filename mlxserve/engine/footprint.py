"""What a model will need on this machine, told from its config before it is downloaded."""

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlxserve.cache.spec import PAGE_TOKENS, State, page_bytes, state_bytes
from mlxserve.config import EngineConfig
from mlxserve.engine.cache_plan import cache_dtype, cache_groups, plan_pages
from mlxserve.errors import CapacityError
from mlxserve.kernels.matmul import Form
from mlxserve.kernels.native import usable_cores
from mlxserve.models import registry
from mlxserve.models.activations import step_shape
from mlxserve.models.tensor_parallel import Shard

USEFUL_CONTEXT_TOKENS = 8192
PROBE_BYTES = 512 << 20
PROBE_PASSES = 8

# Peak GB/s that Apple states for a chip's memory; where a name has several, the largest.
APPLE_GB_S: dict[str, float] = {
    "Apple M1": 68,
    "Apple M1 Pro": 200,
    "Apple M1 Max": 400,
    "Apple M1 Ultra": 800,
    "Apple M2": 100,
    "Apple M2 Pro": 200,
    "Apple M2 Max": 400,
    "Apple M2 Ultra": 800,
    "Apple M3": 100,
    "Apple M3 Pro": 150,
    "Apple M3 Max": 400,
    "Apple M3 Ultra": 819,
    "Apple M4": 120,
    "Apple M4 Pro": 273,
    "Apple M4 Max": 546,
    "Apple M5": 153,
}


# Half bits per weight of the GGUF types that load: a scale and a bias of 16 bits for 32 weights.
# Native panels leave out the bias of types that are symmetric.
GGUF_HALF_BITS: dict[str, int] = {"F32": 64, "F16": 32, "BF16": 32} | {
    kind: 2 * bits + 2
    for bits, kinds in {4: "Q4_0 Q4_1 Q4_K", 5: "Q5_0 Q5_1 Q5_K", 8: "Q8_0 Q2_K Q3_K Q6_K"}.items()
    for kind in kinds.split()
}
SYMMETRIC = ("Q4_0", "Q5_0", "Q8_0")


@dataclass(frozen=True, slots=True)
class Footprint:
    """A model's need of memory, and what the engine could give it.

    cache_bytes: keys and values of one sequence of `context_tokens`. room_tokens: the longest
    sequence that the engine would take within the limit; 0: not even the weights fit.
    """

    weight_bytes: int
    cache_bytes: int
    context_tokens: int
    room_tokens: int

    @property
    def fits(self) -> bool:
        """Whether the weights and a context of `context_tokens` fit."""
        return self.room_tokens >= self.context_tokens


@dataclass(frozen=True, slots=True)
class Parts:
    """A model's parameters by place. attention: of all layers, what its heads divide.

    first, last: before the layers and after them. An embedding that is the output head too counts
    in both.
    """

    first: int
    layers: tuple[int, ...]
    last: int
    attention: int


def footprint(
    config: Mapping[str, Any],
    weight_bytes: int,
    limit_bytes: int,
    *,
    metal: bool,
    context_tokens: int = USEFUL_CONTEXT_TOKENS,
    engine: EngineConfig | None = None,
) -> Footprint:
    """Work out what a model with this config.json needs; reads and allocates nothing.

    weight_bytes: of its weights, once loaded. limit_bytes: what this process may use. metal:
    whether it runs on a GPU. context_tokens: the wanted context, cut to what the model was made
    for. Raises ModelError for a config that this version can't run.
    """
    engine = engine or EngineConfig()
    model = registry.build(config)
    wanted = min(context_tokens, model.context_tokens)
    dtype = activation_dtype(config, metal=metal)
    itemsize = cache_dtype(dtype, engine).size
    groups = cache_groups(model.layer_specs(), engine)
    pages = -(-wanted // PAGE_TOKENS)
    used = sum(
        len(g.layers)
        * (
            state_bytes(g.spec)
            if isinstance(g.spec, State)
            else page_bytes(g.spec, itemsize, g.bits) * g.held(pages)
        )
        for g in groups
    )
    try:
        plan = plan_pages(
            groups,
            step_shape(model, dtype),
            engine,
            itemsize=itemsize,
            context_tokens=model.context_tokens,
            free_bytes=limit_bytes - weight_bytes,
        )
    except CapacityError:
        return Footprint(weight_bytes, used, wanted, 0)
    paged = [g for g in groups if g.paged]
    full = [n for n, g in zip(plan.pool_pages, paged, strict=True) if g.window is None]
    room = min([n * PAGE_TOKENS for n in full] + [model.context_tokens])
    return Footprint(weight_bytes, used, wanted, room)


def loaded_bytes(
    config: Mapping[str, Any],
    file_bytes: int,
    *,
    form: Form,
    elements: Mapping[str, int] | None = None,
    shard: Shard | None = None,
) -> int:
    """Bytes of the weights once loaded, told from config.json; reads and allocates nothing.

    form: how this device keeps matrices (`kernels.matmul.form`). Metal and the native kernels keep
    them as they are in the files (file_bytes), but for a GGUF file's; elements: those, by type.
    shard: the part that is loaded, taken to have the mean bytes per weight; None: all of it.
    Raises ModelError for a config that this version can't run.
    """
    if form == "float32":
        whole = 4 * _parameters(config)
    elif not elements:
        whole = file_bytes
    else:
        half_bits = sum(n * GGUF_HALF_BITS[kind] for kind, n in elements.items())
        if form == "panels":
            half_bits -= sum(elements.get(kind, 0) for kind in SYMMETRIC)
        whole = half_bits // 16
    if shard is None:
        return whole
    return whole * _parameters(config, shard) // _parameters(config)


def _parameters(config: Mapping[str, Any], shard: Shard | None = None) -> int:
    module = cast(nn.Module, registry.build(config, shard))
    return sum(array.size for _, array in cast(list, tree_flatten(module.parameters())))


def parts_of(module: nn.Module, layers: int) -> Parts:
    """Count a model's parameters by place. layers: how many it has."""
    first = last = attention = 0
    counts = [0] * layers
    tied = True
    for name, array in cast(list, tree_flatten(module.parameters())):
        steps = name.split(".")
        if "layers" in steps:
            counts[int(steps[steps.index("layers") + 1])] += array.size
            attention += array.size * ("self_attn" in steps)
        elif "embed_tokens" in steps:
            first += array.size
        else:
            last += array.size
            tied = tied and "lm_head" not in steps
    return Parts(first, tuple(counts), last + first * tied, attention)


def is_float32(config: Mapping[str, Any]) -> bool:
    """Whether the files hold float32; those that don't say hold 16 bits, as nearly all do."""
    return (config.get("dtype") or config.get("torch_dtype")) == "float32"


def activation_dtype(config: Mapping[str, Any], *, metal: bool) -> mx.Dtype:
    """What the model will compute in, as far as its config tells; one of 16 bits is like another.

    See `models.load.activation_dtype`.
    """
    return mx.float16 if metal and not is_float32(config) else mx.float32


def memory_bandwidth(device_name: str) -> tuple[float, str]:
    """Bytes per second that this machine reads from memory, and where the number is from."""
    if device_name in APPLE_GB_S:
        return APPLE_GB_S[device_name] * 1e9, device_name
    return measure_bandwidth(usable_cores()), "measured"


def measure_bandwidth(threads: int, size_bytes: int = PROBE_BYTES) -> float:
    """Bytes per second that all threads together read from memory: the fastest pass of several.

    size_bytes: much more than the caches hold. The largest of bytes is the cheapest to find per
    byte: with floats, which may be NaN, one thread computes longer than it waits for memory.
    """
    parts = np.array_split(np.ones(size_bytes, np.int8), threads)
    best_s = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(PROBE_PASSES):
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            best_s = min(best_s, time.perf_counter() - start)
    return size_bytes / best_s
