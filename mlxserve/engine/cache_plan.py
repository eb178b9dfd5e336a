"""From a model's layers, the settings and the memory there is to the shape of the cache."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from mlxserve import config as settings
from mlxserve import device
from mlxserve.cache.groups import LayerGroup, group_layers, rotating
from mlxserve.cache.spec import (
    PAGE_TOKENS,
    UNPACKED,
    KVBits,
    LayerSpec,
    State,
    page_bytes,
    side_bytes,
    state_bytes,
)
from mlxserve.cache.transfer import Pages
from mlxserve.config import EngineConfig
from mlxserve.kernels import attention, matmul, registry
from mlxserve.kernels.metal.launch import runner
from mlxserve.kernels.pages import dtype_name
from mlxserve.kernels.uses import AttentionUse
from mlxserve.memory import (
    CachePlan,
    CacheShape,
    GroupShape,
    StepShape,
    device_limit_bytes,
    plan_cache,
)
from mlxserve.models.activations import step_shape
from mlxserve.models.base import Model
from mlxserve.models.uses import attention_uses


def cache_specs(specs: Sequence[LayerSpec], config: EngineConfig) -> list[LayerSpec]:
    """What the layers keep under these settings. Raises RequestError for a layer that can't."""
    if config.max_kv_size is None:
        return list(specs)
    return rotating(specs, config.max_kv_size, config.keep)


def cache_groups(
    specs: Sequence[LayerSpec], config: EngineConfig, page_tokens: int = PAGE_TOKENS
) -> list[LayerGroup]:
    """The same, in groups, with the form of their pages. Raises RequestError."""
    return group_layers(cache_specs(specs, config), cache_bits(config), page_tokens)


def cache_bits(config: EngineConfig) -> KVBits:
    """Of sealed pages."""
    return UNPACKED if config.kv_bits is None else KVBits.of(*settings.kv_bits(config.kv_bits))


def cache_dtype(model: mx.Dtype, config: EngineConfig) -> mx.Dtype:
    """Of keys and values that aren't packed: the model's, or one of 16 bits if that was asked."""
    narrow = config.kv_bits is not None and 16 in settings.kv_bits(config.kv_bits)
    return mx.float16 if narrow and model == mx.float32 else model


def cache_uses(
    model: Model, dtype: mx.Dtype, config: EngineConfig
) -> dict[AttentionUse, list[int]]:
    """What the layers ask of attention over this cache. dtype: that the model computes in."""
    specs = cache_specs(model.layer_specs(), config)
    return attention_uses(model, cache_dtype(dtype, config), specs, cache_bits(config))


def step_tokens(config: EngineConfig) -> int:
    """Tokens in a step: enough to fill the device, and no more than it does in a few seconds.

    Ctrl-C waits for the step under way. The native CPU kernels reach their full speed at 128 rows;
    MLX's own matmul on CPU computes about ten tokens of a 135M model per second.
    """
    default = {"packed": 512, "panels": 128, "float32": 32}[matmul.form()]
    return config.max_batched_tokens or max(default, config.max_batch)


def cache_shape(
    groups: Sequence[LayerGroup], step: StepShape, *, itemsize: int, tokens: int
) -> CacheShape:
    """What these groups' arrays take. itemsize: bytes of a key's or value's number.

    tokens: of the largest step, whose queries attend at once.
    """
    shapes, slot_bytes = [], 0
    for group in groups:
        if isinstance(group.spec, State):
            slot_bytes += len(group.layers) * state_bytes(group.spec)
            continue
        sides = side_bytes(group.spec, itemsize, group.bits, group.page_tokens)
        plain = page_bytes(group.spec, itemsize, page_tokens=group.page_tokens)
        heads = max((step.heads[layer] for layer in group.layers), default=0)
        scratch = attention.scratch_bytes(plain, group.page_tokens, group.spec.dim, heads * tokens)
        shapes.append(
            GroupShape(
                page_bytes=len(group.layers) * sum(sides),
                hot_page_bytes=len(group.layers) * plain,
                array_bytes=max(sides),
                window_pages=group.pages_at_most,
                scratch_bytes=scratch,
            )
        )
    return CacheShape(tuple(shapes), slot_bytes)


def plan_pages(
    groups: Sequence[LayerGroup],
    step: StepShape,
    config: EngineConfig,
    *,
    itemsize: int,
    context_tokens: int,
    free_bytes: int,
) -> CachePlan:
    """How many pages the cache may grow to. itemsize: bytes of a key's or value's number.

    context_tokens: the model's own limit. free_bytes: what the weights leave. Raises CapacityError.
    """
    tokens = step_tokens(config)
    return plan_cache(
        cache_shape(groups, step, itemsize=itemsize, tokens=tokens),
        step_bytes=step.largest_bytes(tokens, config.max_batch),
        free_bytes=free_bytes,
        max_batch=config.max_batch,
        max_batched_tokens=tokens,
        context_tokens=context_tokens,
        page_tokens=groups[0].page_tokens,
    )


def plan_of(
    model: Model, config: EngineConfig, page_tokens: int = PAGE_TOKENS
) -> tuple[list[LayerGroup], mx.Dtype, CachePlan]:
    """A loaded model's cache: its groups, the dtype of what isn't packed, how far it may grow.

    Groups are those of the whole model, with the layers that are here: perhaps none.
    """
    groups = [
        replace(group, layers=tuple(i for i in group.layers if i in model.own_layers))
        for group in cache_groups(model.layer_specs(), config, page_tokens)
    ]
    dtype = cache_dtype(model.dtype, config)
    plan = plan_pages(
        groups,
        step_shape(model, model.dtype),
        config,
        itemsize=dtype.size,
        context_tokens=model.context_tokens,
        free_bytes=free_bytes(config),
    )
    return groups, dtype, plan


def free_bytes(config: EngineConfig) -> int:
    """What the cache may take, once the weights are there."""
    if config.memory_limit_bytes is None and not device.has_metal():
        return device_limit_bytes()  # what is available now: the weights are taken off already
    return (config.memory_limit_bytes or device_limit_bytes()) - mx.get_active_memory()


def fingerprint(cache: Pages, config: EngineConfig) -> dict[str, str]:
    """What a cache's numbers depend on, beside the model: for the file of a saved one.

    How many processes compute it isn't among them: that moves numbers by their last bits alone.
    """
    layers = "; ".join(f"{n} x {spec}" for spec, n in Counter(cache.specs.values()).items())
    bits = next((group.bits for group in cache.groups if group.bits), None)
    choices = {choice.op: choice.implementation for choice in registry.report()}
    kinds = set(choices.values())
    named = ",".join(f"{op}={name}" for op, name in sorted(choices.items()))
    kernels = kinds.pop() if len(kinds) == 1 else named
    if config.deterministic and runner() is not None:  # elsewhere that changes no kernel
        kernels += ", deterministic"
    return {
        "dtype": dtype_name(cache.dtype),
        "kv_bits": f"{bits.keys or 'plain'}/{bits.values or 'plain'}" if bits else "plain",
        "page_tokens": str(cache.page_tokens),
        "layers": layers,
        "kernels": kernels,
    }
