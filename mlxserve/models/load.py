"""From a config and named tensors to a model that is ready to run."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlxserve import device
from mlxserve.errors import ModelError, RequestError
from mlxserve.kernels import append, attention, matmul, registry
from mlxserve.kernels.matmul import KernelWeight, PanelWeight, Weight
from mlxserve.kernels.metal.launch import runner
from mlxserve.kernels.quantized import PackedWeight
from mlxserve.kernels.uses import AttentionUse, MatmulUse, Use
from mlxserve.models import tensors
from mlxserve.models.base import Group, Model, Weights
from mlxserve.models.layers import Embedding, Linear
from mlxserve.models.registry import build
from mlxserve.models.tensor_parallel import Shard, shard_of
from mlxserve.models.tensors import EMBEDDING, HEAD
from mlxserve.models.uses import attention_uses, matmul_uses, other_uses
from mlxserve.sources.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

Prepare = Callable[[mx.array | PackedWeight, mx.Dtype], Weight]
Uses = Callable[[Model, mx.Dtype], dict[AttentionUse, list[int]]]

COMPUTE_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def load_model(
    config: Mapping[str, Any],
    weights: Weights,
    *,
    shard: Shard | None = None,
    compute_dtype: mx.Dtype | None = None,
    prepare: Prepare | None = None,
    uses: Uses = attention_uses,
    deterministic: bool = False,
    cancelled: Callable[[], bool] = lambda: False,
) -> Model:
    """The model of `config` with `weights` installed and evaluated: any thread may run it.

    weights: tensors under their checkpoint names, dense or packed. The dict is emptied, so that a
        source is freed once its layer is converted: the peak is the model plus the largest group.
    shard: the part of the model that the weights are of, from `shard_checkpoint`; None: all of it.
    compute_dtype: float32, float16 or bfloat16 for activations, and for dense weights on Metal.
        None keeps the checkpoint's own type on Metal and takes float32 on CPU.
    prepare: the form in which this device computes with a matrix; None: `matmul.prepare`.
    uses: what the layers will ask of attention, of a model that computes in such a dtype.
    deterministic: a row's result must not depend on what else is in its step.
    cancelled: asked now and then; once it is true, loading ends with ModelError.

    Raises ModelError for an unsupported config, and, naming the tensors, for weights that are
    missing, unexpected, of another shape or not floating. Raises RequestError for what
    `deterministic` can't be had with.
    """
    if compute_dtype is not None and compute_dtype not in COMPUTE_DTYPES:
        raise ModelError(f"compute_dtype is {compute_dtype}; use float32, float16 or bfloat16")
    model = build(config, shard)
    module = cast(nn.Module, model)
    expected = tensors.expected(model)
    pending = _tidy(weights, tied=HEAD not in expected)
    tensors.check(expected, {name: _found(value) for name, value in pending.items()})
    pending = model.sanitize(pending)
    if compute_dtype is not None and compute_dtype == mx.float16 and not model.float16_safe:
        raise ModelError(
            f"{config.get('model_type')} overflows float16; use bfloat16 or float32 to compute in"
        )
    dtype = compute_dtype or activation_dtype(
        pending, metal=device.has_metal(), float16_safe=model.float16_safe
    )
    if runner() is not None:
        asked = matmul_uses(model, pending, dtype, deterministic=deterministic)
        _choose_kernels(uses(model, dtype), asked, other_uses(model, dtype), cancelled)
    if deterministic:
        _check_deterministic(model, pending, dtype)
    prepare = prepare or partial(matmul.prepare, deterministic=deterministic)
    weights.clear()
    for names in _groups(expected):
        if cancelled():
            raise ModelError("loading was cancelled")
        arrays: list[mx.array] = []
        for name in names:
            arrays += _install(module, name, pending.pop(name), dtype, prepare)
        mx.eval(arrays)
    model.dtype = dtype
    mx.clear_cache()  # the sources' buffers, which nothing will ask for again
    return model


def shard_checkpoint(checkpoint: Checkpoint, group: Group, layers: range | None = None) -> Shard:
    """What this rank of a group is to load of a model; only headers are looked at.

    layers: those that the group computes; None: all. Load it with `load_model(config,
    checkpoint.weights(shard.region), shard=shard)`. Raises ModelError for a checkpoint that doesn't
    fit its config, as a whole, and RequestError for a group that the model can't be divided among.
    """
    model = build(checkpoint.config)
    expected = tensors.expected(model)
    names = tensors.names(checkpoint.tensors)
    if HEAD not in expected and EMBEDDING in names:
        names.pop(HEAD, None)  # compared with the embedding once it is loaded
    stored = {name: checkpoint.tensors[original] for name, original in names.items()}
    tensors.check(expected, {n: tensors.Found(t.shape, t.not_floating) for n, t in stored.items()})
    groups = {name: t.group_size for name, t in stored.items() if t.group_size is not None}
    try:
        return shard_of(model.config, group, groups, layers)
    except RequestError as e:
        raise RequestError(f"{checkpoint.path}: {e}") from None


def kernel_uses(config: Mapping[str, Any], weights: Weights) -> list[Use]:
    """What the layers ask of ops, once `load_model` has loaded the model on this device.

    Raises ModelError for a config or for weights that it doesn't load.
    """
    model = build(config)
    metal = device.has_metal()
    dtype = activation_dtype(weights, metal=metal, float16_safe=model.float16_safe)
    expected = tensors.expected(model)
    named = _tidy(weights, tied=HEAD not in expected)
    tensors.check(expected, {name: _found(value) for name, value in named.items()})
    layers, matrices = attention_uses(model, dtype), matmul_uses(model, named, dtype)
    chunks = map(attention.chunk_use, layers)
    return [*layers, *chunks, *matrices, *other_uses(model, dtype)]


def _choose_kernels(
    layers: Mapping[AttentionUse, Sequence[int]],
    matmuls: Mapping[MatmulUse, Sequence[str]],
    others: Sequence[Use],
    cancelled: Callable[[], bool],
) -> None:
    """Decide on Metal kernels while the GPU is idle and memory free, before weights are there."""
    places: dict[Use, str] = {}
    for use, indices in layers.items():
        asked = (use, attention.chunk_use(use), *append.uses(use))
        places |= dict.fromkeys(asked, f"layers {', '.join(map(str, indices))}")
    places |= {use: f"{len(names)} matrices" for use, names in matmuls.items()}
    places |= dict.fromkeys(others, "layers")
    choices = registry.choose(places, cancelled=cancelled)
    for (use, place), choice in zip(places.items(), choices, strict=True):
        how = f"{choice.op} is {choice.implementation} ({choice.reason})"
        # MLX's own are fast for all shapes, but for rows of one token over pages.
        slow = choice.unsupported and type(use) is AttentionUse
        logger.log(logging.WARNING if slow else logging.INFO, "%s, %s: %s", place, use, how)


def _check_deterministic(model: Model, weights: Weights, dtype: mx.Dtype) -> None:
    """Raises RequestError, with the name of the op or matrix, where a row depends on its batch."""
    fix = "leave deterministic out"
    if runner() is None and registry.native("attention") is None:
        raise RequestError(
            f"deterministic needs the native kernel of attention, and it is off here; {fix}, or "
            "see what `mlxserve doctor` says"
        )
    for name in tensors.multiplied(model):
        if reason := matmul.varies(weights[f"{name}.weight"], dtype):
            raise RequestError(f"deterministic can't be had with {name}: {reason}; {fix}")


def activation_dtype(weights: Weights, *, metal: bool, float16_safe: bool = True) -> mx.Dtype:
    """The dtype to compute in: float32 on CPU; on Metal the one most numbers are stored in.

    Packed weights count by their scales. One dtype for all, since a stray float32 tensor (such as a
    GGUF's norms) would widen every activation after it. bfloat16 stands in for float16 where the
    model's activations would overflow it.
    """
    if not metal:
        return mx.float32
    numbers: Counter[mx.Dtype] = Counter()
    for value in weights.values():
        for array in _arrays(value):
            dtype = array.dtype
            if isinstance(value, PackedWeight) and dtype == mx.float32:
                dtype = mx.float16  # the scales of a GGUF's K types: a float16 times an integer
            if dtype in COMPUTE_DTYPES:
                numbers[dtype] += array.size
    dtype = numbers.most_common(1)[0][0] if numbers else mx.float16
    return mx.bfloat16 if dtype == mx.float16 and not float16_safe else dtype


def _arrays(value: Weight) -> list[mx.array]:
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, PanelWeight):
        return [value.data]
    if isinstance(value, KernelWeight):
        value = value.packed
    return [a for a in (value.weight, value.scales, value.biases) if a is not None]


def _groups(expected: Mapping[str, Any]) -> Iterator[list[str]]:
    """Names to convert together: each layer, and each tensor outside the layers."""

    def group(name: str) -> str:
        parts = name.split(".")
        return ".".join(parts[:3]) if parts[:2] == ["model", "layers"] else name

    for _, names in groupby(expected, group):
        yield list(names)


def _owner(module: nn.Module, name: str) -> tuple[Any, str]:
    """The module that holds the tensor `name`, and the tensor's name in it."""
    *path, leaf = name.split(".")
    node: Any = module
    for part in path:
        node = node[part]
    return node, leaf


def _install(
    module: nn.Module,
    name: str,
    value: mx.array | PackedWeight,
    dtype: mx.Dtype,
    prepare: Prepare,
) -> list[mx.array]:
    """Put a tensor to its place, in its final form. Returns the arrays to evaluate."""
    owner, leaf = _owner(module, name)
    ready: Weight
    if isinstance(owner, Linear | Embedding) and leaf == "weight":
        ready = prepare(value, dtype)
    elif isinstance(value, mx.array):
        ready = value.astype(dtype)
    else:
        raise ModelError(f"{name} is quantised; only the weights of linear layers may be")
    setattr(owner, leaf, ready)
    if isinstance(owner, Embedding):
        owner.dtype = dtype
    return _arrays(ready)


def _tidy(weights: Weights, *, tied: bool) -> Weights:
    """Checkpoint names as models know them, without what the model has no use for."""
    out = {name: weights[original] for name, original in tensors.names(weights).items()}
    if tied and HEAD in out and EMBEDDING in out:
        if not _equal(out[HEAD], out[EMBEDDING]):
            raise tensors.untied()
        del out[HEAD]
    return out


def _found(value: mx.array | PackedWeight) -> tensors.Found:
    if isinstance(value, PackedWeight) or mx.issubdtype(value.dtype, mx.floating):
        return tensors.Found(tuple(value.shape))
    return tensors.Found(tuple(value.shape), str(value.dtype))


def _equal(a: mx.array | PackedWeight, b: mx.array | PackedWeight) -> bool:
    left, right = _arrays(a), _arrays(b)
    if len(left) != len(right):
        return False
    return all(bool(mx.array_equal(x, y)) for x, y in zip(left, right, strict=True))
