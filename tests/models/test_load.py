"""Loading: packed weights, dtypes, memory, threads, and weights that don't fit."""

import threading

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.errors import ModelError
from mlxserve.kernels.matmul import PanelWeight, as_packed, form
from mlxserve.kernels.quantized import PackedWeight, dequantize
from mlxserve.models.load import activation_dtype, load_model
from tests.support.dense_view import run_dense
from tests.support.tiny import prompt, reference_logits, tiny_gemma3, tiny_llama

FORMATS = {
    "affine4": {"bits": 4, "group_size": 32, "mode": "affine"},
    "affine8": {"bits": 8, "group_size": 32, "mode": "affine"},
    "affine3": {"bits": 3, "group_size": 32, "mode": "affine"},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
}


def unpacked(weight, dtype):
    return dequantize(weight, dtype) if isinstance(weight, PackedWeight) else weight.astype(dtype)


def pack(weights: dict, *, bits: int, group_size: int, mode: str) -> dict:
    """Every matrix packed, its scales rounded to 16 bits as checkpoints hold them."""
    out = {}
    for name, w in weights.items():
        if w.ndim != 2:
            out[name] = w
            continue
        q, s, *b = mx.quantize(w.astype(mx.float16), bits=bits, group_size=group_size, mode=mode)
        out[name] = PackedWeight(q, s, b[0] if b else None, bits, group_size, mode)
    return out


def unpack(weights: dict) -> dict:
    return {
        name: dequantize(w, mx.float32) if isinstance(w, PackedWeight) else w
        for name, w in weights.items()
    }


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("make", "options"),
    [(tiny_llama, {"attention_bias": True}), (tiny_llama, {"tie_word_embeddings": True}),
     (tiny_gemma3, {})],
    ids=["llama", "tied", "gemma3"],
)  # fmt: skip
def test_packed_equals_dequantised(make, options, form):
    tiny, ids = make(**options), prompt(24)
    packed = pack(tiny.weights, **FORMATS[form])
    dense = np.array(run_dense(load_model(tiny.config, unpack(packed)), ids))
    model = load_model(tiny.config, dict(packed), prepare=as_packed)
    assert isinstance(model.model.layers["0"].mlp.up_proj.weight, PackedWeight)
    assert isinstance(model.model.embed_tokens.weight, PackedWeight)
    assert np.abs(np.array(run_dense(model, ids)) - dense).max() < 5e-4
    # The quantised model is another model than the original one, so the comparison means something.
    exact = np.array(run_dense(load_model(tiny.config, dict(tiny.weights)), ids))
    assert np.abs(exact - dense).max() > 0.02


def test_prepare_may_unpack():
    tiny, ids = tiny_llama(), prompt(24)
    packed = pack(tiny.weights, **FORMATS["affine4"])
    a = load_model(tiny.config, dict(packed), prepare=unpacked)
    b = load_model(tiny.config, unpack(packed), prepare=unpacked)
    assert mx.array_equal(run_dense(a, ids), run_dense(b, ids))


@pytest.mark.skipif(mx.metal.is_available(), reason="Metal keeps weights packed")
def test_on_cpu_weights_become_panels_or_float32():
    tiny = tiny_llama()
    model = load_model(tiny.config, pack(tiny.weights, **FORMATS["affine4"]))
    weight = model.model.layers["0"].mlp.up_proj.weight
    if form() == "panels":
        assert isinstance(weight, PanelWeight)
        assert weight.shape == (96, 64)
    else:
        assert isinstance(weight, mx.array)
        assert weight.dtype == mx.float32


def bf16(weights: dict) -> dict:
    return {name: w.astype(mx.bfloat16) for name, w in weights.items()}


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(tiny_llama, mx.float16), (tiny_llama, mx.bfloat16), (tiny_gemma3, mx.bfloat16)],
)
def test_one_dtype_from_end_to_end(make, dtype):
    tiny, ids = make(), prompt(24)
    packed = pack(tiny.weights, **FORMATS["affine8"])
    model = load_model(tiny.config, packed, compute_dtype=dtype, prepare=as_packed)
    weight = model.model.layers["0"].mlp.up_proj.weight
    assert (weight.scales.dtype, weight.biases.dtype) == (dtype, dtype)
    assert model.model.norm.weight.dtype == dtype
    logits = run_dense(model, ids)
    assert logits.dtype == dtype
    exact = reference_logits(tiny.reference, ids)
    correlation = np.corrcoef(np.array(logits.astype(mx.float32)).ravel(), exact.ravel())[0, 1]
    assert correlation > 0.97


@pytest.mark.skipif(mx.metal.is_available(), reason="Metal computes in 16 bits")
@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma3])
def test_a_bfloat16_checkpoint_on_cpu(make):
    """Widened exactly, Gemma's 1 + w included: parity with transformers on the same numbers."""
    tiny, ids = make(), prompt(64)
    rounded = bf16(tiny.weights)
    state = {name: np.array(w.astype(mx.float32)) for name, w in rounded.items()}
    for name, parameter in tiny.reference.named_parameters():
        parameter.data.numpy()[...] = state[name]
    model = load_model(tiny.config, rounded)
    assert model.model.norm.weight.dtype == mx.float32
    got = np.array(run_dense(model, ids))
    assert np.abs(got - reference_logits(tiny.reference, ids)).max() < 2e-3


def test_activation_dtype():
    big, small = mx.zeros((8, 8)), mx.zeros((4,))
    weights = {"a": big.astype(mx.float16), "b": small, "c": small.astype(mx.bfloat16)}
    assert activation_dtype(weights, metal=False) == mx.float32
    assert activation_dtype(weights, metal=True) == mx.float16
    assert activation_dtype({"a": big, "b": small.astype(mx.float16)}, metal=True) == mx.float32
    words = mx.zeros((64, 64), dtype=mx.uint32)
    scales = mx.zeros((64, 16), dtype=mx.bfloat16)
    packed = {"a": PackedWeight(words, scales, scales, 4, 32), "b": small}
    assert activation_dtype(packed, metal=True) == mx.bfloat16


def test_bad_compute_dtype():
    tiny = tiny_llama()
    with pytest.raises(ModelError, match=r"int32; use float32, float16 or bfloat16"):
        load_model(tiny.config, dict(tiny.weights), compute_dtype=mx.int32)


def test_sources_are_released_layer_by_layer(tmp_path):
    tiny = tiny_llama(num_hidden_layers=12, intermediate_size=1024, hidden_size=128)
    path = str(tmp_path / "model.safetensors")
    mx.save_safetensors(path, bf16(tiny.weights))
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    weights = dict(mx.load(path))
    model = load_model(tiny.config, weights, compute_dtype=mx.float32)
    assert weights == {}
    final = mx.get_active_memory() - before
    peak = mx.get_peak_memory() - before
    item = 2 if form() == "panels" else 4  # panels keep bfloat16
    assert final == pytest.approx(item * sum(w.size for w in tiny.weights.values()), rel=0.05)
    # All at once would be final + the file; one layer is a twelfth of the file.
    file_bytes = 2 * sum(w.size for w in tiny.weights.values())
    assert peak < final + file_bytes * 3 / 12
    assert model.vocab_size == 97


def test_the_model_runs_on_another_thread():
    tiny, ids = tiny_gemma3(), prompt(16)
    model = load_model(tiny.config, dict(tiny.weights))
    here, there = np.array(run_dense(model, ids)), []

    def work() -> None:
        there.append(np.array(run_dense(model, ids)))
        mx.clear_streams()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (there[0] == here).all()


def test_tied_head_and_buffers_are_dropped():
    tiny = tiny_llama(tie_word_embeddings=True)
    weights = dict(tiny.weights)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = mx.zeros((8,))
    load_model(tiny.config, weights)


def test_a_tied_head_that_differs_is_refused():
    tiny = tiny_llama(tie_word_embeddings=True)
    other = mx.zeros(tiny.weights["model.embed_tokens.weight"].shape)
    with pytest.raises(
        ModelError, match=r"tie_word_embeddings is true but lm_head\.weight differs"
    ):
        load_model(tiny.config, {**tiny.weights, "lm_head.weight": other})


@pytest.mark.parametrize("prefix", ["language_model.", ""])
def test_other_spellings_of_names(prefix):
    tiny, ids = tiny_llama(tie_word_embeddings=True), prompt(8)
    names = {n: prefix + n if prefix else n.removeprefix("model.") for n in tiny.weights}
    names.pop("lm_head.weight", None)
    model = load_model(tiny.config, {new: tiny.weights[old] for old, new in names.items()})
    assert (
        np.abs(np.array(run_dense(model, ids)) - reference_logits(tiny.reference, ids)).max() < 1e-3
    )


Q = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"


def packed_like(n: int, k: int) -> PackedWeight:
    q, s, b = mx.quantize(mx.zeros((n, k)), bits=4, group_size=32)
    return PackedWeight(q, s, b, 4, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({Q: None}, r"missing model\.layers\.0\.self_attn\.q_proj\.weight \[64, 64\]$"),
        ({"x.weight": mx.zeros((3, 2))}, r"unexpected x\.weight \[3, 2\]$"),
        ({Q: mx.zeros((64, 60))}, r"wrong .*q_proj\.weight is \[64, 60\], expected \[64, 64\]$"),
        ({Q: packed_like(64, 96)}, r"q_proj\.weight is \[64, 96\], expected \[64, 64\]$"),
        ({Q: mx.zeros((64, 64), dtype=mx.uint8)}, r"q_proj\.weight is .*uint8, expected a fl"),
        ({NORM: packed_like(1, 64)}, r"model\.norm\.weight is \[1, 64\], expected \[64\]$"),
        ({NORM: mx.zeros((64, 1))}, r"model\.norm\.weight is \[64, 1\], expected \[64\]$"),
        ({"model.layers.0.self_attn.q_proj.bias": mx.zeros((64,))}, r"unexpected .*q_proj\.bias"),
        ({"model.model.norm.weight": mx.zeros((64,)), NORM: None}, "missing .*; unexpected "),
        ({"norm.weight": mx.zeros((64,))}, r"two tensors are named model\.norm\.weight"),
        ({f"x{i}": mx.zeros((1,)) for i in range(5)}, r"x0 \[1\], .*, x2 \[1\] \(and 2 more\)"),
    ],
    ids=lambda p: str(p)[:50],
)  # fmt: skip
def test_weights_that_do_not_fit(change, message):
    tiny = tiny_llama()
    weights = {n: w for n, w in {**tiny.weights, **change}.items() if w is not None}
    count = len(weights)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(tiny.config, weights)
    assert "\n" not in str(caught.value)
    assert len(weights) == count, "a refused load leaves the caller's weights alone"


def test_gemma_computes_in_bfloat16_where_float16_would_overflow():
    weights = {"a": mx.zeros((4, 4), mx.float16)}
    assert activation_dtype(weights, metal=True, float16_safe=True) == mx.float16
    assert activation_dtype(weights, metal=True, float16_safe=False) == mx.bfloat16
    assert activation_dtype(weights, metal=False, float16_safe=False) == mx.float32
    tiny = tiny_gemma3()
    with pytest.raises(ModelError, match="gemma3_text overflows float16; use bfloat16"):
        load_model(tiny.config, dict(tiny.weights), compute_dtype=mx.float16)


def test_float32_scales_of_packed_weights_count_as_sixteen_bits():
    """A GGUF's K types keep float32 scales; Metal still computes in 16 bits."""
    w = mx.random.normal((64, 64))
    weights = {"a": PackedWeight(*mx.quantize(w, 32, 4), 4, 32)}
    assert activation_dtype(weights, metal=True) == mx.float16
