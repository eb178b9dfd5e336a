"""GGUF tensors in MLX: every value equals what the gguf package makes of the same bytes."""

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from mlxserve.errors import ModelError
from mlxserve.kernels.quantized import PackedWeight, dequantize
from mlxserve.sources.gguf import read_gguf
from mlxserve.sources.gguf_quant import check_tensor, to_mlx
from tests.sources.making import one_line, quantised, write_gguf

QUANTISED = (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0)


def packed_file(path, name, raw, kind):
    writer = gguf.GGUFWriter(path, "x")
    writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(path)


def random_blocks(rng, kind, rows, groups):
    """Blocks with any q and with scales over all of float16's range that the conversion allows."""
    nbytes = gguf.GGML_QUANT_SIZES[kind][1]
    raw = rng.integers(0, 256, (rows, groups, nbytes), np.uint8)
    halves = 2 if kind == Kind.Q4_1 else 1
    exponents = rng.uniform(-24, 8, (rows, groups, halves))
    scales = np.exp2(exponents) * rng.choice([-1.0, 1.0, 0.0], exponents.shape, p=[0.45, 0.45, 0.1])
    raw[..., : 2 * halves] = scales.astype("<f2").view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("shape", [(1, 32), (7, 96), (64, 256)])
def test_quantised_values_are_exact(tmp_path, kind, shape):
    rng = np.random.default_rng(1)
    for raw in (
        quantised(rng.standard_normal(shape), kind),
        random_blocks(rng, kind, shape[0], shape[1] // 32),
    ):
        file = packed_file(tmp_path / "q.gguf", "t", raw, kind)
        got = to_mlx(file, file.tensors["t"])
        assert isinstance(got, PackedWeight)
        assert got.shape == shape
        assert (got.bits, got.group_size, got.mode) == (8 if kind == Kind.Q8_0 else 4, 32, "affine")
        assert got.scales.dtype == got.biases.dtype == mx.float16
        want = gguf.quants.dequantize(raw, kind)
        np.testing.assert_array_equal(np.array(dequantize(got, mx.float32)), want)


@pytest.mark.parametrize("kind", [*QUANTISED, Kind.F32, Kind.F16, Kind.BF16])
def test_rows_are_reordered_exactly(tmp_path, kind):
    rng = np.random.default_rng(2)
    values = rng.standard_normal((6, 64)).astype(np.float32)
    path = write_gguf(tmp_path / "r.gguf", tensors={"t": (values, kind)})
    file = read_gguf(path)
    order = rng.permutation(6)
    got = to_mlx(file, file.tensors["t"], order)
    if isinstance(got, PackedWeight):
        got = dequantize(got, mx.float32)
    want = gguf.quants.dequantize(quantised(values, kind), kind)[order]
    np.testing.assert_array_equal(np.array(got.astype(mx.float32)), want)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Kind.F32, mx.float32), (Kind.F16, mx.float16), (Kind.BF16, mx.bfloat16)]
)
def test_plain_tensors_keep_their_dtype(tmp_path, kind, dtype):
    values = np.random.default_rng(3).standard_normal((3, 5)).astype(np.float32)
    tensors = {"m": (values, kind), "v": (values[0], kind)}
    file = read_gguf(write_gguf(tmp_path / "p.gguf", tensors=tensors))
    for name, (v, _) in tensors.items():
        got = to_mlx(file, file.tensors[name])
        assert (got.dtype, got.shape) == (dtype, v.shape)
        want = gguf.quants.dequantize(quantised(v, kind), kind).reshape(v.shape)
        np.testing.assert_array_equal(np.array(got.astype(mx.float32)), want)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K, Kind.Q5_0, Kind.IQ4_NL, Kind.MXFP4])
def test_other_types_are_refused_by_name(tmp_path, kind):
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.zeros((2, 256 // block * nbytes), np.uint8)
    file = packed_file(tmp_path / "k.gguf", "blk.0.attn_q.weight", raw, kind)
    with pytest.raises(ModelError, match="Q4_1 or Q8_0") as e:
        to_mlx(file, file.tensors["blk.0.attn_q.weight"])
    assert one_line(e.value, file.path, "blk.0.attn_q.weight", kind.name)


@pytest.mark.parametrize("shape", [(32,), (2, 2, 32)])
def test_quantised_tensors_are_matrices(tmp_path, shape):
    path = write_gguf(tmp_path / "s.gguf", tensors={"t": (np.ones(shape), Kind.Q8_0)})
    file = read_gguf(path)
    with pytest.raises(ModelError, match="must be matrices"):
        check_tensor(file, file.tensors["t"])


@pytest.mark.parametrize(
    ("kind", "scale"),
    [(Kind.Q8_0, np.inf), (Kind.Q8_0, 1e3), (Kind.Q4_0, 1e4), (Kind.Q4_1, np.nan)],
)
def test_scales_that_are_not_finite_are_damage(tmp_path, kind, scale):
    raw = quantised(np.ones((2, 32)), kind)
    raw[1, :2] = np.array([scale], "<f2").view(np.uint8)
    file = packed_file(tmp_path / "s.gguf", "t", raw, kind)
    with pytest.raises(ModelError, match="not finite") as e:
        to_mlx(file, file.tensors["t"])
    assert one_line(e.value, file.path, "'t'")


def test_empty_tensor_is_damage(tmp_path):
    file = packed_file(tmp_path / "e.gguf", "t", np.zeros((0, 4), np.float32), Kind.F32)
    with pytest.raises(ModelError, match="shape"):
        check_tensor(file, file.tensors["t"])
