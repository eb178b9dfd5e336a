# ruff: noqa: E501  (a table has long lines)
"""The launches of a decoding step on Metal, and what it moves: `python -m tests.metal.step_report --write`.

The graph of a step is built as on a Mac and never computed. Each of its operations is one launch
there, but for views; MLX's fused functions, which on a CPU fall apart into many, are stood in for
by one operation each.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import mlx.core as mx

from mlxserve import device
from mlxserve.cache.batch import BatchView
from mlxserve.cache.groups import group_layers
from mlxserve.cache.storage import Storage
from mlxserve.kernels import registry
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
SHAPES = {"llama-8B": (LLAMA_8B, 32)}
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


def trace(config: dict[str, Any], layers: int, rows: int) -> list[Operation]:
    """All launches of a step of so many rows at CONTEXT tokens, weights in 4 bits."""
    launched: list[Launch] = []

    def run(launch: Launch) -> list[mx.array]:
        launched.append(launch)
        first = launch.arrays[0].reshape(-1)[:4].view(mx.uint8)  # what comes next depends on it
        return [
            mx.power(mx.broadcast_to(first[: dtype.size].view(dtype), shape), 1)
            for shape, dtype in zip(launch.shapes, launch.dtypes, strict=True)
        ]

    with on_metal(run):
        model: Any = models.build({**config, "num_hidden_layers": layers})
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
    ):
        yield


def _pack(model: Any) -> None:
    """Weights in 4 bits, all else in 16; no number of them is ever read."""
    for module in model.modules():
        if isinstance(module, Linear | Embedding):
            n, k = module.weight.shape
            scales = mx.zeros((n, k // GROUP), mx.float16)
            words = mx.zeros((n, k // 8), mx.uint32)
            module.weight = PackedWeight(words, scales, scales, 4, GROUP)
            mx.eval(words, scales)
        if isinstance(module, Embedding):
            module.dtype = mx.float16
        elif type(module).__name__ == "RMSNorm":
            module.weight = mx.ones(module.weight.shape, mx.float16)
            mx.eval(module.weight)


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
    return Operation(name, sum(read) + sum(written))


def _kernel(launch: Launch) -> Operation:
    """Attention's: its rows read every page that there is."""
    shapes = zip(launch.shapes, launch.dtypes, strict=True)
    written = sum(_nbytes(shape, dtype) for shape, dtype in shapes)
    named = dict(zip(launch.kernel.inputs, launch.arrays, strict=True))
    read = sum(array.nbytes for array in named.values())
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


def step(config: dict[str, Any], layers: int, rows: int) -> Step:
    """Two layers and three, whose difference is one: all layers of these models are alike."""
    two, three = (trace(config, n, rows) for n in (2, 3))
    layer = Counter(op.name for op in three)
    layer.subtract(op.name for op in two)
    ends = Counter(op.name for op in two)
    ends.subtract({name: 2 * n for name, n in layer.items()})
    moved = [sum(op.moved for op in ops) for ops in (two, three)]
    return Step(
        +layer, +ends, moved[0] + (layers - 2) * (moved[1] - moved[0]), _least(config, layers, rows)
    )


def _least(config: dict[str, Any], layers: int, rows: int) -> int:
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    kv_width = width // heads * kv_heads
    weights = layers * width * (2 * width + 2 * kv_width + 3 * inner) + width * config["vocab_size"]
    per_weight = 4 / 8 + 2 * 2 / GROUP
    return int(weights * per_weight) + rows * CONTEXT * layers * 2 * kv_width * 2


HEAD = """\
# A decoding step on Metal

Written by `python -m tests.metal.step_report --write`; a test compares it with the code as it is.

Llama 3 8B in 4 bits (groups of 64), rows of {context} tokens, cache and activations in float16. A launch is one kernel
that the GPU is told to run. *Bytes to the least*: what all launches read and write, beside the weights, keys and values.

| model | rows | launches of a layer | of a step | GB | bytes to the least |
| --- | --- | --- | --- | --- | --- |
"""

TAIL = """
## The launches of a layer

| launches | operation | what for |
| --- | --- | --- |
{rows}
{ends} more belong to no layer: {named}.

- Projections are MLX's own. One launch for queries, keys and values together would save two, and would need their weights
  in one array: a copy of them at load, and no longer the file's names for adapters to find.
- A norm and the sum before it could be one launch, and so could both rotations and both writes: five launches less.
- The attention's second launch merges parts; without parts a row of a long context would keep one core of the GPU busy.
- On an M-series GPU a launch that waits for the one before costs a few microseconds, a layer of this model 0.3 ms of reading
  at 400 GB/s: launches matter for small models first.
"""

PURPOSE = {
    "QuantizedMatmul": "queries, keys, values, output; gate, up, down",
    "RMSNorm": "before attention and before the MLP",
    "RoPE": "queries, keys",
    "Scatter": "keys and values to their hot page",
    "Add": "to the stream, after attention and after the MLP",
    "Compiled": "the gate's activation times up",
    "paged_attention": "attention over hot pages and pool",
    "paged_attention_merge": "its parts to the result",
}


def table() -> str:
    """The whole file."""
    lines, told = [], None
    for name, (config, layers) in SHAPES.items():
        for rows in (1, 16):
            told = step(config, layers, rows)
            each, ends = told.layer.total(), told.ends.total()
            lines.append(
                f"| {name} | {rows} | {each} | {layers * each + ends} | {told.moved / 1e9:.2f} | "
                f"{told.ratio:.3f} |\n"
            )
    assert told is not None
    purposes = "".join(
        f"| {n} | {name} | {PURPOSE[name]} |\n" for name, n in told.layer.most_common()
    )
    named = ", ".join(f"{n} {name}" for name, n in sorted(told.ends.items()))
    tail = TAIL.format(rows=purposes, ends=told.ends.total(), named=named)
    return HEAD.format(context=CONTEXT) + "".join(lines) + tail


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        TABLE.write_text(table())
    else:
        print(table())
