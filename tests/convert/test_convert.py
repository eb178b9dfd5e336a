"""What is written: the numbers of mx.quantize, in files that others read."""

import json

import mlx.core as mx
import numpy as np
import pytest
import safetensors
from mlxserve_convert import plan, stream

import mlxserve
from tests.convert import sources
from tests.convert.sources import config, convert, linears, same, tensors, tiny, write
from tests.support.tiny import reference_logits

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Several pieces to a matrix, and some that aren't whole."""
    monkeypatch.setattr(stream, "PIECE_BYTES", 96 * 256)


def expect_quantised(made, source, bits, group_size, mode="affine"):
    """Every matrix is what MLX makes of the source's, and all else is the source's own."""
    for module in linears(source):
        parts = mx.quantize(source[f"{module}.weight"], group_size, bits, mode=mode)
        for name, part in zip(("weight", "scales", "biases"), parts, strict=False):
            assert same(made.pop(f"{module}.{name}"), part), f"{module}.{name}"
    for name, w in source.items():
        if w.ndim == 1:
            assert same(made.pop(name), w)
    assert made == {}


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (2, 32), (3, 128), (5, 32), (8, 64)])
def test_affine_is_mx_quantize_bit_for_bit(tmp_path, dtype, bits, group_size):
    model = tiny(dtype=DTYPES[dtype])
    made = convert(
        write(tmp_path / "src", model), tmp_path / "out", bits=bits, group_size=group_size
    )
    expect_quantised(tensors(made.path), model.weights, bits, group_size)
    block = {"group_size": group_size, "bits": bits, "mode": "affine"}
    assert config(made.path)["quantization"] == block
    assert config(made.path)["quantization_config"] == block


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
@pytest.mark.parametrize(
    ("mode", "bits", "group_size"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
)
def test_float_modes_are_mx_quantize_bit_for_bit(tmp_path, kind, mode, bits, group_size):
    model = tiny(kind)
    made = convert(write(tmp_path / "src", model), tmp_path / "out", mode=mode)
    expect_quantised(tensors(made.path), model.weights, bits, group_size, mode)
    block = {"group_size": group_size, "bits": bits, "mode": mode}
    assert config(made.path)["quantization"] == block


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"bits": 2}),
        ("llama", {"bits": 3, "group_size": 128}),
        ("llama", {"bits": 4}),
        ("llama", {"bits": 5, "group_size": 32}),
        ("llama", {"bits": 6}),
        ("llama", {"bits": 8}),
        ("llama", {"mode": "nvfp4"}),
        ("llama", {"recipe": "mixed_3_6"}),
        ("qwen3", {"mode": "mxfp4", "recipe": "embeddings_6"}),
        ("gemma3", {"mode": "mxfp8"}),
    ],
    ids=str,
)
def test_it_runs_as_its_dequantised_weights_do(tmp_path, kind, options):
    """Against transformers, whose weights become those of the packed matrices."""
    model = tiny(kind, mx.float16)
    made = convert(write(tmp_path / "src", model), tmp_path / "out", **options)
    state = {name: np.array(w) for name, w in _dequantised(made.path).items()}
    _load(model.reference, state)
    ids = np.random.default_rng(0).integers(0, 250, 40).astype(np.int32)
    got = mlxserve.load(made.path).score(ids.tolist())
    want = reference_logits(model.reference, ids)
    assert np.abs(got - want).max() <= 1e-3 * np.abs(want).max()


def _dequantised(path):
    """A directory's tensors as float32, by its own config and mx.dequantize."""
    found, block = tensors(path), config(path)["quantization"]
    for module in [name.removesuffix(".scales") for name in found if name.endswith(".scales")]:
        how = block.get(module, block)
        weight, scales = found[f"{module}.weight"], found.pop(f"{module}.scales")
        if (biases := found.pop(f"{module}.biases", None)) is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        found[f"{module}.weight"] = mx.dequantize(
            weight, scales, biases, how["group_size"], how["bits"], mode=how["mode"],
            dtype=mx.float32,
        )  # fmt: skip
    return {name: w.astype(mx.float32) for name, w in found.items()}


def _load(reference, state):
    import torch

    loaded = {name: torch.from_numpy(w.copy()) for name, w in state.items()}
    if "lm_head.weight" not in loaded:
        loaded["lm_head.weight"] = loaded["model.embed_tokens.weight"]
    reference.load_state_dict(loaded)


def test_a_model_with_tied_embeddings_has_them_once(tmp_path):
    model = tiny(tie_word_embeddings=True)
    twice = model._replace(
        weights={**model.weights, "lm_head.weight": model.weights["model.embed_tokens.weight"]}
    )
    made = convert(write(tmp_path / "src", twice), tmp_path / "out", bits=4)
    expect_quantised(tensors(made.path), model.weights, 4, 64)


def test_files_that_others_read(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "SHARD_BYTES", 60_000)
    model = tiny(dtype=mx.float16)
    source = write(tmp_path / "Tiny-1.5B", model)
    (source / "generation_config.json").write_text('{"temperature": 0.5}')
    (source / "README.md").write_text("---\nlicense: apache-2.0\ntags:\n- old\n---\nHello\n")
    (source / "LICENSE").write_text("Do as you like.")
    (source / "training.py").write_text("print('not for you')")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    made = convert(source, tmp_path / "out", bits=4)

    index = json.loads((made.path / "model.safetensors.index.json").read_text())
    found: dict[str, str] = {}
    for number in range(1, made.shards + 1):
        name = f"model-{number:05d}-of-{made.shards:05d}.safetensors"
        with safetensors.safe_open(made.path / name, "np") as shard:
            assert shard.metadata() == {"format": "mlx"}
            found |= dict.fromkeys(shard.keys(), name)
        assert (made.path / name).stat().st_size < 60_000 + 5_000
    assert made.shards > 3
    assert found == index["weight_map"]
    sizes = sum(w.nbytes for w in tensors(made.path).values())
    assert index["metadata"]["total_size"] == made.weight_bytes == sizes
    assert made.parameters == sum(w.size for w in model.weights.values())
    assert made.bits_per_weight == pytest.approx(8 * sizes / made.parameters)
    expect_quantised(tensors(made.path), model.weights, 4, 64)

    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE"):
        assert (made.path / name).read_bytes() == (source / name).read_bytes()
    assert (made.path / "additional_chat_templates" / "rag.jinja").exists()
    assert not (made.path / "training.py").exists()
    card = (made.path / "README.md").read_text()
    assert card.startswith("---\n")
    for text in ("license: apache-2.0", "library_name: mlx", f"{made.bits_per_weight:.2f}"):
        assert text in card
    assert "# Tiny-1.5B, quantised for MLX" in card
    assert "- old" not in card
    assert {p.name for p in tmp_path.iterdir()} == {"Tiny-1.5B", "out"}


def test_without_bits_the_numbers_stay(tmp_path):
    model = tiny(dtype=mx.float16)
    made = convert(write(tmp_path / "src", model), tmp_path / "out")
    found = tensors(made.path)
    assert found.keys() == model.weights.keys()
    assert all(same(found[name], w) for name, w in model.weights.items())
    assert "quantization" not in config(made.path)


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_dtype_comes_before_quantisation(tmp_path, dtype):
    model = tiny(dtype=mx.bfloat16)
    made = convert(write(tmp_path / "src", model), tmp_path / "out", bits=4, dtype=dtype)
    cast = {name: w.astype(DTYPES[dtype]) for name, w in model.weights.items()}
    expect_quantised(tensors(made.path), cast, 4, 64)
    assert config(made.path)["torch_dtype"] == dtype


def test_the_config_s_dtype_holds_for_what_is_stored_in_another(tmp_path):
    """As in mlx-lm, which casts to torch_dtype."""
    model = tiny(dtype=mx.float32)
    model.config["torch_dtype"] = "bfloat16"
    made = convert(write(tmp_path / "src", model), tmp_path / "out", bits=4)
    cast = {name: w.astype(mx.bfloat16) for name, w in model.weights.items()}
    expect_quantised(tensors(made.path), cast, 4, 64)


@pytest.mark.parametrize("options", [{"bits": 8}, {"mode": "mxfp8"}], ids=str)
def test_dequantize_unpacks(tmp_path, options):
    model = tiny(dtype=mx.float32)
    packed = convert(write(tmp_path / "src", model), tmp_path / "packed", **options)
    made = convert(packed.path, tmp_path / "out", dequantize=True, dtype="float32")
    assert "quantization" not in config(made.path)
    found, want = tensors(made.path), _dequantised(packed.path)
    assert found.keys() == want.keys()
    assert all(same(found[name], w) for name, w in want.items())


def test_dequantize_and_quantise_anew(tmp_path):
    model = tiny(dtype=mx.float32)
    packed = convert(write(tmp_path / "src", model), tmp_path / "packed", bits=8)
    made = convert(packed.path, tmp_path / "out", dequantize=True, bits=4)
    expect_quantised(tensors(made.path), _dequantised(packed.path), 4, 64)


def test_progress_ends_at_the_whole(tmp_path):
    seen = []
    source = write(tmp_path / "src")
    convert(source, tmp_path / "out", bits=4, on_progress=lambda *args: seen.append(args))
    stages, done, totals = zip(*seen, strict=True)
    assert set(stages) == {"convert"}
    assert list(done) == sorted(done)
    assert done[0] == 0
    assert done[-1] == totals[0] == sum(w.nbytes for w in tiny().weights.values())
    assert len(set(totals)) == 1


def test_an_empty_directory_is_taken(tmp_path):
    (tmp_path / "out").mkdir()
    made = convert(write(tmp_path / "src"), tmp_path / "out", bits=4)
    assert made.path == tmp_path / "out"
    assert (made.path / "config.json").exists()


def test_names_of_a_multimodal_model_s_language_part(tmp_path):
    """Prefixes go, as mlxserve and mlx-lm know the tensors without them."""
    model = tiny()
    prefixed = {f"language_model.{name}": w for name, w in model.weights.items()}
    prefixed["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = mx.zeros(4)
    source = write(tmp_path / "src", model._replace(weights=prefixed))
    made = convert(source, tmp_path / "out", bits=4)
    expect_quantised(tensors(made.path), model.weights, 4, 64)


def test_rows_and_bits_that_end_anywhere(tmp_path, monkeypatch):
    """Matrices whose rows aren't a multiple of any piece."""
    monkeypatch.setattr(stream, "PIECE_BYTES", 1)
    model = tiny(vocab_size=sources.VOCAB_SIZE + 3)
    made = convert(write(tmp_path / "src", model), tmp_path / "out", bits=3, group_size=32)
    expect_quantised(tensors(made.path), model.weights, 3, 32)
