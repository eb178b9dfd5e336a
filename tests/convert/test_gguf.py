"""GGUF files as sources: their numbers, their tokenizer, and a config that others know."""

import json
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
import transformers
from gguf import GGMLQuantizationType as Kind

import mlxserve
from mlxserve.errors import ModelError, RequestError
from tests.convert.sources import config, convert, same, tensors
from tests.sources.making import llama_metadata
from tests.sources.test_gguf_quant import oracle, random_blocks
from tests.text.training import byte_level, gguf_metadata

WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM = 256, 512, 4, 2, 64
TOKENIZER = gguf_metadata(byte_level(), pre="gpt-2") | {
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.token_type": [
        3 if token in ("<unk>", "<s>", "</s>") else 1
        for token in gguf_metadata(byte_level(), pre="gpt-2")["tokenizer.ggml.tokens"]  # type: ignore[union-attr]
    ],
    "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}</s>{% endfor %}",
}
VOCABULARY = len(TOKENIZER["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
# Raw kinds of tensors -> their shapes, and their names in Hugging Face's layout.
MATRICES = {
    "attn_q": ("self_attn.q_proj", (HEADS * HEAD_DIM, WIDTH)),
    "attn_k": ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, WIDTH)),
    "attn_v": ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, WIDTH)),
    "attn_output": ("self_attn.o_proj", (WIDTH, HEADS * HEAD_DIM)),
    "ffn_gate": ("mlp.gate_proj", (INNER, WIDTH)),
    "ffn_up": ("mlp.up_proj", (INNER, WIDTH)),
    "ffn_down": ("mlp.down_proj", (WIDTH, INNER)),
}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def metadata(**extra: Any) -> dict[str, Any]:
    sizes = {
        "block_count": 2,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "attention__head_count": HEADS,
        "attention__head_count_kv": KV_HEADS,
        "rope__dimension_count": HEAD_DIM,
        "vocab_size": VOCABULARY,
    }
    return llama_metadata(**{**sizes, **extra}) | TOKENIZER


def blocks(kind: Kind, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """A matrix's bytes, of weights that a model can compute with."""
    if kind in (Kind.F16, Kind.F32):
        return gguf.quants.quantize(rng.standard_normal(shape).astype(np.float32) / 16, kind)
    return random_blocks(rng, kind, *shape, largest=-9.0)


def write(path, kind: Kind, pairs: dict[str, Any] | None = None, factors=None):
    """A GGUF llama, and its float32 tensors under Hugging Face's names, as the package reads it."""
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (pairs or metadata()).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add |= {str: writer.add_string, list: writer.add_array}
        add[type(value)](key, value)
    want: dict[str, np.ndarray] = {}

    def matrix(name: str, theirs: str, shape: tuple[int, int]) -> None:
        raw = blocks(kind, shape, rng)
        writer.add_tensor(name, raw, raw_dtype=kind)
        want[theirs] = oracle(raw, kind).reshape(shape)

    def norm(name: str, theirs: str) -> None:
        want[theirs] = 1 + 0.1 * rng.standard_normal(WIDTH).astype(np.float32)
        writer.add_tensor(name, want[theirs])

    matrix("token_embd.weight", "model.embed_tokens.weight", (VOCABULARY, WIDTH))
    norm("output_norm.weight", "model.norm.weight")
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    for i in range(2):
        for name, (theirs, shape) in MATRICES.items():
            matrix(f"blk.{i}.{name}.weight", f"model.layers.{i}.{theirs}.weight", shape)
        for name, theirs in NORMS.items():
            norm(f"blk.{i}.{name}.weight", f"model.layers.{i}.{theirs}.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for name, w in want.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = HEADS if "q_proj" in name else KV_HEADS
            # llama.cpp keeps rows i and i + D/2 of a head next to each other.
            want[name] = w.reshape(heads, HEAD_DIM // 2, 2, -1).swapaxes(1, 2).reshape(w.shape)
    return path, want


@pytest.mark.parametrize(
    "kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q6_K, Kind.Q4_0, Kind.Q8_0, Kind.F16]
)
def test_numbers_are_unpacked_as_ggml_means_them(tmp_path, kind):
    path, want = write(tmp_path / "m.gguf", kind)
    if kind == Kind.F16:
        made = convert(path, tmp_path / "out", dtype="float32")
    else:
        made = convert(path, tmp_path / "out", dtype="float32", dequantize=True)
    found = tensors(made.path)
    assert found.keys() == want.keys()
    for name, w in want.items():
        assert found[name].dtype == mx.float32
        np.testing.assert_array_equal(np.array(found[name]), w, name)


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q8_0])
def test_they_are_quantised_from_16_bits(tmp_path, kind):
    path, want = write(tmp_path / "m.gguf", kind)
    made = convert(path, tmp_path / "out", bits=4)
    found = tensors(made.path)
    for name, w in want.items():
        half = mx.array(w).astype(mx.float16)
        expected = mx.quantize(half, 64, 4)[0] if w.ndim == 2 else half
        assert same(found[name], expected), name
    assert config(made.path)["torch_dtype"] == "float16"
    assert kind.name in (made.path / "README.md").read_text()


@pytest.mark.full
def test_the_model_and_its_tokenizer_are_the_file_s(tmp_path):
    path, _ = write(tmp_path / "m.gguf", Kind.Q8_0)
    made = convert(path, tmp_path / "out", dequantize=True, dtype="float32")
    a, b = mlxserve.load(str(path)), mlxserve.load(made.path)
    text = "The sea is blue, 42 times.\n\tOr more: \U0001f642 <s>"
    assert a.tokenizer.encode(text) == b.tokenizer.encode(text)
    ids = a.tokenizer.encode(text)
    assert a.tokenizer.decode(ids) == b.tokenizer.decode(ids)
    assert a.tokenizer.eos_ids == b.tokenizer.eos_ids
    assert a.tokenizer.chat_template == b.tokenizer.chat_template
    difference = np.abs(a.score(ids) - b.score(ids)).max()
    assert difference <= 1e-3 * np.abs(b.score(ids)).max()


@pytest.mark.full
def test_transformers_reads_the_tokenizer(tmp_path):
    path, _ = write(tmp_path / "m.gguf", Kind.Q8_0)
    made = convert(path, tmp_path / "out", bits=8)
    theirs = transformers.AutoTokenizer.from_pretrained(made.path)
    ours = mlxserve.load(str(path)).tokenizer
    text = "The sea is blue, 42 times."
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.decode(ours.encode(text), skip_special_tokens=True) == text
    assert theirs.eos_token_id in ours.eos_ids
    chat = [{"role": "user", "content": "Hello"}]
    assert theirs.apply_chat_template(chat, tokenize=False) == ours.render_chat(chat)


def llama3_divisors(factor: float, theta: float, low=1.0, high=4.0, trained=8192) -> list[float]:
    """What llama.cpp's converter writes for Llama 3.1, computed as it does."""
    found = []
    for i in range(HEAD_DIM // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / HEAD_DIM)
        if wavelength < trained / high:
            found.append(1.0)
        elif wavelength > trained / low:
            found.append(factor)
        else:
            smooth = (trained / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


def test_llama_3_s_rotary_scaling_gets_its_name_back(tmp_path):
    pairs = metadata(rope__freq_base=500000.0)
    path, _ = write(tmp_path / "m.gguf", Kind.Q8_0, pairs, llama3_divisors(32.0, 500000.0))
    made = convert(path, tmp_path / "out", bits=8)
    assert config(made.path)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_rotary_divisors_are_refused(tmp_path):
    factors = llama3_divisors(32.0, 500000.0, low=2.0)
    pairs = metadata(rope__freq_base=500000.0)
    path, _ = write(tmp_path / "m.gguf", Kind.Q8_0, pairs, factors)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight isn't what Llama 3 has"):
        convert(path, tmp_path / "out", bits=8)


def test_a_quantised_file_is_not_copied_by_mistake(tmp_path):
    path, _ = write(tmp_path / "m.gguf", Kind.Q4_0)
    with pytest.raises(RequestError, match=r"quantised already \(Q4_0\)"):
        convert(path, tmp_path / "out")


def test_infinite_scales_are_damage(tmp_path):
    path, _ = write(tmp_path / "m.gguf", Kind.Q8_0)
    data = bytearray(path.read_bytes())
    reader = gguf.GGUFReader(path)
    tensor = next(t for t in reader.tensors if t.name == "blk.1.ffn_up.weight")
    data[tensor.data_offset : tensor.data_offset + 2] = np.array([np.inf], "<f2").tobytes()
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight"):
        convert(path, tmp_path / "out", bits=8)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_the_config_has_what_mlx_lm_asks_for(tmp_path):
    path, _ = write(tmp_path / "m.gguf", Kind.Q8_0)
    made = convert(path, tmp_path / "out", bits=8)
    found = config(made.path)
    for key in (
        "model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "rms_norm_eps",
        "num_attention_heads", "num_key_value_heads", "vocab_size", "rope_theta",
        "tie_word_embeddings", "max_position_embeddings",
    ):  # fmt: skip
        assert found[key] is not None
    generation = json.loads((made.path / "generation_config.json").read_text())
    names = TOKENIZER["tokenizer.ggml.tokens"]
    assert generation["eos_token_id"] == [names.index("</s>")]  # type: ignore[union-attr]
