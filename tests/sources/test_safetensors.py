"""The safetensors reader: damage is a ModelError that names the file, before MLX sees it."""

import json

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from mlxserve.errors import ModelError
from mlxserve.sources.safetensors import DTYPES, load, read_header
from tests.sources.making import one_line

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.float16),
    "scalar": np.array(3, np.int32),
    "none": np.zeros((0, 4), np.float32),
    "bytes": np.arange(5, dtype=np.uint8),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("st") / "good.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    return path


def write(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_header_and_values(good):
    entries = read_header(good)
    assert {n: e.shape for n, e in entries.items()} == {n: t.shape for n, t in TENSORS.items()}
    arrays = load(good)
    for name, want in TENSORS.items():
        assert arrays[name].shape == want.shape
        np.testing.assert_array_equal(np.array(arrays[name]), want)


def test_mlx_loads_every_dtype_that_passes(tmp_path):
    for dtype, size in ((name, dtype.size) for name, dtype in DTYPES.items()):
        header = {"t": {"dtype": dtype, "shape": [2], "data_offsets": [0, 2 * size]}}
        path = write(tmp_path / f"{dtype}.safetensors", header, b"\0" * 2 * size)
        assert read_header(path)["t"].dtype == dtype
        array = load(path)["t"]
        mx.eval(array)
        assert array.nbytes == 2 * size


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


D = b"\0" * 8


@pytest.mark.parametrize(
    ("header", "data", "part"),
    [
        (b"{", b"", "not proper JSON"),
        (b"[" * 100000, b"", "not proper JSON"),
        (b"\xff\xfe{}", b"", "not proper JSON"),
        (b"[]", b"", "not a JSON object"),
        (b'{"a": 1, "a": 2}', b"", "comes twice"),
        ({"a": 3}, b"", "described as"),
        ({"a": {"dtype": "F32"}}, b"", "described as"),
        ({"a": entry(shape=(-2,))}, D, "described as"),
        ({"a": entry(shape=(True, 2))}, D, "described as"),
        ({"a": entry(shape=(1,) * 9)}, D, "described as"),
        ({"a": entry(shape=(10**30,))}, D, "described as"),
        ({"a": entry(offsets=(0, 8.0))}, D, "described as"),
        ({"a": entry(offsets=(8, 0))}, D, "-8 bytes"),
        ({"a": entry(shape=(3,))}, D, "8 bytes for shape"),
        ({"a": entry("F64", (1,))}, D, "F64"),
        ({"a": entry("F8_E4M3", (8,))}, D, "F8_E4M3"),
        ({"a": entry(), "b": entry()}, D, "starts at 0 and not at 8"),
        ({"a": entry(offsets=(4, 12))}, D + b"1234", "starts at 4"),
        ({"a": entry()}, D + b"1", "9 bytes of data"),
        ({"a": entry()}, D[:-1], "7 bytes of data"),
        ({"a\n": entry()}, b"", "0 bytes of data"),
    ],
)
def test_damage_is_named(tmp_path, header, data, part):
    path = write(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(ModelError) as e:
        read_header(path)
    assert one_line(e.value, path, part)


@pytest.mark.parametrize("data", [b"", b"1234567", b"\xff" * 8, b"version 1 of LFS"])
def test_impossible_header_lengths(tmp_path, data):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelError, match="header of") as e:
        read_header(path)
    assert one_line(e.value, path)


def test_cut_anywhere_is_a_model_error(good, tmp_path):
    data = good.read_bytes()
    path = tmp_path / "cut.safetensors"
    for n in range(len(data)):
        path.write_bytes(data[:n])
        with pytest.raises(ModelError) as e:
            read_header(path)
        assert one_line(e.value, path)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_garbled_headers_load_or_are_model_errors(good, tmp_path_factory, data):
    raw = bytearray(good.read_bytes())
    end = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("g") / "g.safetensors"
    path.write_bytes(raw)
    try:
        read_header(path)
        mx.eval(load(path))
    except ModelError as e:
        assert one_line(e, path)  # noqa: PT017 either outcome is right


def test_missing_file_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match="No such file"):
        read_header(tmp_path / "none.safetensors")
