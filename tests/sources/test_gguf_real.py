"""The models that tests have, tensor by tensor, against the gguf package."""

import gguf
import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels.quantized import PackedWeight, dequantize
from mlxserve.sources.checkpoint import open_checkpoint
from mlxserve.sources.gguf import read_gguf
from mlxserve.sources.gguf_names import describe

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def oracle(smollm2_gguf):
    return gguf.GGUFReader(smollm2_gguf)


def test_metadata(smollm2_gguf, oracle):
    metadata = read_gguf(smollm2_gguf).metadata
    names = [n for n in oracle.fields if not n.startswith("GGUF.")]
    assert list(metadata) == names
    for name in names:
        if len(oracle.fields[name].data) < 1000:
            assert metadata[name] == oracle.fields[name].contents(), name
    for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        field = oracle.fields[name]
        assert metadata[name] == [bytes(field.parts[i]).decode() for i in field.data]


def test_config(smollm2_gguf):
    config = open_checkpoint(smollm2_gguf).config
    assert config["tie_word_embeddings"] is True
    assert (config["head_dim"], config["vocab_size"], config["rope_theta"]) == (64, 49152, 100000.0)


def test_every_tensor_is_exact(smollm2_gguf, oracle):
    file = read_gguf(smollm2_gguf)
    weights = open_checkpoint(smollm2_gguf).weights()
    named = {t.tensor.name: t for t in describe(file)[1]}
    assert len(named) == len(oracle.tensors) == len(weights)
    for tensor in oracle.tensors:
        want = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        ours = named[tensor.name]
        if ours.heads:  # the converter's permutation, undone as its documentation describes it
            half = want.shape[0] // ours.heads // 2
            want = want.reshape(ours.heads, half, 2, -1).swapaxes(1, 2).reshape(want.shape)
        got = weights[ours.name]
        if isinstance(got, PackedWeight):
            got = dequantize(got, mx.float32)
        np.testing.assert_array_equal(np.array(got), want, err_msg=tensor.name)


@pytest.mark.parametrize("how", ["8bit", "16bit"])
def test_gemma3_is_exact_but_for_q6_k(gemma3_gguf, caplog, how):
    """Q5_0, Q8_0, Q4_K and F32 equal the file; what Q6_K lost is said, in one line."""
    file = read_gguf(gemma3_gguf)
    weights = open_checkpoint(gemma3_gguf, gguf_q6_k=how).weights()
    worst = 0.0
    for t in describe(file)[1]:
        kind = gguf.GGMLQuantizationType[t.tensor.type]
        raw = file.raw(t.tensor).reshape(t.tensor.shape[0], -1)[:2048]
        want = gguf.quants.dequantize(raw, kind).reshape(-1, *t.tensor.shape[1:])
        got = weights[t.name]
        if isinstance(got, PackedWeight):
            parts = (got.weight[:2048], got.scales[:2048], got.biases[:2048])
            got = dequantize(PackedWeight(*parts, got.bits, got.group_size), mx.float32)
        got = np.array(got[: len(want)].astype(mx.float32)) + t.plus_one
        if t.tensor.type == "Q6_K":
            off = np.abs(got - want).reshape(-1, 32).max(-1)
            worst = max(worst, (off / np.ptp(want.reshape(-1, 32), axis=-1)).max())
        else:
            np.testing.assert_array_equal(got, want, err_msg=t.tensor.name)
    assert 0 < worst < (0.0027 if how == "8bit" else 0.0005)
    [record] = caplog.records
    said = record.getMessage()
    assert f"9 Q6_K tensors were converted to {how.removesuffix('bit')} bits" in said
    assert f"{100 * worst:.2g}%" in said
    assert ("gguf_q6_k='16bit'" in said) == (how == "8bit")
