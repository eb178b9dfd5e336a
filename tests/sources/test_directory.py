"""Model directories in Hugging Face's layout: shards, indexes, links, and what is refused."""

import json
import os

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.errors import ModelError
from mlxserve.sources.checkpoint import open_checkpoint
from tests.sources.making import one_line, write_directory, write_gguf

A = {"model.a.weight": np.ones((2, 3), np.float16)}
B = {"model.b.weight": np.full((3,), 2, np.float32)}
ONE, TWO = "model-1-of-2.safetensors", "model-2-of-2.safetensors"
INDEX = "model.safetensors.index.json"


def refused(path, *parts):
    with pytest.raises(ModelError) as e:
        open_checkpoint(path)
    assert one_line(e.value, *parts), str(e.value)


def test_one_file(tmp_path):
    root = write_directory(tmp_path / "m", {"model.safetensors": A | B}, {"hidden_size": 3})
    checkpoint = open_checkpoint(root)
    assert checkpoint.config == {"model_type": "llama", "hidden_size": 3}
    assert checkpoint.gguf_metadata is None
    assert checkpoint.size_bytes == (root / "model.safetensors").stat().st_size
    weights = checkpoint.weights()
    assert {n: w.dtype for n, w in weights.items()} == {
        "model.a.weight": mx.float16,
        "model.b.weight": mx.float32,
    }
    assert weights["model.a.weight"].tolist() == [[1, 1, 1]] * 2


@pytest.mark.parametrize("index", [True, False])
def test_one_file_with_and_without_an_index(tmp_path, index):
    root = write_directory(tmp_path, {"model.safetensors": A}, index=index)
    assert list(open_checkpoint(root).weights()) == list(A)


def test_shards(tmp_path):
    root = write_directory(tmp_path, {ONE: A, TWO: B})
    checkpoint = open_checkpoint(root)
    assert set(checkpoint.weights()) == set(A | B)
    assert checkpoint.size_bytes == sum((root / n).stat().st_size for n in (ONE, TWO))


def test_bfloat16(tmp_path):
    root = write_directory(tmp_path, {})
    mx.save_safetensors(str(root / "model.safetensors"), {"a": mx.array([1.5], mx.bfloat16)})
    assert open_checkpoint(root).weights()["a"].dtype == mx.bfloat16


def test_missing_shard(tmp_path):
    root = write_directory(tmp_path, {ONE: A, TWO: B})
    (root / TWO).unlink()
    refused(root, TWO, "missing")


def test_cut_shard(tmp_path):
    root = write_directory(tmp_path, {ONE: A, TWO: B})
    os.truncate(root / TWO, (root / TWO).stat().st_size - 1)
    refused(root, TWO, "cut short")


def test_tensor_in_two_shards(tmp_path):
    root = write_directory(tmp_path, {ONE: A, TWO: A | B})
    names = {"model.a.weight": ONE, "model.b.weight": TWO}
    (root / INDEX).write_text(json.dumps({"weight_map": names}))
    refused(root, "model.a.weight", ONE, TWO)


def test_tensor_that_the_index_puts_elsewhere(tmp_path):
    root = write_directory(tmp_path, {ONE: A, TWO: B})
    (root / INDEX).write_text(json.dumps({"weight_map": {"model.a.weight": TWO, "x": ONE}}))
    refused(root, "model.a.weight", TWO, "not there")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}', "\xff"]
)
def test_damaged_index(tmp_path, text):
    root = write_directory(tmp_path, {ONE: A, TWO: B})
    (root / INDEX).write_text(text)
    refused(root, INDEX)


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "a\\x.safetensors", "x.bin",
     "x\n.safetensors", "x\0.safetensors", 5, None],
)  # fmt: skip
def test_shard_names_stay_inside(tmp_path, name):
    root = write_directory(tmp_path / "m", {ONE: A, TWO: B})
    write_directory(tmp_path, {"x.safetensors": A})
    (root / INDEX).write_text(json.dumps({"weight_map": {"model.a.weight": name}}))
    refused(root, INDEX)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_links_out_of_the_directory_are_refused(tmp_path, name):
    root = write_directory(tmp_path / "m", {"model.safetensors": A})
    (root / name).rename(tmp_path / name)
    (root / name).symlink_to(tmp_path / name)
    refused(root, name, "leads out")


def test_links_inside_the_directory_work(tmp_path):
    root = write_directory(tmp_path / "m", {"model.safetensors": A})
    (root / "model.safetensors").rename(root / "other")
    (root / "model.safetensors").symlink_to("other")
    assert list(open_checkpoint(root).weights()) == list(A)


@pytest.mark.parametrize("target", ["nowhere", "model.safetensors"])
def test_links_to_nothing_and_to_themselves(tmp_path, target):
    root = write_directory(tmp_path, {"model.safetensors": A}, index=True)
    (root / "model.safetensors").unlink()
    (root / "model.safetensors").symlink_to(target)
    refused(root, "model.safetensors", "missing")


def test_hub_cache(tmp_path):
    snapshot = write_directory(tmp_path / "repo/snapshots/abc", {ONE: A, TWO: B})
    blobs = tmp_path / "repo/blobs"
    blobs.mkdir()
    for i, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / f"hash{i}")
        file.symlink_to(f"../../blobs/hash{i}")
    assert set(open_checkpoint(snapshot).weights()) == set(A | B)
    (tmp_path / "link").symlink_to(snapshot)
    assert set(open_checkpoint(tmp_path / "link").weights()) == set(A | B)


def test_pipes_are_not_opened(tmp_path):
    root = write_directory(tmp_path, {})
    os.mkfifo(root / "model.safetensors")
    refused(root, "not a regular file")
    refused(root / "model.safetensors", "neither a file nor a directory")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused(tmp_path, name):
    root = write_directory(tmp_path, {})
    (root / name).write_bytes(b"\x80\x04.")
    refused(root, name, "no pickle is ever opened", "safetensors")
    refused(root / name, name, "no pickle is ever opened")


def test_pickles_beside_safetensors_are_left_alone(tmp_path):
    root = write_directory(tmp_path, {"model.safetensors": A})
    (root / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert list(open_checkpoint(root).weights()) == list(A)


def test_nothing_to_open(tmp_path):
    refused(tmp_path / "none", "no such file or directory")
    refused(tmp_path, "empty")
    (tmp_path / "adapter.safetensors").write_bytes(b"")
    refused(tmp_path, "no config.json")
    refused(tmp_path / "adapter.safetensors", "not a GGUF file", "directory")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    refused(tmp_path, "adapter.safetensors", "no model.safetensors")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_type": 3}', "{" * 50000, "\udcff"])
def test_damaged_config(tmp_path, text):
    root = write_directory(tmp_path, {"model.safetensors": A})
    (root / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    refused(root, "config.json")


def test_a_file_that_shrinks_after_opening(tmp_path):
    root = write_directory(tmp_path, {"model.safetensors": A | B})
    checkpoint = open_checkpoint(root)
    os.truncate(root / "model.safetensors", 20)
    with pytest.raises(ModelError) as e:
        checkpoint.weights()
    assert one_line(e.value, "model.safetensors")


def test_gguf_by_content_or_name(tmp_path):
    path = write_gguf(tmp_path / "model.dat", "mamba")
    refused(path, "mamba")
    (tmp_path / "m.gguf").write_bytes(b"not one")
    refused(tmp_path / "m.gguf", "GGUF")
