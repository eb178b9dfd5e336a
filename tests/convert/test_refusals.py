"""Refused by name, before anything is written."""

import json
import os
import shutil

import mlx.core as mx
import pytest

from mlxserve.errors import MlxserveError, ModelError, RequestError
from tests.convert.sources import convert, tiny, write


def refused(error, *words):
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert str(word) in text, text


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "src")


@pytest.fixture
def nothing_left(tmp_path):
    """Whatever is refused leaves no file behind."""
    yield
    assert {path.name for path in tmp_path.iterdir()} <= {"src", "packed", "taken"}


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bits": 7}, ["bits is 7", "2, 3, 4, 5, 6, 8"]),
        ({"bits": True}, ["bits is True"]),
        ({"bits": 4, "group_size": 16}, ["group_size is 16", "32, 64, 128"]),
        ({"mode": "mxfp4", "bits": 8}, ["bits is 8", "mxfp4 takes 4"]),
        ({"mode": "nvfp4", "group_size": 32}, ["group_size is 32", "nvfp4 takes 16"]),
        ({"mode": "int4"}, ["mode is 'int4'", "affine, mxfp4, mxfp8, nvfp4"]),
        ({"bits": 4, "dtype": "fp16"}, ["dtype is 'fp16'", "float16, bfloat16, float32"]),
        ({"bits": 4, "dequantize": True}, ["dequantize is set", "isn't quantised"]),
    ],
    ids=str,
)
def test_options(source, tmp_path, options, words):
    with pytest.raises(RequestError) as error:
        convert(source, tmp_path / "out", **options)
    refused(error, *words)


@pytest.mark.usefixtures("nothing_left")
def test_groups_that_don_t_divide(tmp_path):
    odd = write(tmp_path / "src", tiny(intermediate_size=160))
    with pytest.raises(RequestError) as error:
        convert(odd, tmp_path / "out", bits=4)
    refused(error, "model.layers.0.mlp.down_proj", "160", "groups of 64", "groups of 32 would do")


@pytest.mark.usefixtures("nothing_left")
def test_a_source_that_is_quantised_already(source, tmp_path):
    packed = convert(source, tmp_path / "packed", bits=4).path
    for options in ({"bits": 4}, {}):
        with pytest.raises(RequestError) as error:
            convert(packed, tmp_path / "out", **options)
        refused(error, packed, "affine of 4 bits", "dequantize")


@pytest.mark.usefixtures("nothing_left")
def test_another_tool_s_quantisation(source, tmp_path):
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as error:
        convert(source, tmp_path / "out", bits=4)
    refused(error, "gptq")


@pytest.mark.usefixtures("nothing_left")
def test_tensors_that_don_t_fit_the_config(tmp_path):
    model = tiny()
    model.weights.pop("model.layers.1.mlp.up_proj.weight")
    model.weights["model.layers.0.extra.weight"] = mx.zeros((2, 2))
    model.weights["model.norm.weight"] = mx.zeros(7)
    source = write(tmp_path / "src", model)
    with pytest.raises(ModelError) as error:
        convert(source, tmp_path / "out", bits=4)
    refused(error, "missing model.layers.1.mlp.up_proj.weight", "model.layers.0.extra.weight")
    refused(error, "model.norm.weight is [7], expected [128]")


@pytest.mark.usefixtures("nothing_left")
def test_a_head_that_isn_t_tied_though_the_config_says_so(tmp_path):
    model = tiny(tie_word_embeddings=True)
    head = model.weights["model.embed_tokens.weight"] * 2
    source = write(
        tmp_path / "src", model._replace(weights={**model.weights, "lm_head.weight": head})
    )
    with pytest.raises(ModelError) as error:
        convert(source, tmp_path / "out", bits=4)
    refused(error, "tie_word_embeddings", "lm_head.weight")


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("how", ["cut", "header", "gone"])
def test_a_damaged_shard(source, tmp_path, how):
    shard = source / "model.safetensors"
    data = shard.read_bytes()
    if how == "gone":
        shard.unlink()
    else:
        shard.write_bytes(data[:-100] if how == "cut" else data[:9] + b"#" + data[10:])
    with pytest.raises(ModelError) as error:
        convert(source, tmp_path / "out", bits=4)
    refused(error, source)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_numbers_that_aren_t_finite(tmp_path, value, dtype):
    model = tiny(dtype=dtype)
    w = model.weights["model.layers.1.mlp.up_proj.weight"]
    w[200, 100] = value
    source = write(tmp_path / "src", model)
    with pytest.raises(ModelError) as error:
        convert(source, tmp_path / "out", bits=4)
    refused(error, "model.layers.1.mlp.up_proj.weight", "NaN or infinite")


@pytest.mark.usefixtures("nothing_left")
def test_numbers_that_another_dtype_can_t_hold(tmp_path):
    model = tiny()
    w = model.weights["model.norm.weight"]
    w[3] = 1e6
    with pytest.raises(ModelError) as error:
        convert(write(tmp_path / "src", model), tmp_path / "out", bits=4, dtype="float16")
    refused(error, "model.norm.weight", "too large for float16", "bfloat16")


@pytest.mark.usefixtures("nothing_left")
def test_a_model_that_isn_t_supported(source, tmp_path):
    config = json.loads((source / "config.json").read_text()) | {"model_type": "llamo"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as error:
        convert(source, tmp_path / "out", bits=4)
    refused(error, "llamo", "did you mean llama")


@pytest.mark.usefixtures("nothing_left")
def test_targets(source, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    for target, words in (
        (tmp_path / "taken", ["exists already"]),
        (tmp_path / "taken" / "file", ["exists already"]),
        (source, ["exists already"]),
        (source / "out", ["inside the source"]),
        (source / "deeper" / "out", ["inside the source"]),
        (tmp_path / "taken" / "file" / "out", ["can't be written to"]),
        ("x" * 300, ["too long"]),
    ):
        with pytest.raises(RequestError) as error:
            convert(source, target, bits=4)
        refused(error, *words)
    assert (tmp_path / "taken" / "file").read_text() == "mine"


@pytest.mark.usefixtures("nothing_left")
def test_sources_that_aren_t_models(tmp_path):
    for name, content in (("text.txt", b"hello"), ("broken.gguf", b"hello"), ("x.bin", b"PK")):
        (tmp_path / "taken").mkdir(exist_ok=True)
        path = tmp_path / "taken" / name
        path.write_bytes(content)
        with pytest.raises(ModelError) as error:
            convert(path, tmp_path / "out", bits=4)
        refused(error, name)
    with pytest.raises(MlxserveError) as error:
        convert("./nowhere", tmp_path / "out", bits=4)
    refused(error, "nowhere")


@pytest.mark.usefixtures("nothing_left")
def test_a_disk_without_room(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=200_000))
    with pytest.raises(ModelError) as error:
        convert(source, tmp_path / "out", bits=4)
    refused(error, "no room", "200.0 kB free", "it takes")


def test_a_directory_that_can_t_be_written_to(source, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("only on accounts that permissions bind")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    with pytest.raises(RequestError) as error:
        convert(source, locked / "out", bits=4)
    refused(error, "can't be written to")
