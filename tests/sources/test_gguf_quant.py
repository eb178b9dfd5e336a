"""GGUF tensors in MLX: every value equals what the gguf package makes of the same bytes."""

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from mlxserve.errors import ModelError, RequestError
from mlxserve.kernels.quantized import PackedWeight, dequantize
from mlxserve.sources.checkpoint import open_checkpoint
from mlxserve.sources.gguf import read_gguf
from mlxserve.sources.gguf_quant import check_tensor, dense, to_mlx
from tests.sources.making import one_line, quantised, write_gguf

EXACT = {
    Kind.Q4_0: 4,
    Kind.Q4_1: 4,
    Kind.Q5_0: 5,
    Kind.Q5_1: 5,
    Kind.Q8_0: 8,
    Kind.Q4_K: 4,
    Kind.Q5_K: 5,
}
K_TYPES = (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)
# Where the float16 numbers of a block lie.
HALVES = dict.fromkeys(EXACT, (0,)) | dict.fromkeys(
    (Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K), (0, 2)
)
HALVES |= {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q6_K: (208,)}
ROUNDED = (Kind.Q2_K, Kind.Q3_K, Kind.Q6_K)


def packed_file(path, name, raw, kind):
    writer = gguf.GGUFWriter(path, "x")
    writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(path)


def random_blocks(rng, kind, rows, columns, *, largest=8.0):
    """Blocks with any bits and with scales over all of float16's range that can be converted."""
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, columns // block, nbytes), np.uint8)
    for at in HALVES[kind]:
        exponents = rng.uniform(-24, largest, raw.shape[:2])
        signs = rng.choice([-1.0, 1.0, 0.0], exponents.shape, p=[0.45, 0.45, 0.1])
        halves = (np.exp2(exponents) * signs).astype("<f2")
        raw[..., at : at + 2] = halves[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def oracle(raw, kind):
    return gguf.quants.dequantize(raw, kind)


def relative_errors(got, want):
    """Differences over the range of their group of 32; groups without range must be equal."""
    off = np.abs(got.reshape(-1, 32).astype(np.float64) - want.reshape(-1, 32))
    spread = np.ptp(want.reshape(-1, 32).astype(np.float64), axis=-1)
    assert not off[spread == 0].any()
    return off[spread > 0] / spread[spread > 0, None]


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("shape", [(1, 256), (7, 768), (64, 512)])
def test_quantised_values_are_exact(tmp_path, monkeypatch, kind, shape):
    monkeypatch.setattr("mlxserve.sources.gguf_quant.CHUNK_BYTES", 5000)  # several chunks
    rng = np.random.default_rng(1)
    cases = [random_blocks(rng, kind, *shape)]
    if kind not in K_TYPES:  # the package can't quantise to these
        cases.append(quantised(rng.standard_normal(shape), kind))
    for raw in cases:
        file = packed_file(tmp_path / "q.gguf", "t", raw, kind)
        got, error = to_mlx(file, file.tensors["t"])
        assert isinstance(got, PackedWeight)
        assert (got.shape, error) == (shape, 0.0)
        assert (got.bits, got.group_size, got.mode) == (EXACT[kind], 32, "affine")
        dtype = mx.float32 if kind in K_TYPES else mx.float16
        assert got.scales.dtype == got.biases.dtype == dtype
        np.testing.assert_array_equal(np.array(dequantize(got, mx.float32)), oracle(raw, kind))


@pytest.mark.parametrize("kind", [k for k in EXACT if k not in K_TYPES])
def test_a_row_may_be_one_block(tmp_path, kind):
    raw = random_blocks(np.random.default_rng(4), kind, 3, 32)
    file = packed_file(tmp_path / "q.gguf", "t", raw, kind)
    got = to_mlx(file, file.tensors["t"]).value
    np.testing.assert_array_equal(np.array(dequantize(got, mx.float32)), oracle(raw, kind))


@pytest.mark.parametrize("source", ["random", "smooth"])
def test_q6_k_becomes_the_nearest_8_bits(tmp_path, source):
    rng = np.random.default_rng(6)
    raw = random_blocks(rng, Kind.Q6_K, 64, 1024)
    if source == "smooth":  # scales alike, as of real weights
        raw = raw.reshape(-1, 210)
        raw[:, 192:208] = rng.integers(60, 128, (len(raw), 16), np.uint8)
        raw = raw.reshape(64, -1)
    file = packed_file(tmp_path / "q.gguf", "t", raw, Kind.Q6_K)
    got, error = to_mlx(file, file.tensors["t"])
    assert isinstance(got, PackedWeight)
    assert (got.shape, got.bits, got.group_size) == ((64, 1024), 8, 32)
    errors = relative_errors(np.array(dequantize(got, mx.float32)), oracle(raw, Kind.Q6_K))
    assert errors.max() == pytest.approx(error, rel=1e-3)
    assert errors.max() < 0.0027
    assert np.sqrt((errors**2).mean()) < 0.0009
    # Half of the weights are exact, but for the rounding of float32.
    assert (errors < 2e-6).mean() >= 0.5


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K])
def test_q2_k_and_q3_k_become_the_nearest_8_bits(tmp_path, kind):
    raw = random_blocks(np.random.default_rng(6), kind, 64, 1024)
    file = packed_file(tmp_path / "q.gguf", "t", raw, kind)
    got, error = to_mlx(file, file.tensors["t"])
    assert isinstance(got, PackedWeight)
    assert (got.shape, got.bits, got.group_size) == ((64, 1024), 8, 32)
    errors = relative_errors(np.array(dequantize(got, mx.float32)), oracle(raw, kind))
    assert errors.max() == pytest.approx(error, rel=1e-2)
    assert errors.max() < 0.0028
    got = to_mlx(file, file.tensors["t"], q6_k="16bit").value
    np.testing.assert_array_equal(np.array(got), oracle(raw, kind).astype(np.float16))


@pytest.mark.parametrize("kind", [*EXACT, *ROUNDED, Kind.F32, Kind.F16, Kind.BF16])
def test_dense_rows_are_what_the_file_means(tmp_path, kind):
    rng = np.random.default_rng(9)
    if kind in HALVES:
        raw = random_blocks(rng, kind, 40, 512, largest=3.0)
    else:
        raw = quantised(rng.standard_normal((40, 64)), kind)
    file = packed_file(tmp_path / "d.gguf", "t", raw, kind)
    order = rng.permutation(40)[:7]
    for rows in (slice(3, 20), order):
        got = dense(file, file.tensors["t"], rows)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, oracle(raw, kind)[rows])


def test_q6_k_groups_of_one_value(tmp_path):
    """No range at all, or no scale at all: the bias says it."""
    raw = np.zeros((3, 210), np.uint8)
    raw[:, 208:] = np.array([0.5], "<f2").view(np.uint8)
    raw[1:, 192:208] = 3
    raw[2, 208:] = 0
    file = packed_file(tmp_path / "q.gguf", "t", raw, Kind.Q6_K)
    got, error = to_mlx(file, file.tensors["t"])
    values = np.array(dequantize(got, mx.float32))
    np.testing.assert_array_equal(values, oracle(raw, Kind.Q6_K))
    assert values[1, 0] == -48
    assert error == 0


def test_q6_k_in_16_bits_on_request(tmp_path):
    raw = random_blocks(np.random.default_rng(7), Kind.Q6_K, 64, 512, largest=3.0)
    file = packed_file(tmp_path / "q.gguf", "t", raw, Kind.Q6_K)
    got, error = to_mlx(file, file.tensors["t"], q6_k="16bit")
    assert isinstance(got, mx.array)
    assert got.dtype == mx.float16
    want = oracle(raw, Kind.Q6_K)
    np.testing.assert_array_equal(np.array(got), want.astype(np.float16))
    errors = relative_errors(np.array(got).astype(np.float32), want)
    assert errors.max() == pytest.approx(error, rel=1e-3)
    order = np.random.default_rng(8).permutation(64)
    got = to_mlx(file, file.tensors["t"], order, q6_k="16bit").value
    np.testing.assert_array_equal(np.array(got), want.astype(np.float16)[order])


@pytest.mark.parametrize("kind", [*EXACT, Kind.F32, Kind.F16, Kind.BF16])
def test_rows_are_reordered_exactly(tmp_path, kind):
    rng = np.random.default_rng(2)
    if kind in K_TYPES:
        raw = random_blocks(rng, kind, 6, 256)
    else:
        raw = quantised(rng.standard_normal((6, 64)), kind)
    file = packed_file(tmp_path / "r.gguf", "t", raw, kind)
    order = rng.permutation(6)
    got = to_mlx(file, file.tensors["t"], order).value
    if isinstance(got, PackedWeight):
        got = dequantize(got, mx.float32)
    want = oracle(raw, kind)[order]
    np.testing.assert_array_equal(np.array(got.astype(mx.float32)), want)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Kind.F32, mx.float32), (Kind.F16, mx.float16), (Kind.BF16, mx.bfloat16)]
)
def test_plain_tensors_keep_their_dtype(tmp_path, kind, dtype):
    values = np.random.default_rng(3).standard_normal((3, 5)).astype(np.float32)
    tensors = {"m": (values, kind), "v": (values[0], kind)}
    file = read_gguf(write_gguf(tmp_path / "p.gguf", tensors=tensors))
    for name, (v, _) in tensors.items():
        got = to_mlx(file, file.tensors[name]).value
        assert (got.dtype, got.shape) == (dtype, v.shape)
        want = gguf.quants.dequantize(quantised(v, kind), kind).reshape(v.shape)
        np.testing.assert_array_equal(np.array(got.astype(mx.float32)), want)


@pytest.mark.parametrize("kind", [Kind.Q8_1, Kind.IQ4_NL, Kind.MXFP4])
def test_other_types_are_refused_by_name(tmp_path, kind):
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.zeros((2, 256 // block * nbytes), np.uint8)
    file = packed_file(tmp_path / "k.gguf", "blk.0.attn_q.weight", raw, kind)
    with pytest.raises(ModelError, match="Q4_K_M or Q8_0") as e:
        to_mlx(file, file.tensors["blk.0.attn_q.weight"])
    assert one_line(e.value, file.path, "blk.0.attn_q.weight", kind.name)


@pytest.mark.parametrize("shape", [(32,), (2, 2, 32)])
def test_quantised_tensors_are_matrices(tmp_path, shape):
    path = write_gguf(tmp_path / "s.gguf", tensors={"t": (np.ones(shape), Kind.Q8_0)})
    file = read_gguf(path)
    with pytest.raises(ModelError, match="must be matrices"):
        check_tensor(file, file.tensors["t"])


@pytest.mark.parametrize(
    ("kind", "scale", "how"),
    [
        (Kind.Q8_0, np.inf, "8bit"),
        (Kind.Q8_0, 1e3, "8bit"),
        (Kind.Q4_0, 1e4, "8bit"),
        (Kind.Q5_0, 5e3, "8bit"),
        (Kind.Q4_1, np.nan, "8bit"),
        (Kind.Q5_1, np.nan, "8bit"),
        (Kind.Q4_K, np.inf, "8bit"),
        (Kind.Q5_K, np.nan, "8bit"),
        (Kind.Q6_K, np.inf, "8bit"),
        (Kind.Q2_K, np.inf, "8bit"),
        (Kind.Q3_K, np.nan, "8bit"),
        (Kind.Q3_K, np.nan, "16bit"),
        (Kind.Q6_K, np.nan, "16bit"),
        (Kind.Q6_K, 1e3, "16bit"),
    ],
)
def test_scales_that_are_not_finite_are_damage(tmp_path, kind, scale, how):
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.full((2, 256 // block, nbytes), 1, np.uint8)
    if kind == Kind.Q6_K:
        raw[..., 192:208] = 127
    at = HALVES[kind][0]
    raw[1, 0, at : at + 2] = np.array([scale], "<f2").view(np.uint8)
    file = packed_file(tmp_path / "s.gguf", "t", raw.reshape(2, -1), kind)
    with pytest.raises(ModelError, match="not finite") as e:
        to_mlx(file, file.tensors["t"], q6_k=how)
    assert one_line(e.value, file.path, "'t'")


def test_another_wish_for_q6_k_is_refused(tmp_path):
    with pytest.raises(RequestError, match="8bit, 16bit") as e:
        open_checkpoint(tmp_path, gguf_q6_k="4bit")  # type: ignore[arg-type]
    assert one_line(e.value, "gguf_q6_k", "'4bit'")


def test_empty_tensor_is_damage(tmp_path):
    file = packed_file(tmp_path / "e.gguf", "t", np.zeros((0, 4), np.float32), Kind.F32)
    with pytest.raises(ModelError, match="shape"):
        check_tensor(file, file.tensors["t"])


@pytest.mark.parametrize("q6_k", ["8bit", "16bit"])
@pytest.mark.parametrize("kind", [*EXACT, *ROUNDED])
def test_a_part_of_a_matrix_has_its_numbers(tmp_path, monkeypatch, kind, q6_k):
    monkeypatch.setattr("mlxserve.sources.gguf_quant.CHUNK_BYTES", 1000)  # several chunks
    raw = random_blocks(np.random.default_rng(8), kind, 12, 512, largest=2.0)
    file = packed_file(tmp_path / "q.gguf", "t", raw, kind)
    rows, columns = np.array([7, 1, 2, 11, 0]), range(96, 416)
    whole, part = (
        to_mlx(file, file.tensors["t"], *some, q6_k=q6_k).value for some in ((), (rows, columns))
    )
    if isinstance(whole, PackedWeight):
        whole, part = dequantize(whole, mx.float32), dequantize(part, mx.float32)
    want = np.array(whole)[np.ix_(rows, columns)]
    np.testing.assert_array_equal(np.array(part), want)
