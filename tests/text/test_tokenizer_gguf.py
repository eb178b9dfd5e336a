"""Tokenizers from GGUF metadata: `tokenizers` itself is the oracle; and damaged files."""

from typing import Any

import pytest
from hypothesis import given, settings

from mlxserve.errors import ModelError, RequestError
from mlxserve.text.tokenizer import Tokenizer
from tests.text.support import any_text, refused
from tests.text.training import byte_level, gguf_metadata

BACKENDS = {"gpt-2": byte_level(), "smollm": byte_level(individual_digits=True)}


def _metadata(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    metadata = gguf_metadata(BACKENDS[pre], pre=pre)
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


@pytest.fixture(scope="module")
def tokenizers():
    return {pre: Tokenizer.from_gguf(_metadata(pre)) for pre in BACKENDS}


@settings(deadline=None, max_examples=80)
@given(text=any_text)
def test_ids_are_those_of_the_trained_tokenizer(tokenizers: dict[str, Tokenizer], text: str):
    for pre, backend in BACKENDS.items():
        ids = tokenizers[pre].encode(text)
        assert ids == backend.encode(text).ids
        assert tokenizers[pre].decode(ids) == text.replace("</s>", "")


def test_smollm_takes_digits_one_by_one_and_gpt2_does_not():
    # One vocabulary for both, and it has a token for the whole number.
    metadata = _metadata("gpt-2")

    def pieces(pre: str) -> list[bytes]:
        tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": pre})
        return [tokenizer.token_bytes(token) for token in tokenizer.encode(" 42")]

    assert pieces("gpt-2") == [b" 42"]
    assert pieces("smollm") == [b" ", b"4", b"2"]


def test_ids_and_sizes(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["smollm"]
    tokens = _metadata("smollm")["tokenizer.ggml.tokens"]
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.bos_id == tokens.index("<s>")
    assert tokenizer.eos_ids == {tokens.index("</s>")}
    assert tokenizer.special_ids == {tokens.index(t) for t in ("<unk>", "<s>", "</s>", "<|turn|>")}
    assert tokenizer.chat_template is None


def test_every_end_id_counts():
    metadata = _metadata(eos_token_id=5, eot_token_id=6, eom_token_id=7)
    assert Tokenizer.from_gguf(metadata).eos_ids == {5, 6, 7}
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("<|turn|>")] = "<|im_end|>"
    ends = Tokenizer.from_gguf(metadata).eos_ids
    assert ends == {5, 6, 7, tokens.index("<|im_end|>")}


def test_end_names_are_special_whatever_the_file_says():
    metadata = _metadata()
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    for text, kind in (("<|im_end|>", 4), ("<end_of_turn>", 1)):
        tokens.append(text)
        types.append(kind)
    tokenizer = Tokenizer.from_gguf(metadata)
    new = {tokens.index("<|im_end|>"), tokens.index("<end_of_turn>")}
    assert new < tokenizer.eos_ids
    assert new < tokenizer.special_ids
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>b<end_of_turn>")) == "ab"


def test_the_end_of_a_part_is_no_end_where_there_are_ends_of_answers():
    metadata = _metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    for text in ("<|end|>", "<|return|>", "<|call|>"):
        tokens.append(text)
        metadata["tokenizer.ggml.token_type"].append(3)
    ends = Tokenizer.from_gguf(metadata).eos_ids
    assert ends == {tokens.index(t) for t in ("</s>", "<|return|>", "<|call|>")}


def test_bos_is_added_when_the_file_says_so():
    tokenizer = Tokenizer.from_gguf(_metadata(add_bos_token=True))
    assert tokenizer.encode("a") == [
        tokenizer.bos_id,
        *tokenizer.encode("a", add_special_tokens=False),
    ]
    assert tokenizer.encode("") == [tokenizer.bos_id]
    without = Tokenizer.from_gguf(_metadata(add_bos_token=False))
    assert without.encode("") == []


def test_user_defined_tokens_are_text_that_is_always_one_token():
    metadata = _metadata()
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    for text in ("<tool>", "naïve", "  \n"):
        tokens.append(text)
        types.append(4)
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode("a<tool>naïve  \nb")
    assert [tokenizer.token_bytes(token) for token in ids[1:4]] == [
        b"<tool>",
        "naïve".encode(),
        b"  \n",
    ]
    assert tokenizer.decode(ids) == "a<tool>naïve  \nb"
    assert not tokenizer.special_ids & set(ids)


def test_templates_come_with_their_names_and_variables():
    metadata = _metadata()
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    metadata["tokenizer.chat_template.tool_use"] = "tools!"
    metadata["tokenizer.chat_templates"] = ["tool_use"]
    tokenizer = Tokenizer.from_gguf(metadata)
    message = [{"role": "user", "content": "a"}]
    assert set(tokenizer.chat_templates) == {"default", "tool_use"}
    assert tokenizer.render_chat(message) == "<s>a</s>"
    assert tokenizer.render_chat(message, tools=[{"name": "f"}]) == "tools!"
    ids = tokenizer.apply_chat_template(message)
    assert (ids[0], ids[-1]) == (tokenizer.bos_id, *tokenizer.eos_ids)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "bert"}, ["tokenizer.ggml.model", "'bert'", "supported: gpt2, llama"]),
        ({"model": "t5"}, ["tokenizer.ggml.model", "'t5'", "supported: gpt2, llama"]),
        ({"model": "rwkv"}, ["tokenizer.ggml.model", "'rwkv'", "supported: gpt2, llama"]),
        ({"model": None}, ["tokenizer.ggml.model is missing"]),
        ({"model": 3}, ["tokenizer.ggml.model is a int"]),
        ({"pre": "nope"}, ["tokenizer.ggml.pre", "'nope'", "smaug-bpe, smollm"]),
        ({"pre": None}, ["tokenizer.ggml.pre is missing"]),
        ({"tokens": None}, ["tokenizer.ggml.tokens is missing"]),
        ({"tokens": []}, ["tokenizer.ggml.tokens is empty"]),
        ({"tokens": ["a", "a"]}, ["tokenizer.ggml.tokens", "'a' twice"]),
        ({"tokens": ["a", 3]}, ["tokenizer.ggml.tokens", "strings"]),
        ({"tokens": "abc"}, ["tokenizer.ggml.tokens is a str"]),
        ({"merges": None}, ["tokenizer.ggml.merges is missing"]),
        ({"merges": ["ab"]}, ["tokenizer.ggml.merges", "'ab'"]),
        ({"merges": ["a b c"]}, ["tokenizer.ggml.merges", "'a b c'"]),
        ({"merges": ["nowhere atall"]}, ["tokenizer.ggml.merges doesn't fit"]),
        ({"token_type": [1]}, ["tokenizer.ggml.token_type", "each of", "1 values"]),
        ({"token_type": "1" * 420}, ["tokenizer.ggml.token_type is a str"]),
        ({"token_type": [9] * 420}, ["tokenizer.ggml.token_type", "1 to 6"]),
        ({"eos_token_id": 420}, ["tokenizer.ggml.eos_token_id is 420"]),
        ({"bos_token_id": -1}, ["tokenizer.ggml.bos_token_id is -1"]),
        ({"eos_token_id": "2"}, ["tokenizer.ggml.eos_token_id is a str"]),
        ({"add_bos_token": "yes"}, ["tokenizer.ggml.add_bos_token is a str"]),
    ],
)
def test_bad_metadata_is_named(changes: dict[str, Any], words: list[str]):
    changes = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with refused(ModelError, *words):
        Tokenizer.from_gguf(_metadata() | changes)


def test_encoding_refuses_what_is_not_text(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["smollm"]
    with refused(RequestError, "'\\ud800'", "character 2", "surrogate"):
        tokenizer.encode("ab\ud800")
    for wrong in (None, b"x", 3, ["x"]):
        with refused(RequestError, type(wrong).__name__, "string"):
            tokenizer.encode(wrong)  # pyright: ignore


def test_decoding_refuses_ids_out_of_range(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["smollm"]
    for wrong in (-1, tokenizer.vocab_size):
        with refused(RequestError, f"token id {wrong}", f"0 to {tokenizer.vocab_size - 1}"):
            tokenizer.decode([0, wrong])
        with refused(RequestError, f"token id {wrong}"):
            tokenizer.token_bytes(wrong)


def test_special_tokens_have_bytes_and_no_text(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["smollm"]
    (end,) = tokenizer.eos_ids
    assert tokenizer.token_bytes(end) == b"</s>"
    assert tokenizer.decode([end]) == ""
