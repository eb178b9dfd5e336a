# ruff: noqa: E501  (a table has long lines)
"""The launches of a decoding step on Metal, and what it moves: `python -m tests.metal.step_report --write`.

The graph of a step is built as on a Mac and never computed. Each of its operations is one launch
there, but for views; MLX's fused functions, which on a CPU fall apart into many, are stood in for
by one operation each.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn

from mlxserve import device
from mlxserve.cache.batch import BatchView
from mlxserve.cache.groups import group_layers
from mlxserve.cache.storage import Storage
from mlxserve.kernels import registry
from mlxserve.kernels.gates import gated
from mlxserve.kernels.gathered import gathered_matmul
from mlxserve.kernels.metal.launch import Launch
from mlxserve.kernels.quantized import PackedWeight
from mlxserve.models import registry as models
from mlxserve.models.layers import Embedding, Linear
from mlxserve.sequence import Chunk, StepPlan
from mlxserve.sequence import Sequence as Seq
from mlxserve.types import Request, SamplingParams

TABLE = Path(__file__).with_name("STEP.md")
PAGE = 64
CONTEXT = 4096
ROWS = (1, 16)
GROUP = 64
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}
QWEN_30B = {
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 768,  # of an expert
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
}


class Shape(NamedTuple):
    """experts: in each layer; chosen: of those, for each token. Both 0 where there are none."""

    config: dict[str, Any]
    layers: int
    experts: int = 0
    chosen: int = 0


SHAPES = {"llama-8B": Shape(LLAMA_8B, 32), "qwen3-30B-A3B": Shape(QWEN_30B, 48, 128, 8)}
# No work on a GPU: another view of the same numbers, or none at all.
VIEWS = {
    "Reshape", "Transpose", "Slice", "Squeeze", "ExpandDims", "Broadcast", "Unflatten", "Flatten",
    "AsStrided", "Split", "View",
}  # fmt: skip
# Of MLX's fused functions: the operation that stands in for it.
STAND_INS = {
    "LogAddExp": "RMSNorm",
    "Remainder": "RoPE",
    "ArcTan2": "Compiled",
    "Minimum": "Dequantize",
}
KERNEL = "Power"  # of ours, which are counted by their launches
MOVES_UPDATES = {"Scatter", "SliceUpdate"}
MOVES_OUTPUT = {"Gather", "GatherAxis"}


class Operation(NamedTuple):
    """One launch. moved: bytes, of what it reads and writes; name: MLX's, or the kernel's."""

    name: str
    moved: int


class Experts(nn.Module):
    """Stands for the MLP of a layer with experts, a model that we don't have yet, over our op."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner = shape.config["hidden_size"], shape.config["intermediate_size"]
        self.chosen = shape.chosen
        self.router = Linear(width, shape.experts)
        self.up = [_packed(shape.experts, inner, width) for _ in range(2)]
        self.down = [_packed(shape.experts, width, inner)]

    def __call__(self, x: mx.array) -> mx.array:
        scores = mx.softmax(self.router(x), axis=-1, precise=True)
        best = mx.argpartition(-scores, kth=self.chosen - 1, axis=-1)[..., : self.chosen]
        shares = mx.take_along_axis(scores, best, axis=-1)
        shares = shares / shares.sum(axis=-1, keepdims=True)
        best = best.astype(mx.int32)
        gate, up = gathered_matmul(x, self.up, best)
        (down,) = gathered_matmul(gated(gate, up, "silu"), self.down, best)
        return (down * shares[..., None]).sum(axis=-2)


def trace(shape: Shape, layers: int, rows: int) -> list[Operation]:
    """All launches of a step of so many rows at CONTEXT tokens, weights in 4 bits."""
    launched: list[Launch] = []

    def run(launch: Launch) -> list[mx.array]:
        launched.append(launch)
        # What comes next depends on all of it.
        first = reduce(mx.power, [x.reshape(-1)[:4].view(mx.uint8)[:4] for x in launch.arrays])
        return [
            mx.power(mx.broadcast_to(first[: dtype.size].view(dtype), shape), 1)
            for shape, dtype in zip(launch.shapes, launch.dtypes, strict=True)
        ]

    with on_metal(run):
        model: Any = models.build({**shape.config, "num_hidden_layers": layers})
        for block in model.model.layers.values() if shape.experts else ():
            block.mlp = Experts(shape)
        _pack(model)
        groups = group_layers(model.layer_specs())
        pages = rows * (CONTEXT // PAGE - 1)  # of the pool; the last one of a row is hot
        storage = Storage(groups, mx.float16, hot_pages=rows, pool_pages=[pages])
        storage.grow(rows, pages, 1)
        view = BatchView(storage, _plan(rows))

        def step(ids: mx.array) -> list[mx.array]:
            logits = model.logits(model(ids, view))
            return [logits, *storage.written()]

        events: list[dict[str, Any]] = []
        mx.export_function(events.append, step, mx.zeros(rows, mx.int32))
    operations = [_operation(e) for e in events if e["type"] == "primitive"]
    kernels = [_kernel(launch) for launch in launched]
    return [op for op in operations if op.name not in VIEWS | {KERNEL}] + kernels


@contextmanager
def on_metal(run: Any) -> Iterator[None]:
    """Models and ops take the way that they have on a Mac; `run` gets the launches of our kernels."""

    def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
        return mx.logaddexp(x, weight)

    def rope(x: mx.array, *args: Any, **how: Any) -> mx.array:
        return mx.remainder(x, mx.array(1, x.dtype))

    def dequantize(w: mx.array, scales: mx.array, *args: Any, **how: Any) -> mx.array:
        wide = mx.broadcast_to(scales[..., None], (*scales.shape, GROUP))
        wide = wide.reshape(*scales.shape[:-1], -1)
        return mx.minimum(wide, wide)

    with (
        registry.references(),
        patch.object(device, "has_metal", lambda: True),
        patch.object(mx.fast, "rms_norm", rms_norm),
        patch.object(mx.fast, "rope", rope),
        patch.object(mx, "dequantize", dequantize),
        patch("mlxserve.kernels.gates._reference", lambda kind: mx.arctan2),
        patch("mlxserve.kernels.attention.metal", lambda use: run),
        patch("mlxserve.kernels.norm.metal", lambda use: run),
        patch("mlxserve.kernels.rope.metal", lambda use: run),
    ):
        yield


def _pack(model: Any) -> None:
    """Weights in 4 bits, all else in 16; no number of them is ever read."""
    for module in model.modules():
        if isinstance(module, Linear | Embedding):
            module.weight = _packed(*module.weight.shape)
        if isinstance(module, Embedding):
            module.dtype = mx.float16
        elif type(module).__name__ == "RMSNorm":
            module.weight = mx.ones(module.weight.shape, mx.float16)
            mx.eval(module.weight)


def _packed(*shape: int) -> PackedWeight:
    *outputs, k = shape
    scales = mx.zeros((*outputs, k // GROUP), mx.float16)
    words = mx.zeros((*outputs, k // 8), mx.uint32)
    mx.eval(words, scales)
    return PackedWeight(words, scales, scales, 4, GROUP)


def _plan(rows: int) -> StepPlan:
    sealed = CONTEXT // PAGE - 1
    chunks = []
    for row in range(rows):
        request = Request(id=f"r{row}", prompt_ids=tuple(range(CONTEXT)), params=SamplingParams())
        seq = Seq.start(request, 2 * CONTEXT, 0.0)
        seq.tables, seq.dropped = [list(range(row * sealed, (row + 1) * sealed))], [0]
        chunks.append(Chunk(seq, CONTEXT - 1, 1, True, (row,)))
    return StepPlan(tuple(chunks))


def _nbytes(shape: Sequence[int], dtype: mx.Dtype) -> int:
    count = dtype.size
    for n in shape:
        count *= n
    return count


def _operation(event: dict[str, Any]) -> Operation:
    name: str = event["name"]
    name = STAND_INS.get(name, name)
    read = [_nbytes(shape, dtype) for _, shape, dtype in event["inputs"]]
    written = [_nbytes(shape, dtype) for _, shape, dtype in event["outputs"]]
    if name in MOVES_UPDATES:  # in place: what is put there is read and written
        return Operation(name, 2 * read[-1])
    if name in MOVES_OUTPUT:
        return Operation(name, 2 * sum(written))
    if name == "GatherQMM":  # of each expert that is chosen, its matrix
        (_, stack, _), (_, chosen, _) = event["inputs"][1], event["inputs"][-1]
        matrices = sum(read[1:4]) * math.prod(chosen) // stack[0]
        return Operation(name, read[0] + matrices + sum(written))
    return Operation(name, sum(read) + sum(written))


def _kernel(launch: Launch) -> Operation:
    """Attention's rows read every page that there is."""
    shapes = zip(launch.shapes, launch.dtypes, strict=True)
    written = sum(_nbytes(shape, dtype) for shape, dtype in shapes)
    read = sum({id(array): array.nbytes for array in launch.arrays}.values())
    return Operation(launch.kernel.name, read + written)


class Step(NamedTuple):
    """A step of a whole model. layer: launches of one layer, ends: of what comes before and after.

    least: the weights, but for the embedding, and the keys and values of all rows, once.
    """

    layer: Counter[str]
    ends: Counter[str]
    moved: int
    least: int

    @property
    def ratio(self) -> float:
        return self.moved / self.least


def step(shape: Shape, rows: int) -> Step:
    """Two layers and three, whose difference is one: all layers of these models are alike."""
    two, three = (trace(shape, n, rows) for n in (2, 3))
    layer = Counter(op.name for op in three)
    layer.subtract(op.name for op in two)
    ends = Counter(op.name for op in two)
    ends.subtract({name: 2 * n for name, n in layer.items()})
    moved = [sum(op.moved for op in ops) for ops in (two, three)]
    total = moved[0] + (shape.layers - 2) * (moved[1] - moved[0])
    return Step(+layer, +ends, total, _least(shape, rows))


def _least(shape: Shape, rows: int) -> int:
    config, layers = shape.config, shape.layers
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", width // heads)
    q_width, kv_width = heads * dim, kv_heads * dim
    mlps = min(rows * shape.chosen, shape.experts) if shape.experts else 1
    layer = width * (2 * q_width + 2 * kv_width + 3 * inner * mlps + shape.experts)
    weights = layers * layer + width * config["vocab_size"]
    per_weight = 4 / 8 + 2 * 2 / GROUP
    return int(weights * per_weight) + rows * CONTEXT * layers * 2 * kv_width * 2


HEAD = """\
# A decoding step on Metal

Written by `python -m tests.metal.step_report --write`; a test compares it with the code as it is.

Weights in 4 bits (groups of 64), rows of {context} tokens, cache and activations in float16. A launch is one kernel that
the GPU is told to run. *Bytes to the least*: what all launches read and write, beside the weights, keys and values; where
layers have experts, of each that is chosen, and all choices differ.

| model | rows | launches of a layer | of a step | GB | bytes to the least |
| --- | --- | --- | --- | --- | --- |
"""

LAYER = """
## The launches of a layer of {name}

| launches | operation | what for |
| --- | --- | --- |
{rows}
{ends} more belong to no layer: {named}.
"""

TAIL = """
## Why these

- Projections are MLX's own. One launch for queries, keys and values together would save two, and would need their weights
  in one array: a copy of them at load, and no longer the file's names for adapters to find.
- A sum and the norm after it are one launch, which MLX takes two for; so are the rotations of queries and keys, with
  their norms where a model has them, of which MLX takes two or four.
- The writes to hot pages are MLX's scatters, in place: the outputs of a kernel of our own are new arrays, so that one
  that also wrote keys and values would copy every hot page.
- Experts have MLX's gathered matmul, and checks of indices around each of the three. Of 16 rows whose experts were
  drawn at random it reads 128 matrices where 82 differ. A kernel for a few rows is to come. (Operations that are
  equal count once here, and are launched for each matmul.)
- The attention's second launch merges parts; without parts a row of a long context would keep one core of the GPU busy.
- On an M-series GPU a launch that waits for the one before costs a few microseconds, a layer of this model 0.3 ms of reading
  at 400 GB/s: launches matter for small models first.
"""

PURPOSE = {
    "QuantizedMatmul": "queries, keys, values, output; gate, up, down, or a router",
    "add_rms_norm": "what attention and the MLP add to the stream, and the norm that comes next",
    "rotate": "queries and keys, with their norms",
    "Scatter": "keys and values to their hot page",
    "Compiled": "the gate's activation times up",
    "GatherQMM": "gate, up, down of the chosen experts",
    "Arange": "rows for each of these",
    "Softmax": "of the router's scores",
    "Negative": "the chosen experts",
    "ArgPartition": "the chosen experts",
    "AsType": "their indices, and results",
    "GatherAxis": "their shares",
    "Divide": "their shares",
    "Multiply": "results times shares",
    "Reduce": "sums of shares, and of results",
    "GreaterEqual": "checks of indices",
    "Less": "checks of indices",
    "BitwiseBinary": "checks of indices",
    "Select": "checks of indices",
    "paged_attention": "attention over hot pages and pool",
    "paged_attention_merge": "its parts to the result",
}


def table() -> str:
    """The whole file."""
    lines, layers = [], []
    for name, shape in SHAPES.items():
        steps = {rows: step(shape, rows) for rows in ROWS}
        for rows, told in steps.items():
            each, ends = told.layer.total(), told.ends.total()
            lines.append(
                f"| {name} | {rows} | {each} | {shape.layers * each + ends} "
                f"| {told.moved / 1e9:.2f} | {told.ratio:.3f} |\n"
            )
        layers.append(_layer(name, steps[1]))
    return HEAD.format(context=CONTEXT) + "".join(lines) + "".join(layers) + TAIL


def _layer(name: str, told: Step) -> str:
    purposes = [f"| {n} | {op} | {PURPOSE[op]} |\n" for op, n in told.layer.most_common()]
    named = ", ".join(f"{n} {op}" for op, n in sorted(told.ends.items()))
    return LAYER.format(name=name, rows="".join(purposes), ends=told.ends.total(), named=named)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        TABLE.write_text(table())
    else:
        print(table())
