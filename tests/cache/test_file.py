"""The prompt-cache file: exact, whole or not there, and damage is found and named."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
import zlib
from dataclasses import replace

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.cache import file
from mlxserve.cache.file_header import Form, Group, Header, layout
from mlxserve.errors import CapacityError, DamagedError, ModelError, RequestError
from tests.cache.saved import FINGERPRINT, forms, random_tensors, small, small_tensors

WORDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint32": "U32", "int32": "I32"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.safetensors"


@pytest.fixture
def saved(path):
    """A small file of 7 tokens, read."""
    file.write(path, small(), small_tensors(small()))
    return file.read(path)


def flip(path, byte: int, bit: int = 0) -> None:
    with path.open("r+b") as f:
        f.seek(byte)
        [old] = f.read(1)
        f.seek(byte)
        f.write(bytes([old ^ 1 << bit]))


def tensors_by_safetensors(data: bytes) -> dict[str, dict]:
    return dict(safetensors.deserialize(data))


def data_starts(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


# Round trips


@st.composite
def headers(draw) -> Header:
    tokens, page_tokens = draw(st.integers(1, 300)), draw(st.sampled_from([1, 3, 64]))
    count = -(-tokens // page_tokens)
    dtype = st.sampled_from(["float32", "float16", "bfloat16"])
    small = st.integers(1, 3)
    groups: list[Group] = []
    layer = 0
    for kind in draw(st.lists(st.sampled_from(["full", "latent", "packed", "state"]), max_size=4)):
        layers = tuple(range(layer, layer := layer + draw(small)))
        heads, dim = draw(small), draw(st.integers(1, 5))
        pages = tuple(sorted(draw(st.sets(st.integers(0, count - 1), min_size=1))))
        page = Form(draw(dtype), (heads, page_tokens, dim))
        match kind:
            case "full":
                groups.append(Group(layers, pages, {"k": page, "v": page}))
            case "latent":
                groups.append(Group(layers, pages, {"k": page}))
            case "packed":
                per_group = Form("float16", (heads, page_tokens, 1))
                parts = {
                    "k.codes": Form("uint32", (heads, dim, 2)),
                    "k.scales": Form("float16", (heads, dim)),
                    "k.biases": Form("float16", (heads, dim)),
                    "v.codes": Form("uint32", (heads, page_tokens, 4)),
                    "v.scales": per_group,
                    "v.biases": per_group,
                }
                if pages[:-1]:
                    groups.append(Group(layers, pages[:-1], parts))
                groups.append(Group(layers, pages[-1:], {"k": page, "v": page}))
            case "state":
                shapes = draw(st.lists(st.lists(small, max_size=4), min_size=1, max_size=3))
                forms = [Form(draw(dtype), tuple(shape)) for shape in shapes]
                states = {f"state.{j}": form for j, form in enumerate(forms)}
                groups.append(Group(layers, None, states))
    texts = st.text(max_size=10)
    return Header(draw(st.dictionaries(texts, texts)), tokens, page_tokens, tuple(groups))


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(header=headers(), seed=st.integers(0, 9))
def test_what_was_written_is_read_bit_by_bit_and_safetensors_agrees(tmp_path_factory, header, seed):
    path = tmp_path_factory.mktemp("round") / "c.safetensors"
    tensors = random_tensors(header, seed)
    file.write(path, header, tensors.__getitem__)
    saved = file.read(path)
    assert saved.header == header
    assert list(saved.header.fingerprint) == list(header.fingerprint)
    assert file.damage(saved) == []
    assert saved.tokens.tolist() == tensors["tokens"].tolist()
    oracle = tensors_by_safetensors(path.read_bytes())
    assert oracle.keys() == {"checksums", *tensors}
    for name, form in [("tokens", Form("int32", (header.tokens,))), *forms(header)]:
        read, wrote = saved.tensor(name), tensors[name]
        assert (read.dtype, read.shape) == (wrote.dtype, wrote.shape)
        assert read.tobytes() == wrote.tobytes() == bytes(oracle[name]["data"])
        assert (oracle[name]["dtype"], oracle[name]["shape"]) == (
            WORDS[form.dtype],
            list(form.shape),
        )
        assert read.flags.aligned
        assert not read.flags.writeable


def test_written_again_from_the_read_it_is_the_same_file(saved, path, tmp_path):
    file.write(tmp_path / "copy", saved.header, saved.tensor)
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()
    file.write(path, saved.header, saved.tensor)  # over what it is read from
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()


def test_a_read_file_stays_as_it_was_when_another_takes_its_place(saved, path):
    before = saved.tensor("layers.0.k").copy()
    file.write(path, small(9), small_tensors(small(9), seed=1))
    assert np.array_equal(saved.tensor("layers.0.k").view(np.uint8), before.view(np.uint8))
    assert file.damage(saved) == []


def test_one_tensor_is_held_at_a_time(path):
    header, held = small(), []

    def tensors(name):
        assert all(array() is None for array in held)
        array = random_tensors(header)[name].copy()
        held.append(weakref.ref(array))
        return array

    file.write(path, header, tensors)
    assert len(held) == len(layout(header).entries) - 1


# Damage


def piece_at(header: Header, data: bytes, byte: int) -> str:
    """What a byte after the checksums is of, by safetensors' own view of the file."""
    listed = json.loads(data[8 : data_starts(data)])
    for name, (begin, end) in ((n, v["data_offsets"]) for n, v in listed.items() if "shape" in v):
        at = byte - data_starts(data) - begin
        if not 0 <= at < end - begin:
            continue
        if name in ("checksums", "tokens"):
            return name
        _, layer, part = name.split(".", 2)
        group = next(g for g in header.groups if int(layer) in g.layers)
        if group.pages is None:
            return f"{part.replace('.', ' ')} of layer {layer}"
        page = group.pages[at * len(group.pages) // (end - begin)]
        last = min(2 * page + 1, header.tokens - 1)
        layers = "layers 0, 3" if group.layers == (0, 3) else "layer 1"
        return f"page {page} (tokens {2 * page} to {last}) of {layers}"
    raise AssertionError(byte)


@pytest.mark.full  # a thousand files
def test_every_flipped_bit_after_the_header_is_found_and_named(path):
    header = small()
    file.write(path, header, small_tensors(header))
    data = path.read_bytes()
    for byte in range(data_starts(data), len(data)):
        piece = piece_at(header, data, byte)
        for bit in range(8):
            flip(path, byte, bit)
            if byte < data_starts(data) + 4:  # the header's own checksum
                with pytest.raises(DamagedError, match="its header isn't as it was written"):
                    file.read(path)
            elif piece in ("checksums", "tokens"):
                with pytest.raises(DamagedError, match=f"its {piece} aren't as they were written"):
                    file.read(path)
            else:
                assert file.damage(file.read(path)) == [piece]
            flip(path, byte, bit)
    assert path.read_bytes() == data


@pytest.mark.full
def test_every_flipped_bit_of_the_header_is_found(saved, path):
    for byte in range(data_starts(path.read_bytes())):
        for bit in range(8):
            flip(path, byte, bit)
            with pytest.raises(ModelError, match=r"cache\.safetensors: .*mlxserve cache build"):
                file.read(path)
            flip(path, byte, bit)
    assert file.read(path).header == saved.header


@pytest.mark.full
def test_every_shorter_file_is_refused_and_a_longer_one_too(path):
    file.write(path, small(), small_tensors(small()))
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(ModelError, match="mlxserve cache build"):
            file.read(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(
        DamagedError, match=f"has {len(data) + 1} bytes and should have {len(data)}"
    ):
        file.read(path)


def test_verify_names_the_first_and_counts_the_others(path):
    page = Form("float32", (1, 64, 2))
    header = Header(FINGERPRINT, 1200, 64, (Group((0, 1), tuple(range(19)), {"k": page}),))
    file.write(path, header, small_tensors(header))
    file.verify(file.read(path))
    for place in (17, 18):
        flip(path, layout(header).entries["layers.1.k"].offset + place * page.nbytes)
    with pytest.raises(DamagedError) as found:
        file.verify(file.read(path))
    assert str(found.value) == (
        f"{path}: page 17 (tokens 1,088 to 1,151) of layers 0 to 1 isn't as it was written, and 1 "
        "more; the file is damaged or cut short, build it again with `mlxserve cache build`"
    )


def test_pages_that_changed_places_are_found(saved, path):
    entry = saved.layout.entries["layers.0.k"]
    data = bytearray(path.read_bytes())
    a, b = entry.offset, entry.offset + 8
    data[a:b], data[b : b + 8] = data[b : b + 8], data[a:b]
    path.write_bytes(data)
    assert [name[:6] for name in file.damage(file.read(path))] == ["page 0", "page 1"]


# Headers that somebody made up, with a checksum that fits


def write_made_up(path, listed, size: int = 400) -> None:
    text = (listed if isinstance(listed, str) else json.dumps(listed)).encode()
    prefix = len(text).to_bytes(8, "little") + text
    path.write_bytes(prefix + zlib.crc32(prefix).to_bytes(4, "little") + bytes(size))


def header_of(path) -> dict:
    data = path.read_bytes()
    return json.loads(data[8 : data_starts(data)])


def made_up(path, change) -> None:
    """Write the file again with its contents changed."""
    listed = header_of(path)
    contents = json.loads(listed["__metadata__"]["contents"])
    change(contents)
    listed["__metadata__"]["contents"] = json.dumps(contents)
    write_made_up(path, listed)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(tokens=2**31),
        lambda c: c.update(tokens=10**30),
        lambda c: c.update(tokens=True),
        lambda c: c.update(tokens=7.0),
        lambda c: c.update(tokens=-7),
        lambda c: c.update(page_tokens=0),
        lambda c: c.update(page_tokens=1),
        lambda c: c.update(fingerprint={"model": 1}),
        lambda c: c.update(fingerprint=[]),
        lambda c: c.update(groups={}),
        lambda c: c.update(groups=c["groups"] * 2),
        lambda c: c.update(more=1),
        lambda c: c["groups"][0].update(layers=list(range(100_000))),
        lambda c: c["groups"][0].update(layers=[0, 0]),
        lambda c: c["groups"][0].update(layers=["0", "3"]),
        lambda c: c["groups"][0].update(layers=[]),
        lambda c: c["groups"][0].update(pages=[0, 1, 2, 2**30]),
        lambda c: c["groups"][0].update(pages=[3, 2, 1, 0]),
        lambda c: c["groups"][0].update(pages=[0, 1, 2, [3]]),
        lambda c: c["groups"][0].update(pages=None),
        lambda c: c["groups"][0]["parts"].update(k=["float32", [2**30, 2, 2**30]]),
        lambda c: c["groups"][0]["parts"].update(k=["float64", [1, 2, 1]]),
        lambda c: c["groups"][0]["parts"].update(k=["float32", [[], {}, None]]),
        lambda c: c["groups"][0]["parts"].update(k=3),
        lambda c: c["groups"][2]["parts"].update({"state.0": ["float32", [1] * 9]}),
    ],
)
def test_contents_that_cannot_be_are_refused(saved, path, change):
    made_up(path, change)
    with pytest.raises(DamagedError, match="its header can't be right"):
        file.read(path)


def test_headers_that_cannot_be_are_refused(saved, path):
    good = header_of(path)
    metadata = {"__metadata__": good["__metadata__"]}
    moved = good | {"tokens": {"dtype": "I32", "shape": [7], "data_offsets": [0, 28]}}
    deep = '{"__metadata__":{"format":"mlxserve-prompt-cache"},"x":' + "[" * 100_000
    bare = {"__metadata__": {"format": "mlxserve-prompt-cache"}}
    no_text = {"__metadata__": good["__metadata__"] | {"contents": 7}}
    for listed in (metadata, moved, deep, bare, no_text, [good], "mlxserve-prompt-cache"):
        write_made_up(path, listed)
        with pytest.raises(DamagedError, match="its header can't be right"):
            file.read(path)
    path.write_bytes((2**63).to_bytes(8, "little") + b"mlxserve-prompt-cache")
    with pytest.raises(DamagedError, match=f"a header of {2**63} bytes can't be in 29 bytes"):
        file.read(path)


def test_another_version_is_refused_by_name(saved, path):
    listed = header_of(path)
    listed["__metadata__"]["version"] = "2"
    write_made_up(path, listed)
    with pytest.raises(ModelError, match="it has version '2', this reads 1; build it again"):
        file.read(path)


def test_what_is_no_cache_is_refused(tmp_path):
    import safetensors.numpy

    other = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"x": np.zeros(3)}, other)
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    for name, words in (
        ("model.safetensors", "it is not a prompt cache"),
        ("empty", "it is not a prompt cache"),
        ("pipe", "it is not a regular file"),
        ("", "it is not a regular file"),
        ("missing", "No such file or directory; check the path"),
        ("x" * 300, "File name too long; check the path"),
    ):
        with pytest.raises(ModelError, match=words):
            file.read(tmp_path / name)


# Writing


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": 0}, "tokens is 0, expected 1 or more"),
        ({"tokens": 5}, "page 3 lies after the 5 tokens"),
        ({"fingerprint": {"kv_bits": 8}}, "fingerprint has 'kv_bits': 8, expected texts"),
        ({"groups": (Group((1, 0), (0,), {}),)}, "layers are .*, expected them ascending"),
        ({"groups": (Group((0,), (), {}),)}, "pages are .*, expected one or more"),
        ({"groups": (Group((0,), (0,), {}),)}, "a page has parts {}, expected k and v"),
        ({"groups": (Group((0,), (0,), {"v": Form("float32", (1, 2, 1))}),)}, "expected k and v"),
        ({"groups": (Group((0,), (0,), {"k": Form("float32", (1, 3, 1))}),)}, "don't fit together"),
        ({"groups": (Group((0,), (0,), {"k": Form("int8", (1, 2, 1))}),)}, "dtype is 'int8'"),
        ({"groups": (Group((0,), None, {"state.1": Form("int32", ())}),)}, "expected state.0"),
        ({"groups": (small().groups[1],) * 2}, "layer 1 has k in two groups"),
    ],
)
def test_a_header_that_cannot_be_is_not_written(path, change, words):
    with pytest.raises(ValueError, match=words):
        file.write(path, replace(small(), **change), {}.__getitem__)
    assert list(path.parent.iterdir()) == []


def test_packed_parts_must_fit_together():
    parts = {
        "k.codes": Form("uint32", (2, 5, 4)),
        "k.scales": Form("float16", (2, 5)),
        "k.biases": Form("float16", (2, 5)),
        "v": Form("float16", (2, 2, 5)),
    }
    header = replace(small(), groups=(Group((0,), (0,), parts),))
    layout(header)
    for name, form in (
        ("k.codes", Form("int32", (2, 5, 4))),
        ("k.codes", Form("uint32", (2, 6, 4))),
        ("k.scales", Form("float32", (2, 5))),
        ("k.biases", Form("float16", (2, 4))),
        ("v", Form("float16", (1, 2, 5))),
    ):
        wrong = replace(header, groups=(Group((0,), (0,), parts | {name: form}),))
        with pytest.raises(ValueError, match="a page has parts"):
            layout(wrong)
    with pytest.raises(ValueError, match="page 3 isn't full, so it can't be packed"):
        layout(replace(header, groups=(Group((0,), (0, 3), parts),)))
    del parts["k.biases"]
    with pytest.raises(ValueError, match="a page has parts"):
        layout(header)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("layers.0.v", lambda x: x.astype(np.float64), "layers.0.v is float64 .*expected float32"),
        ("layers.1.k", lambda x: x[1:], r"layers.1.k is uint16 \(2, 2, 2, 1\), expected uint16"),
        ("layers.3.k", lambda x: np.ones_like(x), "layers.3.k has numbers other than 0 after"),
    ],
)
def test_tensors_that_are_not_the_headers_are_not_written(saved, path, name, change, words):
    before = path.read_bytes()
    tensors = random_tensors(small())
    tensors[name] = change(tensors[name])
    with pytest.raises(ValueError, match=words):
        file.write(path, small(), tensors.__getitem__)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_strided_arrays_are_written_as_they_read(path):
    tensors = random_tensors(small())
    strided = {name: np.stack([x, x], -1)[..., 0] for name, x in tensors.items()}
    assert not strided["layers.1.k"].flags.c_contiguous
    file.write(path, small(), strided.__getitem__)
    for name in tensors:
        assert file.read(path).tensor(name).tobytes() == tensors[name].tobytes()


def test_places_where_no_file_can_be(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    text = tmp_path / "prompt.txt"
    text.write_text("Once upon a time")
    for path, words in (
        (tmp_path, "is a directory; give the name of a file"),
        (tmp_path / "no" / "c", "there is no directory"),
        (tmp_path / ("x" * 300), "it can't be written"),
        (tmp_path / "pipe", "is there and no prompt cache"),
        (tmp_path / "prompt.txt", "is there and no prompt cache; remove it or give another name"),
    ):
        with pytest.raises(RequestError, match=words):
            file.write(path, small(), small_tensors(small()))
    assert text.read_text() == "Once upon a time"
    assert len(list(tmp_path.iterdir())) == 2


def test_an_empty_or_damaged_file_may_be_replaced(path):
    path.touch()
    file.write(path, small(), small_tensors(small()))
    path.write_bytes(path.read_bytes()[:200])
    file.write(path, small(), small_tensors(small()))
    file.verify(file.read(path))


def test_a_full_disk_leaves_the_old_file_and_nothing_else(saved, path):
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    header = small(400)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CapacityError, match=r"cache\.safetensors: it takes \d.* make room"):
            file.write(path, header, small_tensors(header))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


KILLED = """
import sys, time
from pathlib import Path
from mlxserve.cache import file
from tests.cache.saved import random_tensors, small
header = small(400)
tensors = random_tensors(header)
def tensor(name):
    if name == sys.argv[2]:
        print("here", flush=True)
        time.sleep(60)
    return tensors[name]
file.write(Path(sys.argv[1]), header, tensor)
"""


@pytest.mark.full
@pytest.mark.parametrize("name", ["tokens", "layers.3.v", "layers.2.state.0"])
def test_a_killed_writer_leaves_the_old_file(saved, path, name):
    before = path.read_bytes()
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path), name], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    with writer.stdout:
        assert writer.stdout.readline() == "here\n"
        writer.send_signal(signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL
    assert path.read_bytes() == before
    file.verify(file.read(path))


def test_of_many_writers_at_once_one_whole_file_remains(path):
    made = [small(n) for n in (7, 40, 300)]
    file.write(path, made[0], small_tensors(made[0]))
    writers = [
        threading.Thread(
            target=lambda h=header: [file.write(path, h, small_tensors(h)) for _ in range(8)]
        )
        for header in made
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        seen = file.read(path)
        assert file.damage(seen) == []
        assert seen.header in made
    for writer in writers:
        writer.join()
    assert list(path.parent.iterdir()) == [path]


# Comparing


def test_a_fingerprint_that_differs_is_named(saved, path):
    file.check_fingerprint(saved, dict(FINGERPRINT))
    other = {"model": "large", "dtype": "float32", "adapter": "x"}
    with pytest.raises(RequestError) as found:
        file.check_fingerprint(saved, other)
    assert str(found.value) == (
        f"{path}: it was made with model 'tiny', not 'large'; kv_bits '0', not unknown; "
        "adapter unknown, not 'x'; build it again with `mlxserve cache build`"
    )


def test_diff(saved, tmp_path):
    assert file.diff(saved, saved) == []
    b = tmp_path / "b"
    header = small(12, FINGERPRINT | {"model": "large"})
    tensors = random_tensors(header)
    tensors["tokens"][:7] = saved.tokens
    tensors["tokens"][5] += 1
    for name in ("layers.0.k", "layers.0.v", "layers.3.k", "layers.3.v"):
        tensors[name][:4] = saved.tensor(name)
    tensors["layers.0.v"][1] += 1
    tensors["layers.2.state.1"] = saved.tensor("layers.2.state.1")
    file.write(b, header, tensors.__getitem__)
    size = f"{saved.path.stat().st_size:,} and {b.stat().st_size:,}"
    assert file.diff(saved, file.read(b)) == [
        "model: 'tiny' and 'large'",
        "tokens: 7 and 12, the first 5 are the same",
        f"layers 0, 3, k v: pages 4 to 5 only in {b}",
        "layers 0, 3, k v: pages 1 differ, 3 are the same",
        f"layer 1, k v: pages 2 to 3 only in {saved.path}",
        f"layer 1, k v: pages 4 to 5 only in {b}",
        "layer 1, k v: pages 0 differ, 0 are the same",
        "layer 2, state.0 state.1: states 0 differ, 1 are the same",
        f"bytes: {size}",
    ]


def test_diff_of_other_forms(saved, tmp_path):
    half = Form("float16", (1, 2, 1))
    groups = (Group((0, 3), (0, 1, 2, 3), {"k": half, "v": half}), saved.header.groups[2])
    header = replace(saved.header, groups=groups)
    file.write(tmp_path / "b", header, random_tensors(header).__getitem__)
    lines = file.diff(file.read(tmp_path / "b"), saved)
    one, other = ["float16 [1, 2, 1]"] * 2, ["float32 [1, 2, 1]"] * 2
    assert f"layers 0, 3, k v: {', '.join(one)} and {', '.join(other)}" in lines
    assert f"layer 1, k v: only in {saved.path}" in lines
