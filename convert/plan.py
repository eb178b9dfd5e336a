"""What a conversion will write, decided and checked before any number is read."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxserve.errors import RequestError
from mlxserve.models import tensors as names
from mlxserve.models.registry import build
from mlxserve.models.tensors import EMBEDDING, HEAD
from mlxserve.sources.mlx_quant import MODES, Quantised

from .recipe import Recipe
from .source import Buffer, Source, Tensor

SHARD_BYTES = 5_000_000_000
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
WORDS = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.uint8: "U8",
}


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the output. dtype: the word of safetensors' headers."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor of the source and what becomes of it: itself in `dtype`, or a packed matrix.

    parts: the words, scales and perhaps biases of a packed matrix.
    """

    tensor: Tensor
    dtype: mx.Dtype
    scheme: Quantised | None
    parts: tuple[Part, ...]

    @property
    def parameters(self) -> int:
        return math.prod(self.tensor.shape)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is written but for the small files. config: with its quantization block."""

    items: tuple[Item, ...]
    config: dict[str, Any]
    recipe: Recipe | None

    @property
    def parts(self) -> Iterator[Part]:
        return (part for item in self.items for part in item.parts)

    @property
    def weight_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def read_bytes(self) -> int:
        return sum(item.tensor.read_bytes for item in self.items)

    @property
    def parameters(self) -> int:
        return sum(item.parameters for item in self.items)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.weight_bytes / self.parameters

    def shards(self) -> list[list[Part]]:
        """The parts by file: as many as fit, in the model's order. A larger one has its own."""
        shards: list[list[Part]] = []
        size = 0
        for part in self.parts:
            if not shards or size + part.nbytes > SHARD_BYTES:
                shards.append([])
                size = 0
            shards[-1].append(part)
            size += part.nbytes
        return shards

    def digest(self) -> str:
        """A short name for what is written: another for another recipe or type."""
        described = [[p.name, p.dtype, p.shape] for p in self.parts]
        text = json.dumps([described, self.config], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_plan(source: Source, recipe: Recipe | None, dtype: mx.Dtype | None) -> Plan:
    """What becomes of each tensor.

    recipe: None quantises nothing. dtype: of what isn't quantised and of scales; None keeps what
    the config's torch_dtype says, else the source's own, as mlx-lm does.

    Raises ModelError for a model that isn't supported and for tensors that are missing, too many,
    misshapen or no numbers; RequestError for a matrix whose rows don't divide into groups.
    """
    model = build(source.config)
    wanted = names.expected(model)
    found = names.names(source.tensors)
    if HEAD in found and HEAD not in wanted and EMBEDDING in found:
        check_tied(source.tensors[found[HEAD]], source.tensors[found[EMBEDDING]])
        del found[HEAD]
    names.check(wanted, {name: _found(source.tensors[own]) for name, own in found.items()})
    schemes: Mapping[str, Quantised | None] = {}
    if recipe is not None:
        schemes = recipe.assign(names.matrices(model), len(model.layer_specs()))
        _check_groups(wanted, schemes)
    config = dict(source.config)
    stated = DTYPES.get(str(source.config.get("torch_dtype")))
    items = []
    for name in wanted:
        tensor = source.tensors[found[name]]
        own = dtype or stated or source.dtype or tensor.dtype
        scheme = schemes.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        items.append(Item(tensor, own, scheme, _parts(name, tensor.shape, own, scheme)))
    if dtype is not None or source.dtype is not None:
        _state_dtype(config, items[0].dtype)
    if recipe is not None:
        block = _quantization(recipe, items)
        config |= {"quantization": block, "quantization_config": block}
    return Plan(tuple(items), config, recipe)


def check_tied(head: Tensor, embedding: Tensor) -> None:
    """Raise ModelError if a head that the config says isn't there has other numbers."""
    rows = 1 << 12
    same = head.shape == embedding.shape
    buffers = [Buffer(rows * math.prod(t.shape[1:]) * t.dtype.size) for t in (head, embedding)]
    for start in range(0, head.shape[0] if same else 0, rows):
        stop = min(start + rows, head.shape[0])
        arrays = []
        for tensor, buffer in zip((head, embedding), buffers, strict=True):
            tensor.fetch(start, stop, buffer)
            arrays.append(tensor.array(buffer, stop - start))
        same = same and bool(mx.array_equal(*arrays))
    if not same:
        raise names.untied()


def _found(tensor: Tensor) -> names.Found:
    floating = mx.issubdtype(tensor.dtype, mx.floating)
    return names.Found(tensor.shape, "" if floating else "integers")


def _check_groups(
    wanted: Mapping[str, tuple[int, ...]], schemes: Mapping[str, Quantised | None]
) -> None:
    for module, scheme in schemes.items():
        k = wanted[f"{module}.weight"][-1]
        if scheme is None or k % scheme.group_size == 0:
            continue
        fitting = [str(size) for size in sorted(MODES[scheme.mode][0]) if k % size == 0]
        fix = f"groups of {' or '.join(fitting)} would do, or" if fitting else "let"
        raise RequestError(
            f"{module} has rows of {k}, which don't divide into groups of {scheme.group_size}; "
            f"{fix} a recipe keep it as it is"
        )


def _parts(
    name: str, shape: tuple[int, ...], dtype: mx.Dtype, scheme: Quantised | None
) -> tuple[Part, ...]:
    def part(part_name: str, part_shape: tuple[int, ...], kind: mx.Dtype) -> Part:
        return Part(part_name, WORDS[kind], part_shape, math.prod(part_shape) * kind.size)

    if scheme is None:
        return (part(name, shape, dtype),)
    module = name.removesuffix(".weight")
    n, k = shape
    groups = (n, k // scheme.group_size)
    affine = scheme.mode == "affine"
    parts = [
        part(name, (n, k * scheme.bits // 32), mx.uint32),
        part(f"{module}.scales", groups, dtype if affine else mx.uint8),
    ]
    if affine:
        parts.append(part(f"{module}.biases", groups, dtype))
    return tuple(parts)


def _quantization(recipe: Recipe, items: list[Item]) -> dict[str, Any]:
    """The config's block: what most weights have, and an entry for each module that differs."""
    weights: Counter[Quantised] = Counter()
    for item in items:
        if item.scheme is not None:
            weights[item.scheme] += item.parameters
    if not weights:
        raise RequestError(f"recipe {recipe.name} quantises no matrix of this model; leave it out")
    most = weights.most_common(1)[0][0]
    block = _entry(most)
    for item in items:
        if item.scheme is not None and item.scheme != most:
            block[item.parts[0].name.removesuffix(".weight")] = _entry(item.scheme)
    return block


def _entry(scheme: Quantised) -> dict[str, Any]:
    return {"group_size": scheme.group_size, "bits": scheme.bits, "mode": scheme.mode}


def _state_dtype(config: dict[str, Any], dtype: mx.Dtype) -> None:
    """Say in the config what type the numbers have now, under the keys that it has for it."""
    word = str(dtype).removeprefix("mlx.core.")
    for key in [key for key in ("torch_dtype", "dtype") if key in config] or ["torch_dtype"]:
        config[key] = word
