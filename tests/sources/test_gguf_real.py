"""The default model, tensor by tensor, against the gguf package."""

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
