"""The GGUF reader: what it reads, and that damage is always a ModelError in one line."""

import struct

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.errors import ModelError
from mlxserve.sources.checkpoint import open_checkpoint
from mlxserve.sources.gguf import TENSOR_TYPES, read_gguf
from tests.sources.making import llama_metadata, llama_tensors, one_line, write_gguf

METADATA = {
    "x.bool": True,
    "x.int": 7,
    "x.float": 0.5,
    "x.text": "zwölf\n",
    "x.ints": [1, 2, 3],
    "x.floats": [0.25, -1.0],
    "x.bools": [True, False],
    "x.texts": ["", "a", "ж" * 300],
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    values = np.arange(64, dtype=np.float32).reshape(2, 32)
    tensors = {"a": (values, Kind.Q4_1), "b": (values[0], Kind.F32), "c": (values, Kind.F16)}
    return write_gguf(tmp_path_factory.mktemp("gguf") / "s.gguf", "odd", METADATA, tensors)


def test_metadata_is_plain_python(small):
    file = read_gguf(small)
    assert file.metadata == {"general.architecture": "odd"} | METADATA
    assert type(file.metadata["x.bool"]) is bool
    assert type(file.metadata["x.ints"][0]) is int
    assert file.version == 3
    assert file.size_bytes == small.stat().st_size


def test_every_number_type(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "n.gguf", "odd")
    for kind, value in {
        "uint8": 255, "int8": -128, "uint16": 65535, "int16": -32768, "uint32": 2**32 - 1,
        "int32": -(2**31), "uint64": 2**64 - 1, "int64": -(2**63), "float32": 1.5, "float64": 0.1,
    }.items():  # fmt: skip
        getattr(writer, f"add_{kind}")(kind, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = read_gguf(tmp_path / "n.gguf").metadata
    reader = gguf.GGUFReader(tmp_path / "n.gguf")
    for key, value in metadata.items():
        assert value == reader.fields[key].contents(), key


def test_tensors_lie_where_the_package_finds_them(small):
    file = read_gguf(small)
    oracle = {t.name: t for t in gguf.GGUFReader(small).tensors}
    assert list(file.tensors) == list(oracle) == ["a", "b", "c"]
    for name, t in file.tensors.items():
        o = oracle[name]
        assert (t.type, t.offset, t.nbytes) == (o.tensor_type.name, o.data_offset, o.n_bytes)
        assert t.shape == tuple(int(n) for n in reversed(o.shape))
        assert file.raw(t).tobytes() == o.data.tobytes()


def test_block_sizes_are_the_packages():
    for kind, (block, nbytes) in gguf.GGML_QUANT_SIZES.items():
        if kind.name not in {"Q8_1", "Q1_0"}:  # never in a model file
            assert TENSOR_TYPES[kind.value] == (kind.name, block, nbytes)


def test_version_2_reads_the_same(small, tmp_path):
    data = bytearray(small.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    (tmp_path / "v2.gguf").write_bytes(data)
    assert read_gguf(tmp_path / "v2.gguf").metadata == read_gguf(small).metadata


@pytest.mark.parametrize(
    ("version", "part"),
    [
        (struct.pack(">I", 3), "big endian"),
        (struct.pack("<I", 1), "version 1"),
        (b"\xff" * 4, "429"),
    ],
)
def test_other_versions_are_refused_by_name(small, tmp_path, version, part):
    path = tmp_path / "v.gguf"
    path.write_bytes(small.read_bytes()[:4] + version + small.read_bytes()[8:])
    with pytest.raises(ModelError, match=part) as e:
        read_gguf(path)
    assert one_line(e.value, path)


def header(n_tensors=0, n_pairs=0):
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_pairs)


def text(s):
    return struct.pack("<Q", len(s)) + s


def head(name=b"t", dims=(32,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


PAD = b"\0" * 4096


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "empty"),
        (b"GG", "ends inside"),
        (b"PK\3\4" + PAD, "not with 'GGUF'"),
        (header(2**63), "tensors don't fit"),
        (header(0, 2**40), "entries don't fit"),
        (header(0, 3), "entries don't fit"),
        (header(0, 1) + struct.pack("<Q", 2**64 - 1) + PAD, "ends inside"),
        (header(0, 1) + text(b"\xff\xfe") + PAD, "not UTF-8"),
        (header(0, 1) + text(b"k") + struct.pack("<I", 77) + PAD, "value type 77"),
        (header(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 0, 2**62) + PAD, "don't fit"),
        (header(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 8, 2**30) + PAD, "don't fit"),
        (header(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 8, 1) + b"\xff" * 50, "ends inside"),
        (header(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 8, 1) + text(b"\xff") + PAD, "UTF-8"),
        (header(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 55, 1) + PAD, "type 55"),
        (header(0, 1) + text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9 + PAD,
        "depth"), (header(0, 2) + (text(b"k") + struct.pack("<IB", 0, 1)) * 2 + PAD, "comes twice"),
        (header(0, 1) + text(b"general.alignment") + struct.pack("<II", 4, 3) + PAD, "alignment"),
        (header(1) + head(dims=()) + PAD, "0 dimensions"),
        (header(1) + head(dims=(1,) * 5) + PAD, "5 dimensions"),
        (header(1) + head(dims=(2**62, 2**62)) + PAD, "ends at byte"),
        (header(1) + head(offset=2**40) + PAD, "ends at byte"),
        (header(1) + head(offset=3) + PAD, "not aligned"),
        (header(1) + head(dims=(33,), kind=3) + PAD, "no multiple of 32"),
        (header(1) + head(kind=99) + PAD, "type number 99"),
        (header(2) + head() * 2 + PAD, "comes twice"),
        (header(2) + head() + head(b"u", offset=32) + PAD, "overlaps"),
    ],
)  # fmt: skip
def test_damage_is_named(tmp_path, data, part):
    path = tmp_path / "d.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=part) as e:
        read_gguf(path)
    assert one_line(e.value, path)


def test_nested_arrays_are_read(tmp_path):
    inner = struct.pack("<IQ", 4, 2) + struct.pack("<II", 5, 6)
    data = header(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 9, 2) + inner * 2
    (tmp_path / "n.gguf").write_bytes(data)
    assert read_gguf(tmp_path / "n.gguf").metadata == {"k": [[5, 6], [5, 6]]}


def test_missing_file_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match="No such file"):
        read_gguf(tmp_path / "none.gguf")


def test_cut_anywhere_is_a_model_error(small, tmp_path):
    data = small.read_bytes()
    last = max(t.offset + t.nbytes for t in read_gguf(small).tensors.values())
    path = tmp_path / "cut.gguf"
    for n in range(last):
        path.write_bytes(data[:n])
        with pytest.raises(ModelError) as e:
            read_gguf(path)
        assert one_line(e.value, path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "llama.gguf"
    return write_gguf(path, "llama", llama_metadata(), llama_tensors())


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_garbled_headers_load_or_are_model_errors(llama, tmp_path_factory, data):
    raw = bytearray(llama.read_bytes())
    end = min(t.offset for t in read_gguf(llama).tensors.values())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, end - 1))
        raw[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("g") / "g.gguf"
    path.write_bytes(raw)
    try:
        open_checkpoint(path).weights()
    except ModelError as e:
        assert one_line(e, path)  # noqa: PT017 either outcome is right


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_garbage_after_the_magic_number_is_a_model_error(tmp_path_factory, tail):
    path = tmp_path_factory.mktemp("g") / "g.gguf"
    path.write_bytes(b"GGUF\3\0\0\0" + tail)
    with pytest.raises(ModelError):
        open_checkpoint(path)
