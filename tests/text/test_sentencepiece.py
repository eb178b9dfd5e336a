"""SentencePiece models, as .model files and in GGUF: the library and transformers as oracles."""

import functools
import struct
from pathlib import Path
from typing import Any
from unicodedata import category, normalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.errors import ModelError
from mlxserve.text.tokenizer import Tokenizer
from tests.text.spm_training import (
    PLAIN,
    SPM_KINDS,
    processor,
    save_model,
    spm_metadata,
    train,
    train_with,
)
from tests.text.support import WORDS, any_text, refused
from tests.text.training import write_json

SPACY = [
    "▁",
    " ",
    "   ",
    " the",
    "\t",
    "\n\n",
    "<tool>",
    "Ⅳ",
    "\uff48",
    "e\u0301",
    "ﬁ",
    "\u00a0",
    "a b",
]
spacy_text = st.lists(
    st.one_of(st.sampled_from([*WORDS, *SPACY]), st.text(max_size=4)), max_size=9
).map("".join)

NAMES = ("<s>", "</s>", "<unk>")


@functools.cache
def _from_gguf(kind: str) -> Tokenizer:
    return Tokenizer.from_gguf(spm_metadata(kind))


def _plain(text: str) -> str:
    """Without what the library doesn't look for in a text: special tokens, and U+0000."""
    for name in (*NAMES, "\0"):
        text = text.replace(name, "")
    return text


def _singly_marked(text: str) -> str:
    """Without marks that `tokenizers` loses: after another, and after a character that normalising
    replaces, as in U+FF48 U+0300."""
    kept: list[str] = []
    for char in text:
        before = kept[-1] if kept else ""
        replaced = category(before or "a")[0] == "M" or normalize("NFKC", before) != before
        if not (replaced and category(char)[0] == "M"):
            kept.append(char)
    return "".join(kept)


@pytest.fixture(scope="module", params=[*SPM_KINDS, "mixed_letters"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    path = save_model(request.param, tmp_path_factory.mktemp("model"))
    return Tokenizer.from_directory(path), processor(request.param)


@pytest.mark.full
@settings(deadline=None, max_examples=150)
@given(text=spacy_text | st.text(alphabet="ab ", max_size=60))
def test_ids_and_text_are_the_librarys(both: tuple[Tokenizer, Any], text: str):
    tokenizer, library = both
    # The unigram model of `tokenizers` takes the name of a byte token for the token.
    text = _singly_marked(_plain(text)).replace("<0x41>", "")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == library.encode(text)
    if library.unk_id() not in ids:  # shown as nothing here, and as U+2047 there
        assert tokenizer.decode(ids) == library.decode(ids)


@settings(deadline=None, max_examples=100)
@given(text=spacy_text)
def test_the_name_of_a_byte_token_is_text(text: str):
    text = _plain(text + "<0x41>")
    ids = _from_gguf("llama").encode(text, add_special_tokens=False)
    assert ids == processor("llama").encode(text)


@pytest.mark.full
@pytest.mark.parametrize("legacy", [None, False])
@pytest.mark.parametrize("kind", ["llama", "whole_texts"])
def test_the_same_as_transformers_llama_tokenizer(tmp_path: Path, kind: str, legacy: bool | None):
    theirs = _transformers(save_model(kind, tmp_path), {} if legacy is None else {"legacy": legacy})
    config = {} if legacy is None else {"legacy": legacy}
    save_model(kind, tmp_path, tokenizer_class="LlamaTokenizer", **config)
    ours = Tokenizer.from_directory(tmp_path)

    @settings(deadline=None, max_examples=100)
    @given(text=spacy_text)
    def check(text: str):
        ids = ours.encode(text)
        assert ids == [ours.bos_id, *theirs.encode(text, add_special_tokens=False)]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)

    check()
    text = "the wall</s>the wall</s> the"
    assert ours.encode(text)[1:] == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("prefix", [False, True])
def test_add_prefix_space_wins_over_the_model(tmp_path: Path, prefix: bool):
    theirs = _transformers(save_model("llama", tmp_path), {"add_prefix_space": prefix})
    save_model("llama", tmp_path, tokenizer_class="LlamaTokenizerFast", add_prefix_space=prefix)
    ours = Tokenizer.from_directory(tmp_path)
    for text in ("the wall", " the", "", "東京 a"):
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids)


def _transformers(path: Path, options: dict[str, Any]) -> Any:
    transformers = pytest.importorskip("transformers")
    from transformers.tokenization_utils_sentencepiece import SentencePieceExtractor

    extractor = SentencePieceExtractor(str(path / "tokenizer.model"))
    vocabulary, _, merges = extractor.extract()
    return transformers.LlamaTokenizer(vocab=vocabulary, merges=merges, **options)


def test_a_legacy_model_puts_a_space_after_every_added_token(tmp_path: Path):
    for legacy, second in ((True, b" the"), (False, b"the")):
        save_model("llama", tmp_path, tokenizer_class="LlamaTokenizer", legacy=legacy)
        tokenizer = Tokenizer.from_directory(tmp_path)
        ids = tokenizer.encode("the</s>the", add_special_tokens=False)
        data = b"".join(tokenizer.token_bytes(token) for token in ids)
        assert data == b" the</s>" + second


def test_names_and_defaults_come_from_the_model(tmp_path: Path):
    tokenizer = Tokenizer.from_directory(save_model("llama", tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {2})
    assert tokenizer.encode("a")[0] == 1
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.encode("</s>", add_special_tokens=False) == [2]
    save_model("llama", tmp_path, add_bos_token=False, eos_token="<s>")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("a") == tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.eos_ids == {1}


def test_added_tokens_come_from_either_file(tmp_path: Path):
    n = processor("llama").get_piece_size()
    declared = {
        "2": {"content": "</s>", "special": True, "rstrip": True, "normalized": True},
        str(n + 1): {"content": "<|turn|>", "special": True},
    }
    save_model("llama", tmp_path, added_tokens_decoder=declared)
    write_json(tmp_path / "added_tokens.json", {"<|turn|>": n + 1, "<pad>": n})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("<pad><|turn|>", add_special_tokens=False) == [n, n + 1]
    assert tokenizer.decode([n, n + 1]) == "<pad>"
    assert tokenizer.encode("</s>  \n", add_special_tokens=False) == [2]
    assert tokenizer.vocab_size == n + 2
    write_json(tmp_path / "added_tokens.json", {"<pad>": n + 7})
    with refused(ModelError, "'<|turn|>'", str(n + 1), str(n)):
        Tokenizer.from_directory(tmp_path)
    write_json(tmp_path / "added_tokens.json", {"<pad>": "x"})
    with refused(ModelError, "added_tokens.json", "ids"):
        Tokenizer.from_directory(tmp_path)


def test_a_placeholder_may_get_its_name_later(tmp_path: Path):
    last = processor("llama").get_piece_size() - 1
    declared = {str(last): {"content": "<|plan|>", "special": True}}
    tokenizer = Tokenizer.from_directory(
        save_model("llama", tmp_path, added_tokens_decoder=declared)
    )
    assert tokenizer.encode("<|plan|>", add_special_tokens=False) == [last]
    assert last in tokenizer.special_ids
    declared = {
        "0": {"content": "<none>", "special": True},
        "1": {"content": "<start>", "special": True},
    }
    tokenizer = Tokenizer.from_directory(
        save_model("normalised", tmp_path, added_tokens_decoder=declared)
    )
    assert tokenizer.encode("<start>\u4e00", add_special_tokens=False)[::2] == [1, 0]
    assert (tokenizer.bos_id, tokenizer.special_ids) == (1, {0, 1, 2})
    declared = {"-1": {"content": "<none>"}}
    save_model("llama", tmp_path, added_tokens_decoder=declared)
    with refused(ModelError, "'<none>'", "-1"):
        Tokenizer.from_directory(tmp_path)


def test_tokenizer_json_comes_first(tmp_path: Path):
    from tests.text.training import byte_level, save

    save(byte_level(), tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"not read")
    assert Tokenizer.from_directory(tmp_path).decoding.byte_level


def _field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return bytes([number << 3, value])
    return bytes([number << 3 | 2, len(value)]) + value


_A_PIECE = _field(1, _field(1, b"a"))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["isn't a SentencePiece model"]),
        (b"IQ== 0\nIg== 1\n", ["isn't a SentencePiece model", "tokenizer.json"]),
        (b"\xff" * 40, ["isn't a SentencePiece model"]),
        (_field(1, b"\x0a\x7fa"), ["isn't a SentencePiece model"]),
        (_field(1, _field(1, b"\xff\xfe")), ["isn't a SentencePiece model"]),
        (_field(1, _field(1, 3)), ["isn't a SentencePiece model"]),
        (_field(1, _field(1, b"a") + _field(3, 9)), ["isn't a SentencePiece model"]),
        (_A_PIECE * 2, ["'a' twice"]),
        (_A_PIECE + _field(2, _field(3, 3)), ["type WORD", "BPE and UNIGRAM"]),
        (_A_PIECE + _field(2, _field(3, 9)), ["type 9"]),
        (_A_PIECE + _field(3, _field(5, 0)), ["escape_whitespaces"]),
        (_A_PIECE + _field(3, _field(2, b"xx")), ["can't be used"]),
        (_field(1, _field(1, b"a") + b"\x15" + struct.pack("<f", float("nan"))), ["score"]),
    ],
)
def test_damaged_models_are_named(tmp_path: Path, data: bytes, words: list[str]):
    (tmp_path / "tokenizer.model").write_bytes(data)
    with refused(ModelError, "tokenizer.model", *words):
        Tokenizer.from_directory(tmp_path)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_model_damaged_anywhere_is_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    whole = bytearray(train("llama"))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] = data.draw(st.integers(0, 255))
    del whole[data.draw(st.integers(at, len(whole))) :]
    path = tmp_path_factory.mktemp("model")
    (path / "tokenizer.model").write_bytes(whole)
    try:
        tokenizer = Tokenizer.from_directory(path)
    except ModelError as error:
        lines = str(error).splitlines()
    else:
        lines = [tokenizer.decode(tokenizer.encode("the wall"))]
    assert len(lines) <= 1


def test_other_kinds_of_models_are_refused(tmp_path: Path):
    for options, word in (
        (PLAIN | {"model_type": "char", "byte_fallback": False}, "CHAR"),
        (PLAIN | {"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
    ):
        (tmp_path / "tokenizer.model").write_bytes(train_with(options))
        with refused(ModelError, word):
            Tokenizer.from_directory(tmp_path)


@settings(deadline=None, max_examples=100)
@given(text=any_text | st.text(alphabet="ab ", max_size=60))
@pytest.mark.parametrize("kind", ["llama", "mixed_letters"])
def test_gguf_scores_give_the_librarys_ids(kind: str, text: str):
    tokenizer = _from_gguf(kind)
    ids = tokenizer.encode(_plain(text), add_special_tokens=False)
    assert ids == processor(kind).encode(_plain(text))
    assert tokenizer.decode(ids) == _plain(text).replace("▁", " ")


def test_gguf_without_a_space_prefix_and_with_user_defined_tokens():
    metadata = spm_metadata("gemma") | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer, library = Tokenizer.from_gguf(metadata), processor("gemma")
    for text in ("the wall", " the", "a<tool>b\n\n\nc", "<tool>", ""):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == library.encode(text)
        assert tokenizer.decode(ids) == text


def test_gguf_puts_a_space_after_every_added_token_as_llama_cpp_does():
    tokenizer = _from_gguf("llama")
    ids = tokenizer.encode("the</s>the", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == b" the</s> the"
    assert tokenizer.decode(ids) == "the the"


def test_gguf_defaults_are_sentencepieces():
    tokenizer = _from_gguf("llama")
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {2})
    assert tokenizer.encode("") == [1]
    metadata = spm_metadata("llama") | {
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.eos_token_id": 1,
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    assert (tokenizer.eos_ids, tokenizer.encode("")) == ({1}, [])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("scores", None, ["scores is missing"]),
        ("scores", [0.0], ["scores", "each of", "1 values"]),
        ("scores", [float("nan")] * 3, ["scores", "number"]),
        ("scores", ["x"] * 3, ["scores", "number"]),
        ("token_type", [1, 1], ["token_type", "2 values"]),
        ("tokens", ["a", "a", "b"], ["'a' twice"]),
        ("tokens", ["a", "b", "c"], ["tokens can't be used", "neither an unknown token"]),
        ("token_type", [[1], [1], [1]], ["token_type", "1 to 6"]),
        ("add_space_prefix", 1, ["add_space_prefix is a int"]),
    ],
)
def test_bad_gguf_metadata_is_named(key: str, value: object, words: list[str]):
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["a", "<s>", "</s>"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0],
        "tokenizer.ggml.token_type": [1, 3, 3],
    }
    with refused(ModelError, *words):
        Tokenizer.from_gguf(metadata | {f"tokenizer.ggml.{key}": value})
