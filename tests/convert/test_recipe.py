"""Bits by rule: the shipped recipes against what they promise, and one's own."""

import mlx.core as mx
import pytest
from mlxserve_convert.recipe import Options, read_recipe, shipped

from mlxserve.errors import RequestError
from mlxserve.sources.mlx_quant import Quantised
from tests.convert.sources import config, convert, same, tensors, tiny, write

PARTS = ["self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"]


def modules(layers):
    inner = [f"model.layers.{i}.{part}" for i in range(layers) for part in PARTS]
    return ["model.embed_tokens", *inner, "lm_head"]


def own(tmp_path, text):
    path = tmp_path / "own.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("layers", [1, 4, 8, 16, 28, 61])
@pytest.mark.parametrize(("name", "low", "high"), [
    ("mixed_2_6", 2, 6), ("mixed_3_4", 3, 4), ("mixed_3_6", 3, 6), ("mixed_4_6", 4, 6),
])  # fmt: skip
def test_mixed_recipes_are_those_of_mlx_lm(name, low, high, layers):
    """mlx-lm's mixed_quant_predicate, as its source states it."""
    found = read_recipe(name, Options(group_size=32)).assign(modules(layers), layers)
    for module, scheme in found.items():
        i = int(module.split(".")[2]) if "layers" in module else 0
        more = i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2
        sensitive = "v_proj" in module or "down_proj" in module
        more = (sensitive and more) or module == "lm_head"
        assert scheme == Quantised(high if more else low, 32, "affine"), module


def test_every_shipped_recipe_converts_and_says_so_in_the_config(tmp_path):
    source = write(tmp_path / "src", tiny(num_hidden_layers=3))
    for name in shipped():
        for mode in ("affine", "mxfp4"):
            if mode != "affine" and name.startswith("mixed"):
                continue
            made = convert(source, tmp_path / f"{name}-{mode}", recipe=name, mode=mode)
            assert f"| {name} |" in (made.path / "README.md").read_text()


def test_a_recipe_of_one_s_own(tmp_path):
    path = own(tmp_path, """
        about = "mine"
        [default]
        bits = 3
        [[rules]]
        match = "*.q_proj"
        layers = -1
        keep = true
        [[rules]]
        match = ["*.q_proj", "model.embed_tokens"]
        bits = 8
        group_size = 32
        [[rules]]
        match = "*.down_proj"
        layers = ["first 1/2"]
        mode = "mxfp8"
    """)  # fmt: skip
    model = tiny(num_hidden_layers=4)
    made = convert(write(tmp_path / "src", model), tmp_path / "out", recipe=path)
    found, block = tensors(made.path), config(made.path)["quantization"]
    assert {key: block[key] for key in ("bits", "group_size", "mode")} == {
        "bits": 3, "group_size": 64, "mode": "affine",
    }  # fmt: skip
    eight = {"bits": 8, "group_size": 32, "mode": "affine"}
    floats = {"bits": 8, "group_size": 32, "mode": "mxfp8"}
    entries = {key: value for key, value in block.items() if isinstance(value, dict)}
    assert entries == {
        "model.embed_tokens": eight,
        **{f"model.layers.{i}.self_attn.q_proj": eight for i in range(3)},
        **{f"model.layers.{i}.mlp.down_proj": floats for i in range(2)},
    }
    kept = "model.layers.3.self_attn.q_proj.weight"
    assert same(found[kept], model.weights[kept])
    w = model.weights["model.layers.1.mlp.down_proj.weight"]
    assert same(
        found["model.layers.1.mlp.down_proj.weight"], mx.quantize(w, 32, 8, mode="mxfp8")[0]
    )


def test_the_block_states_what_most_weights_have(tmp_path):
    """mlx-lm needs bits and group size there, also where the default is for few matrices."""
    path = own(tmp_path, """
        default = {bits = 8}
        [[rules]]
        match = "model.layers.*"
        bits = 4
    """)  # fmt: skip
    source = write(tmp_path / "src", tiny(num_hidden_layers=8))
    block = config(convert(source, tmp_path / "out", recipe=path).path)["quantization"]
    assert (block["bits"], block["model.embed_tokens"]["bits"]) == (4, 8)


def test_options_stand_in_for_a_recipe_s_default(tmp_path):
    rules = read_recipe("embeddings_8", Options(bits=3, group_size=128))
    found = rules.assign(modules(2), 2)
    assert found["model.layers.1.mlp.up_proj"] == Quantised(3, 128, "affine")
    assert found["lm_head"] == Quantised(8, 128, "affine")
    changed = read_recipe("mixed_4_6", Options(bits=5)).assign(modules(2), 2)
    assert changed["model.embed_tokens"] == Quantised(5, 64, "affine")
    floats = read_recipe("embeddings_8", Options(mode="nvfp4")).assign(modules(2), 2)
    assert floats["model.layers.0.mlp.up_proj"] == Quantised(4, 16, "nvfp4")
    assert floats["model.embed_tokens"] == Quantised(8, 64, "affine")


@pytest.mark.parametrize(
    ("selectors", "chosen"),
    [
        ("0", {0}),
        ("[-1, -3]", {9, 7}),
        ("'first 3'", {0, 1, 2}),
        ("'last 2'", {8, 9}),
        ("'first 1/4'", {0, 1}),
        ("'last 1/4'", {7, 8, 9}),
        ("'every 3 after 1/8'", {0, 3, 6, 9}),
        ("'every 1 after 0/1'", set(range(10))),
        ("12", set()),
    ],
)
def test_layers_are_chosen_as_written(tmp_path, selectors, chosen):
    path = own(tmp_path, f"[[rules]]\nmatch = '*.v_proj'\nlayers = {selectors}\nbits = 8\n")
    found = read_recipe(path, Options()).assign(modules(10), 10)
    got = {i for i in range(10) if found[f"model.layers.{i}.self_attn.v_proj"] == _eight()}
    assert got == chosen


def _eight():
    return Quantised(8, 64, "affine")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("bits = 4", "has 'bits'; there are about, default, rules"),
        ("[default]\nbit = 4", "default has 'bit'; did you mean bits?"),
        ("[default]\nbits = 7", "default: bits is 7; affine takes 2, 3, 4, 5, 6, 8"),
        ("[default]\nbits = '4'", "default: bits is '4'"),
        ("[default]\nmode = 'q4_k'", "default: mode is 'q4_k'; use one of affine, mxfp4"),
        ("default = 4", "write [default] for the default"),
        ("rules = 4", "[[rules]] for each rule"),
        ("rules = [4]", "rule 1 is 4"),
        ("[[rules]]\nbits = 4", "rule 1: match is None"),
        ("[[rules]]\nmatch = ''\nbits = 4", "rule 1: match is ''"),
        ("[[rules]]\nmatch = '*'", "rule 1: give either keep = true or some of"),
        ("[[rules]]\nmatch = '*'\nkeep = true\nbits = 4", "rule 1: give either keep"),
        ("[[rules]]\nmatch = '*'\nkeep = false", "rule 1: give either keep"),
        ("[[rules]]\nmatch = '*'\ngroup_size = 48", "rule 1: group_size is 48"),
        ("[[rules]]\nmatch = '*'\nmode = 'nvfp4'\nbits = 8", "rule 1: bits is 8; nvfp4 takes 4"),
        ("[[rules]]\nmatch = '*'\nlayer = 1\nbits = 4", "has 'layer'; did you mean layers?"),
        ("[[rules]]\nmatch = '*'\nlayers = 'odd'\nbits = 4", "layers has 'odd'; write a layer's"),
        ("[[rules]]\nmatch = '*'\nlayers = 'first 1/0'\nbits = 4", "layers has 'first 1/0'"),
        ("[[rules]]\nmatch = '*'\nlayers = true\nbits = 4", "layers has True"),
        ("[[rules]]\nmatch = '*.w1'\nbits = 4", "no matrix of this model is called '*.w1'"),
        ("[default", "is no proper TOML"),
        ("[[rules]]\nmatch = '*'\nkeep = true", "quantises no matrix"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_said(tmp_path, text, why):
    path = own(tmp_path, text)
    source = write(tmp_path / "src")
    with pytest.raises(RequestError) as error:
        convert(source, tmp_path / "out", recipe=path)
    assert str(path) in str(error.value)
    assert why in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_an_unknown_recipe_is_refused_with_what_there_is(tmp_path):
    with pytest.raises(RequestError, match="did you mean mixed_4_6") as error:
        convert(write(tmp_path / "src"), tmp_path / "out", recipe="mixed_4_8")
    assert ".toml" in str(error.value)
