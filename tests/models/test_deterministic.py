"""What `deterministic` takes and what it refuses, by name, before any weight is loaded."""

import mlx.core as mx
import pytest

import mlxserve
from mlxserve.cache.storage import Storage
from mlxserve.config import EngineConfig
from mlxserve.engine import cache_plan
from mlxserve.errors import RequestError
from mlxserve.kernels import registry, selfcheck
from mlxserve.kernels.matmul import KernelWeight, matmul
from mlxserve.kernels.quantized import PackedWeight, quantized_matmul
from mlxserve.kernels.verdicts import Timing, Verdict
from mlxserve.models.load import load_model
from mlxserve.models.registry import build
from tests.support.tiny import prompt, tiny_llama

Q = "model.layers.1.self_attn.q_proj"


@pytest.fixture(autouse=True)
def choices_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    registry.forget()
    yield
    registry.forget()


def gpu(monkeypatch, name="right", kernels="reference,matmul=metal", verdict=None):
    """A machine whose GPU is a stand-in; verdict: of every check."""
    if verdict is not None:
        monkeypatch.setattr(selfcheck, "examine", lambda use, *_: verdict)
    monkeypatch.setenv("MLXSERVE_METAL_STAND_IN", f"tests.support.stand_ins.{name}")
    monkeypatch.setenv("MLXSERVE_KERNELS", kernels)
    registry.forget()


def packed(tiny, **others):
    """Every matrix in 4 bits, but for others: one by name, in another form."""
    weights = {}
    for name, w in tiny.weights.items():
        w = w.astype(mx.bfloat16)
        form = others.get(name.removesuffix(".weight"), {"bits": 4, "group_size": 32})
        if w.ndim == 2 and form:
            mode = form.get("mode", "affine")
            words, scales, *biases = mx.quantize(w, **form)
            how = form["bits"], form["group_size"], mode
            w = PackedWeight(words, scales, biases[0] if biases else None, *how)
        weights[name] = w
    return weights


def load(tiny, weights):
    return load_model(tiny.config, weights, compute_dtype=mx.bfloat16, deterministic=True)


@pytest.mark.parametrize("tied", [False, True])
def test_on_metal_every_matrix_has_the_kernel(monkeypatch, tied):
    gpu(monkeypatch)
    tiny = tiny_llama(tie_word_embeddings=tied)
    weights = packed(tiny)
    if tied:
        del weights["lm_head.weight"]
    model = load(tiny, weights)
    head = model.model.embed_tokens if tied else model.lm_head
    for layer in (model.model.layers["0"].self_attn.q_proj, model.model.layers["1"].mlp, head):
        layer = getattr(layer, "down_proj", layer)
        assert isinstance(layer.weight, KernelWeight)
        assert layer.weight.rows is None


PASSED = Verdict("", 1e-3, ())


@pytest.mark.parametrize(("form", "reason"), [
    (None, "it isn't quantised, and MLX's own matmul"),
    ({"bits": 3, "group_size": 32}, "weights in 3 bits, not 4 or 8"),
    ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, "weights in mxfp4, not affine"),
], ids=["dense", "3 bits", "mxfp4"])  # fmt: skip
def test_a_matrix_that_the_kernel_cannot_serve_is_named(monkeypatch, form, reason):
    gpu(monkeypatch, kernels="attention=reference", verdict=PASSED)
    tiny = tiny_llama()
    weights = packed(tiny, **{Q: form})
    with pytest.raises(
        RequestError, match=f"deterministic can't be had with {Q}: {reason}.*; leave"
    ):
        load(tiny, weights)
    assert f"{Q}.weight" in weights  # nothing was loaded


@pytest.mark.full
def test_a_kernel_that_fails_its_check_is_refused(monkeypatch):
    gpu(monkeypatch, "broken", kernels="attention=reference")
    tiny = tiny_llama(num_hidden_layers=1)
    with pytest.raises(RequestError, match="q_proj: the Metal kernel failed its check: RuntimeErr"):
        load(tiny, packed(tiny))


def test_a_kernel_that_is_slower_serves_all_the_same(monkeypatch):
    slower = Verdict("", 1e-3, (Timing(2, 0, 2.0, 1.0),))
    gpu(monkeypatch, kernels="attention=reference", verdict=slower)
    tiny = tiny_llama()
    weight = load(tiny, packed(tiny)).lm_head.weight
    assert isinstance(weight, KernelWeight)
    registry.forget()
    others = load_model(tiny.config, packed(tiny), compute_dtype=mx.bfloat16)
    assert not isinstance(others.lm_head.weight, KernelWeight)


def test_otherwise_the_kernel_serves_as_many_rows_as_it_is_faster_at(monkeypatch):
    timings = [Timing(n, 0, 1.0, 2.0 if n < 8 else 0.5) for n in (2, 4, 8, 16)]
    verdict = Verdict("", 1e-3, tuple(timings))
    gpu(monkeypatch, kernels="attention=reference", verdict=verdict)
    tiny = tiny_llama()
    weight = load_model(tiny.config, packed(tiny), compute_dtype=mx.bfloat16).lm_head.weight
    assert weight.rows == range(2, 5)
    launched = []
    own = KernelWeight(weight.packed, lambda launch: launched.append(1) or [0], weight.rows)
    for n in (1, 5):
        x = mx.ones((n, 64), mx.bfloat16)
        assert mx.array_equal(matmul(x, own), quantized_matmul(x, weight.packed))
    assert not launched


def test_mlx_own_matmul_on_a_cpu_is_refused(monkeypatch):
    if registry.recorder() is None:
        pytest.skip("only on machines with native kernels")
    monkeypatch.setenv("MLXSERVE_KERNELS", "matmul=reference")
    registry.forget()
    tiny = tiny_llama()
    name = r"model\.layers\.0\.self_attn\.q_proj"
    with pytest.raises(RequestError, match=f"with {name}: MLX's own matmul sums in another order"):
        load_model(tiny.config, dict(tiny.weights), deterministic=True)
    monkeypatch.setenv("MLXSERVE_KERNELS", "attention=reference")
    registry.forget()
    with pytest.raises(RequestError, match="deterministic needs the native kernel of attention"):
        load_model(tiny.config, dict(tiny.weights), deterministic=True)


def test_groups_that_the_native_kernels_do_not_have_are_refused(monkeypatch):
    if registry.recorder() is None:
        pytest.skip("only on machines with native kernels")
    tiny = tiny_llama()
    weights = packed(tiny)
    weights[f"{Q}.weight"] = PackedWeight(
        mx.zeros((64, 8), mx.uint32), mx.ones((64, 4)), mx.zeros((64, 4)), 4, 16
    )
    with pytest.raises(RequestError, match=f"{Q}: the native kernels don't take its groups"):
        load_model(tiny.config, weights, deterministic=True)


def test_native_kernels_take_it(tiny_model_dir):
    if registry.recorder() is None:
        pytest.skip("only on machines with native kernels")
    with mlxserve.load(tiny_model_dir, deterministic=True, max_batch=4) as llm:
        prompts = [prompt(n, seed=n).tolist() for n in (3, 20, 100)]
        together = llm.generate(prompts, max_tokens=8, logprobs=True)
        for ids, answer in zip(prompts, together, strict=True):
            assert llm.generate(ids, max_tokens=8, logprobs=True).logprobs == answer.logprobs


def test_a_saved_prompt_says_so_where_kernels_differ_by_it(monkeypatch):
    def kernels(deterministic):
        config = EngineConfig(deterministic=deterministic)
        groups = cache_plan.cache_groups(build(tiny_llama().config).layer_specs(), config)
        cache = Storage(groups, mx.bfloat16, hot_pages=1, pool_pages=(1,))
        return cache_plan.fingerprint(cache, config)["kernels"]

    assert kernels(True) == kernels(False)
    gpu(monkeypatch)
    assert kernels(True) == kernels(False) + ", deterministic"


def test_it_is_on_or_off():
    with pytest.raises(RequestError, match="deterministic is 'yes'; it must be True or False"):
        mlxserve.load("no-such-model", deterministic="yes")
