"""MLX's quantised layout: every mode that MLX has, and what doesn't fit is refused by name."""

import json

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.errors import ModelError
from mlxserve.kernels.quantized import PackedWeight, dequantize
from mlxserve.sources.checkpoint import open_checkpoint
from tests.sources.making import one_line

X = "model.layers.0.mlp.down_proj"
AFFINE = {"group_size": 64, "bits": 4}


def quantise(name, how, *, dtype=mx.float32, shape=(32, 256), seed=0):
    """Tensors of a quantised layer as MLX writes them, and the matrix that they stand for."""
    w = mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
    parts = mx.quantize(w, **how)
    keys = ("weight", "scales", "biases")
    tensors = {f"{name}.{k}": p for k, p in zip(keys, parts, strict=False)}
    return tensors, mx.dequantize(*parts, **how, dtype=mx.float32)


def write(root, tensors, quantization=None, **config):
    root.mkdir(exist_ok=True)
    if quantization is not None:
        config |= {"quantization": quantization}
    (root / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    mx.save_safetensors(str(root / "model.safetensors"), tensors)
    return root


def refused(path, *parts):
    with pytest.raises(ModelError) as e:
        open_checkpoint(path)
    assert one_line(e.value, *parts), str(e.value)


MODES = [{"group_size": g, "bits": b} for b in (2, 3, 4, 5, 6, 8) for g in (32, 64, 128)] + [
    {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    {"group_size": 16, "bits": 4, "mode": "nvfp4"},
]


@pytest.mark.parametrize("how", MODES, ids=str)
def test_every_mode(tmp_path, how):
    tensors, want = quantise(X, how)
    tensors["model.norm.weight"] = mx.ones(4)
    checkpoint = open_checkpoint(write(tmp_path, tensors, how))
    assert checkpoint.config == {"model_type": "llama"}
    weights = checkpoint.weights()
    assert set(weights) == {f"{X}.weight", "model.norm.weight"}
    packed = weights[f"{X}.weight"]
    assert isinstance(packed, PackedWeight)
    assert packed.shape == (32, 256)
    np.testing.assert_array_equal(np.array(dequantize(packed, mx.float32)), np.array(want))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_scales_keep_their_dtype(tmp_path, dtype):
    tensors, _ = quantise(X, AFFINE, dtype=dtype)
    packed = open_checkpoint(write(tmp_path, tensors, AFFINE)).weights()[f"{X}.weight"]
    assert packed.scales.dtype == packed.biases.dtype == dtype


def test_layers_of_their_own(tmp_path):
    """Overrides, layers left alone by name and silently, and the copy that mlx-lm writes."""
    own = {"group_size": 32, "bits": 8}
    tensors = quantise("a", AFFINE)[0] | quantise("b", own)[0]
    tensors |= {"c.weight": mx.ones((2, 64)), "d.weight": mx.ones((2, 64))}
    quantization = AFFINE | {"b": own, "c": False, "a": True}
    root = write(tmp_path, tensors, quantization, quantization_config=quantization)
    weights = open_checkpoint(root).weights()
    assert (weights["a.weight"].bits, weights["a.weight"].group_size) == (4, 64)
    assert (weights["b.weight"].bits, weights["b.weight"].group_size) == (8, 32)
    assert weights["c.weight"].shape == weights["d.weight"].shape == (2, 64)


def test_modes_have_defaults(tmp_path):
    tensors, _ = quantise(X, {"mode": "nvfp4"})
    packed = open_checkpoint(write(tmp_path, tensors, {"mode": "nvfp4"})).weights()[f"{X}.weight"]
    assert (packed.bits, packed.group_size, packed.biases) == (4, 16, None)


def test_the_copy_alone_is_enough(tmp_path):
    tensors, _ = quantise(X, AFFINE)
    root = write(tmp_path, tensors, quantization_config=AFFINE)
    assert isinstance(open_checkpoint(root).weights()[f"{X}.weight"], PackedWeight)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors"])
def test_other_tools_are_refused_by_name(tmp_path, method):
    config = {"quantization_config": {"quant_method": method, "bits": 4, "group_size": 128}}
    refused(write(tmp_path, {"a.weight": mx.ones((2, 2))}, **config), method, "config.json")


def test_settings_that_contradict_each_other(tmp_path):
    tensors, _ = quantise(X, AFFINE)
    root = write(tmp_path, tensors, AFFINE, quantization_config=AFFINE | {"bits": 8})
    refused(root, "quantization_config")


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (AFFINE | {"bits": 7}, "bits 7"),
        (AFFINE | {"bits": True}, "bits True"),
        (AFFINE | {"group_size": 48}, "group_size 48"),
        (AFFINE | {"group_size": "64"}, "group_size '64'"),
        (AFFINE | {"mode": "ternary"}, "'ternary'"),
        (AFFINE | {"mode": ["affine"]}, "mode"),
        (AFFINE | {"mode": "mxfp4"}, "group_size 64"),
        (AFFINE | {X: {"bits": 9}}, X),
        (AFFINE | {X: "yes"}, "'yes'"),
        (AFFINE | {X: False}, "no quantization entry"),
        ({}, "quantization"),
        ("4bit", "4bit"),
        (AFFINE | {"group_size": 32}, "scales"),
        (AFFINE | {"bits": 8}, "scales"),
        (AFFINE | {"bits": 3}, "3 bits"),
    ],
)
def test_settings_that_cannot_be(tmp_path, settings, part):
    refused(write(tmp_path, quantise(X, AFFINE)[0], settings), str(tmp_path), part)


def test_quantised_weights_without_settings(tmp_path):
    tensors, _ = quantise(X, AFFINE)
    refused(write(tmp_path, tensors), f"{X}.scales")


@pytest.mark.parametrize("part", ["weight", "scales", "biases"])
def test_missing_parts(tmp_path, part):
    tensors, _ = quantise(X, AFFINE)
    del tensors[f"{X}.{part}"]
    refused(write(tmp_path, tensors, AFFINE), f"{X}.{part}", "missing")


def test_a_layer_that_should_be_quantised_and_is_not(tmp_path):
    root = write(tmp_path, {f"{X}.weight": mx.ones((2, 64))}, AFFINE | {X: AFFINE})
    refused(root, f"{X}.scales", "missing")


def test_parts_that_do_not_fit(tmp_path):
    good, _ = quantise(X, AFFINE)
    scales, biases = good[f"{X}.scales"], good[f"{X}.biases"]
    for change in (
        {f"{X}.scales": scales[:-1]},
        {f"{X}.biases": biases[:, :-1]},
        {f"{X}.scales": scales.astype(mx.int32)},
        {f"{X}.biases": biases.astype(mx.float16)},
        {f"{X}.weight": good[f"{X}.weight"].astype(mx.int32)},
        {f"{X}.weight": good[f"{X}.weight"][:, :-1]},
        {f"{X}.weight": good[f"{X}.weight"][None]},
        {f"{X}.weight": mx.zeros((0, 32), mx.uint32)},
    ):
        refused(write(tmp_path, good | change, AFFINE), X)


def test_biases_in_a_mode_without(tmp_path):
    how = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    tensors, _ = quantise(X, how)
    tensors[f"{X}.biases"] = mx.zeros((32, 8))
    refused(write(tmp_path, tensors, how), f"{X}.biases", "mxfp4")


@pytest.mark.parametrize(
    ("extra", "part"),
    [
        ({"model.layers.0.mlp.downproj": {"group_size": 32, "bits": 8}}, "downproj"),
        ({"gone": False}, "'gone'"),
        ({"quant_method": "other"}, "'quant_method'"),
        ({X: {"group_size": 64, "bits": 4, "zero_point": 3}}, "'zero_point'"),
    ],
)
def test_settings_that_would_be_ignored(tmp_path, extra, part):
    refused(write(tmp_path, quantise(X, AFFINE)[0], AFFINE | extra), part)
