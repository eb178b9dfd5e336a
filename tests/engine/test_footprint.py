"""What a model is said to need, against what the engine takes."""

import mlx.core as mx
import pytest
from gguf import GGMLQuantizationType as Kind

from mlxserve.engine import footprint as fp
from mlxserve.errors import ModelError
from mlxserve.kernels import matmul
from mlxserve.kernels.quantized import PackedWeight, dequantize
from mlxserve.models import registry
from mlxserve.sources.checkpoint import open_checkpoint
from tests.sources.making import llama_metadata, llama_tensors, write_gguf
from tests.support.tiny import tiny_llama

GIB = 1 << 30
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}


def test_keys_and_values_of_a_context():
    need = fp.footprint(LLAMA_8B, 4 * GIB, 64 * GIB, metal=True)
    assert need.context_tokens == 8192
    assert need.cache_bytes == 8192 * 32 * 2 * 8 * 128 * 2  # tokens, layers, K and V, heads, dim
    assert need.room_tokens == 131072
    assert need.fits
    assert fp.footprint(LLAMA_8B, 4 * GIB, 64 * GIB, metal=False).cache_bytes == 2 * GIB
    float32 = LLAMA_8B | {"dtype": "float32"}
    assert fp.footprint(float32, 4 * GIB, 64 * GIB, metal=True).cache_bytes == 2 * GIB


def test_what_does_not_fit():
    barely = fp.footprint(LLAMA_8B, 5 * GIB, 6 * GIB, metal=True)
    assert not barely.fits
    assert 0 < barely.room_tokens < 8192
    assert fp.footprint(LLAMA_8B, 15 * GIB, 8 * GIB, metal=True).room_tokens == 0


def test_a_window_bounds_the_cache():
    mistral = LLAMA_8B | {"model_type": "mistral", "sliding_window": 1024}
    full = fp.footprint(LLAMA_8B, 0, 64 * GIB, metal=True).cache_bytes
    assert fp.footprint(mistral, 0, 64 * GIB, metal=True).cache_bytes < full / 6


def test_a_context_longer_than_the_model_has():
    config = tiny_llama(max_position_embeddings=512).config
    need = fp.footprint(config, 0, GIB, metal=False)
    assert need.context_tokens == need.room_tokens == 512
    assert need.fits


def test_a_config_that_cannot_be_run():
    with pytest.raises(ModelError, match="isn't supported"):
        fp.footprint({"model_type": "mamba"}, 0, GIB, metal=False)
    assert "llama" in registry.MODULES


def test_bandwidth_is_known_or_measured():
    assert fp.memory_bandwidth("Apple M2 Max") == (400e9, "Apple M2 Max")
    assert 1e8 < fp.measure_bandwidth(3, (1 << 22) + 5) < 1e13


def test_bandwidth_is_measured_with_the_cores_that_may_be_used(monkeypatch):
    monkeypatch.setattr(fp, "usable_cores", lambda: 3)
    monkeypatch.setattr(fp, "measure_bandwidth", lambda threads: threads * 1e9)
    assert fp.memory_bandwidth("some CPU") == (3e9, "measured")


def test_weights_that_are_widened():
    config = LLAMA_8B | {"tie_word_embeddings": False}
    n = 8_030_261_248
    assert fp.loaded_bytes(config, 5 * GIB, form="float32") == 4 * n
    assert fp.loaded_bytes(config, 5 * GIB, form="float32", elements={"Q4_K": n}) == 4 * n
    with pytest.raises(ModelError, match="isn't supported"):
        fp.loaded_bytes({"model_type": "mamba"}, 0, form="float32")


@pytest.mark.parametrize(("form", "symmetric"), [("packed", 40), ("panels", 36)])
def test_weights_that_stay_packed(form, symmetric):
    def told(elements):
        return fp.loaded_bytes(LLAMA_8B, 5 * GIB, form=form, elements=elements)

    assert told({}) == 5 * GIB
    assert told({"Q4_K": 64, "F16": 8}) == 56
    assert told({"Q4_0": 64}) == symmetric


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_loaded_bytes_are_those_of_the_loaded_model(tmp_path, kind):
    tensors = llama_tensors(Kind[kind])
    checkpoint = open_checkpoint(
        write_gguf(tmp_path / "m.gguf", metadata=llama_metadata(), tensors=tensors)
    )
    forms = [("packed", mx.float16, kept_packed), ("float32", mx.float32, widened)]
    if matmul.form() == "panels":
        forms.append(("panels", mx.float32, in_panels))
    for form, dtype, nbytes in forms:
        real = sum(nbytes(value, dtype) for value in checkpoint.weights().values())
        told = fp.loaded_bytes(checkpoint.config, 1 << 60, form=form, elements=checkpoint.elements)
        assert told == pytest.approx(real, rel=0.03)


def kept_packed(value, dtype):
    if isinstance(value, PackedWeight):
        return value.weight.nbytes + 2 * value.scales.size * dtype.size
    return value.size * dtype.size


def widened(value, dtype):
    dense = dequantize(value, dtype) if isinstance(value, PackedWeight) else value
    return dense.size * dtype.size


def in_panels(value, dtype):
    prepared = matmul.prepare(value, dtype) if len(value.shape) == 2 else value
    return prepared.data.nbytes if isinstance(prepared, matmul.PanelWeight) else value.size * 4
