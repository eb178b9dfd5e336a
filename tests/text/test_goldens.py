"""Real models' tokenizers, against ids that llama.cpp gave (goldens/make_*.py)."""

import json
from pathlib import Path

import pytest

from mlxserve.text.stream import StreamDecoder
from mlxserve.text.tokenizer import Tokenizer

GOLDENS = Path(__file__).parent.parent / "goldens"
TOKENS = json.loads((GOLDENS / "smollm2_tokens.json").read_text(encoding="utf-8"))
LOGPROBS = json.loads((GOLDENS / "smollm2_logprobs.json").read_text(encoding="utf-8"))

# Bytes this vocabulary has no token for are lost on the way in, here as in llama.cpp.
NO_TOKEN = {*range(0xF1, 0xF3), 4, 6, 19, 20, 22, 29}

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Path) -> Tokenizer:
    from mlxserve.sources.gguf import read_gguf

    return Tokenizer.from_gguf(read_gguf(smollm2_gguf).metadata)


def test_ids_are_llama_cpps(tokenizer: Tokenizer):
    assert len(TOKENS["cases"]) >= 300
    wrong = [
        (text, tokenizer.encode(text), ids)
        for text, ids in TOKENS["cases"]
        if tokenizer.encode(text) != ids
    ]
    assert wrong == []


def test_texts_come_back(tokenizer: Tokenizer):
    special = [tokenizer.token_bytes(token).decode() for token in tokenizer.special_ids]
    for text, ids in TOKENS["cases"]:
        if NO_TOKEN & set(text.encode()):
            continue
        shown = text
        for name in special:
            shown = shown.replace(name, "")
        assert tokenizer.decode(ids) == shown
        stream = StreamDecoder(tokenizer)
        assert "".join([stream.feed(token) for token in ids]) + stream.finish() == shown


def test_the_scored_texts_have_the_same_ids(tokenizer: Tokenizer):
    for entry in LOGPROBS["texts"]:
        assert tokenizer.encode(entry["text"]) == entry["ids"]
        assert len(entry["logprobs"]) == len(entry["logprobs_f32"]) == len(entry["ids"]) - 1


def test_the_models_own_template_and_ends(tokenizer: Tokenizer):
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    text = "".join(tokenizer.token_bytes(token).decode() for token in ids)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ends = {tokenizer.token_bytes(token) for token in tokenizer.eos_ids}
    assert ends == {b"<|im_end|>", b"<|endoftext|>"}
    assert tokenizer.vocab_size == 49152


def test_gemma3s_ids_are_llama_cpps(gemma3_gguf: Path):
    """SentencePiece's scores, for 262144 tokens."""
    from mlxserve.sources.gguf import read_gguf

    cases = json.loads((GOLDENS / "gemma3_tokens.json").read_text(encoding="utf-8"))["cases"]
    tokenizer = Tokenizer.from_gguf(read_gguf(gemma3_gguf).metadata)
    assert len(cases) >= 300
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text, _ in cases]
    assert encoded == [ids for _, ids in cases]
    special = [tokenizer.token_bytes(token).decode() for token in tokenizer.special_ids]
    for text, ids in cases:
        if not any(name in text for name in special):
            assert tokenizer.decode(ids) == text.replace("\u2581", " ")
    ends = {tokenizer.token_bytes(token) for token in tokenizer.eos_ids}
    assert ends == {b"<eos>", b"<end_of_turn>"}
    assert tokenizer.encode("") == [tokenizer.bos_id]
