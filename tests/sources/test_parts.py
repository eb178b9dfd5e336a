"""Parts of tensors: the numbers that the whole has there, and no more bytes read than that."""

import os
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from mlxserve.errors import ModelError
from mlxserve.kernels.quantized import PackedWeight, dequantize
from mlxserve.sources.checkpoint import open_checkpoint
from mlxserve.sources.safetensors import read, read_header
from tests.sources.making import llama_metadata, llama_tensors, write_gguf
from tests.support.model_dir import Packing, write_weights
from tests.support.tiny import tiny_llama


def middle(name, shape):
    """Some rows that begin anywhere; of o_proj, columns that begin at a group; all of vectors."""
    if len(shape) == 1:
        return (range(shape[0]),)
    if "o_proj" in name:
        return range(shape[0]), range(32, 64)
    return range(3, shape[0] - 5), range(shape[1])


def numbers(weight) -> np.ndarray:
    dense = dequantize(weight, mx.float32) if isinstance(weight, PackedWeight) else weight
    return np.array(dense.astype(mx.float32))


def in_safetensors(path: Path, packing: Packing | None, dtype: mx.Dtype) -> Path:
    return write_weights(path, tiny_llama(), packing, dtype)


def in_gguf(path: Path, kind: Kind) -> Path:
    return write_gguf(path, metadata=llama_metadata(), tensors=llama_tensors(kind))


@pytest.mark.parametrize(
    ("write", "how"),
    [
        *((in_safetensors, (None, dtype)) for dtype in (mx.float32, mx.float16, mx.bfloat16)),
        (in_safetensors, (Packing(4, 32), mx.float16)),
        (in_safetensors, (Packing(3, 32), mx.bfloat16)),
        (in_safetensors, (Packing(4, 16, "nvfp4"), mx.bfloat16)),
        *((in_gguf, (kind,)) for kind in (Kind.F32, Kind.BF16, Kind.Q8_0, Kind.Q5_1)),
    ],
)
def test_a_part_has_the_numbers_of_the_whole(tmp_path, write, how):
    checkpoint = open_checkpoint(write(tmp_path / "m", *how))
    whole, part = checkpoint.weights(), checkpoint.weights(middle)
    assert set(part) == set(whole) == set(checkpoint.tensors)
    for name, weight in whole.items():
        assert checkpoint.tensors[name].shape == tuple(weight.shape)
        group = weight.group_size if isinstance(weight, PackedWeight) else None
        assert checkpoint.tensors[name].group_size == group
        want = numbers(weight)[np.ix_(*middle(name, weight.shape))]
        np.testing.assert_array_equal(numbers(part[name]), want)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes that are read")
@pytest.mark.parametrize("packing", [None, Packing(4, 32)], ids=["dense", "4 bits"])
def test_nothing_else_is_read(tmp_path, packing):
    tiny = tiny_llama(hidden_size=128, intermediate_size=512)
    checkpoint = open_checkpoint(write_weights(tmp_path / "m", tiny, packing))

    def half(name, shape):
        axis = 1 if "o_proj" in name or "down_proj" in name else 0
        return tuple(range(n // 2 if i == axis else n) for i, n in enumerate(shape))

    def read_bytes():
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(lines[0].removeprefix("rchar: "))

    before = read_bytes()
    weights = checkpoint.weights(half)
    mx.eval([a for w in weights.values() for a in arrays(w)])
    read = read_bytes() - before
    part = sum(a.nbytes for w in weights.values() for a in arrays(w))
    assert part < 0.51 * checkpoint.size_bytes
    assert part <= read < part + 20_000  # the header is read again


def arrays(weight) -> list[mx.array]:
    if not isinstance(weight, PackedWeight):
        return [weight]
    return [a for a in (weight.weight, weight.scales, weight.biases) if a is not None]


def test_a_file_that_was_cut_short_since_it_was_opened(tmp_path):
    path = write_weights(tmp_path / "m", tiny_llama())
    file = path / "model.safetensors"
    entry = read_header(file)["model.layers.1.mlp.up_proj.weight"]
    os.truncate(file, entry.offset + 1000)
    assert read(entry, range(2)).shape == (2, 64)
    for part in ((range(2, 50),), (range(2, 50), range(32))):
        with pytest.raises(ModelError, match=r"model\.safetensors: it became shorter while"):
            read(entry, *part)


def test_half_a_group_is_no_part(tmp_path):
    checkpoint = open_checkpoint(write_weights(tmp_path / "m", tiny_llama(), Packing(4, 32)))
    with pytest.raises(ValueError, match="aren't whole groups of 32"):
        checkpoint.weights(lambda name, shape: (*map(range, shape[:-1]), range(shape[-1] - 16)))
