"""Models in parts over real processes, against the whole model in this one."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from mlxserve.kernels.quantized import PackedWeight, dequantize
from mlxserve.models.load import load_model
from mlxserve.sources.checkpoint import open_checkpoint
from tests.distributed import forward
from tests.sources.making import llama_metadata, llama_tensors, write_gguf
from tests.support import ranks
from tests.support.dense_view import run_dense
from tests.support.model_dir import Packing, write_weights
from tests.support.tiny import (
    Tiny,
    prompt,
    tiny_gemma3,
    tiny_llama,
    tiny_mistral,
    tiny_qwen2,
    tiny_qwen3,
)

IDS = [int(i) % 40 for i in prompt(64)]  # within all vocabularies
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
NINE = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}
ONE = {"num_attention_heads": 4, "num_key_value_heads": 1}
BIASES = {"attention_bias": True, "mlp_bias": True}


class Case(NamedTuple):
    """write: a model to a path. kv_heads: of each rank. compute: the dtype to compute in.

    rounded: whether kernels round activations, so that an order of sums shows in the result.
    """

    write: Callable[[Path], Path]
    kv_heads: tuple[int, ...]
    compute: str | None = None
    rounded: bool = False


def dense(
    make: Callable[..., Tiny],
    kv_heads: tuple[int, ...],
    dtype: mx.Dtype = mx.float32,
    compute: str | None = None,
    **options: Any,
) -> Case:
    def write(path: Path) -> Path:
        return write_weights(path, make(**options), dtype=dtype)

    return Case(write, kv_heads, compute, rounded=compute is not None)


def packed(
    make: Callable[..., Tiny], kv_heads: tuple[int, ...], *packing: Any, **options: Any
) -> Case:
    def write(path: Path) -> Path:
        return write_weights(path, make(**options), Packing(*packing), mx.bfloat16)

    return Case(write, kv_heads, rounded=True)


def gguf(kind: Kind, kv_heads: tuple[int, ...]) -> Case:
    def write(path: Path) -> Path:
        drawn = llama_tensors(kind).items()
        scaled = {name: (a * a.shape[-1] ** -0.5, how) for name, (a, how) in drawn}
        return write_gguf(path, metadata=llama_metadata(), tensors=scaled)

    return Case(write, kv_heads, rounded=kind != Kind.F16)


OF_TWO = {
    "llama": dense(tiny_llama, (1, 1), **BIASES),
    "mistral": dense(tiny_mistral, (1, 1)),
    "qwen2": dense(tiny_qwen2, (1, 1), tie_word_embeddings=True),
    "qwen3": dense(tiny_qwen3, (1, 1)),
    "gemma3": dense(tiny_gemma3, (1, 1), final_logit_softcapping=9.0),
    "9 and 3 heads": dense(tiny_llama, (2, 1), **NINE),
    "1 KV head": dense(tiny_gemma3, (1, 1), **ONE),
    "float16": dense(tiny_llama, (1, 1), mx.float16),
    "bfloat16": dense(tiny_gemma3, (1, 1), mx.bfloat16),
    "computed in bfloat16": dense(tiny_llama, (1, 1), mx.bfloat16, "bfloat16"),
    "llama in 4 bits": packed(tiny_llama, (1, 1), 4, 32, **BIASES),
    "qwen3 in 4 bits": packed(tiny_qwen3, (2, 2), 4, 32, **WIDE),
    "gemma3 in 4 bits": packed(tiny_gemma3, (1, 1), 4, 32),
    "groups of 64": packed(tiny_llama, (2, 2), 4, 64, **WIDE, intermediate_size=320),
    "3 bits": packed(tiny_llama, (1, 1), 3, 32),
    "mxfp4": packed(tiny_llama, (1, 1), 4, 32, "mxfp4"),
    "nvfp4": packed(tiny_gemma3, (1, 1), 4, 16, "nvfp4"),
    "mxfp8": packed(tiny_qwen3, (2, 2), 8, 32, "mxfp8", **WIDE),
    "GGUF": gguf(Kind.Q5_0, (1, 1)),
    "GGUF in float16": gguf(Kind.F16, (1, 1)),
}
OF_THREE = {
    "1 KV head": dense(tiny_llama, (1, 1, 1), **ONE),
    "1 KV head in 4 bits": packed(tiny_gemma3, (1, 1, 1), 4, 32, **ONE | {"head_dim": 32}),
    "3 KV heads": dense(tiny_llama, (1, 1, 1), tie_word_embeddings=True, **NINE),
    "2 KV heads": dense(tiny_qwen3, (1, 1, 1)),
}


class Parts(NamedTuple):
    """Of one model. logits: each rank's; told: what each rank said of its part."""

    logits: list[np.ndarray]
    told: list[dict[str, Any]]


class Outcome(NamedTuple):
    """Of one model. whole: its logits in one process; exact: with its weights in float32."""

    parts: Parts
    whole: np.ndarray
    exact: np.ndarray


def over(
    n: int, folder: Path, models: list[tuple[Path, str | None]], tokens: int = 64
) -> list[Parts]:
    """Run models over n ranks. models: paths, and the dtypes to compute in."""
    named = [(str(path), compute) for path, compute in models]
    printed = ranks.run(n, forward.logits, named, IDS[:tokens], str(folder), timeout_s=300)
    told = [json.loads(text.splitlines()[-1]) for text in printed]
    return [
        Parts(
            [np.load(folder / f"{i}-{rank}.npy") for rank in range(n)],
            [those[i] for those in told],
        )
        for i in range(len(models))
    ]


def load(path: Path, compute: mx.Dtype | None, *, widened: bool = False) -> Any:
    """The whole model; widened: with unpacked weights."""
    checkpoint = open_checkpoint(path)
    weights = checkpoint.weights()
    if widened:
        weights = {
            name: dequantize(w, mx.float32) if isinstance(w, PackedWeight) else w
            for name, w in weights.items()
        }
    return load_model(checkpoint.config, weights, compute_dtype=compute)


def run(model: Any, tokens: int = 64) -> np.ndarray:
    return np.array(run_dense(model, np.array(IDS[:tokens], np.int32)).astype(mx.float32))


def of_cases(n: int, folder: Path, cases: dict[str, Case]) -> dict[str, Outcome]:
    models = [(c.write(folder / str(i)), c.compute) for i, c in enumerate(cases.values())]
    found = {}
    for name, parts, (path, compute) in zip(cases, over(n, folder, models), models, strict=True):
        whole = run(load(path, None if compute is None else getattr(mx, compute)))
        found[name] = Outcome(parts, whole, run(load(path, mx.float32, widened=True)))
    return found


@pytest.fixture(scope="module")
def of_two(tmp_path_factory) -> dict[str, Outcome]:
    return of_cases(2, tmp_path_factory.mktemp("two"), OF_TWO)


@pytest.fixture(scope="module")
def of_three(tmp_path_factory) -> dict[str, Outcome]:
    return of_cases(3, tmp_path_factory.mktemp("three"), OF_THREE)


def check(case: Case, found: Outcome) -> None:
    assert np.std(found.whole) > 0.1  # so that differences mean something
    assert tuple(told["kv_heads"] for told in found.parts.told) == case.kv_heads
    first, *others = found.parts.logits
    for other in others:
        np.testing.assert_array_equal(other, first)
    if case.rounded:
        assert rms(first - found.exact) < 1.5 * rms(found.whole - found.exact) + 1e-5
    else:
        assert np.abs(first - found.whole).max() < 1e-4


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


@pytest.mark.parametrize("name", OF_TWO)
def test_two_processes_compute_what_one_does(of_two, name):
    check(OF_TWO[name], of_two[name])


@pytest.mark.parametrize("name", OF_THREE)
def test_three_processes_compute_what_one_does(of_three, name):
    check(OF_THREE[name], of_three[name])


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2_gguf", "gemma3_gguf"])
def test_real_weights_in_two_processes(request, tmp_path, name):
    """As near as the rounding of activations lets two orders of sums be; half the memory each."""
    path = request.getfixturevalue(name)
    (parts,) = over(2, tmp_path, [(path, None)], tokens=8)
    gc.collect()
    before = mx.get_active_memory()
    model = load(path, None)
    nbytes = mx.get_active_memory() - before
    whole = run(model, tokens=8)
    np.testing.assert_array_equal(*parts.logits)
    assert rms(parts.logits[0] - whole) < 0.01 * np.std(whole)
    assert max(told["bytes"] for told in parts.told) < nbytes / 2 * 1.1
