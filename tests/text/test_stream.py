"""Streamed text: never a broken character, the same as decoding at once."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.errors import RequestError
from mlxserve.text.stream import StreamDecoder, TextStream
from mlxserve.text.tokenizer import Tokenizer
from tests.text.spm_training import SPM_KINDS, save_model, spm_metadata
from tests.text.support import any_text, refused
from tests.text.training import KINDS, save


@pytest.fixture(scope="module", params=[*KINDS, *SPM_KINDS, "gguf_scores"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("model")
    if request.param == "gguf_scores":
        return Tokenizer.from_gguf(spm_metadata("llama"))
    if request.param in SPM_KINDS:
        return Tokenizer.from_directory(save_model(request.param, path))
    return Tokenizer.from_directory(save(KINDS[request.param](), path))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory):
    return Tokenizer.from_directory(save(KINDS["byte_level"](), tmp_path_factory.mktemp("model")))


def _pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = StreamDecoder(tokenizer)
    return [stream.feed(token) for token in ids] + [stream.finish()]


@pytest.mark.full
@settings(deadline=None, max_examples=60)
@given(text=any_text)
def test_streamed_text_is_the_decoded_text(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text)
    pieces = _pieces(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""


@pytest.mark.full
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_ids_stream_to_what_they_decode_to(tokenizer: Tokenizer, data: st.DataObject):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    whole = tokenizer.decode(ids)
    shown = list(itertools.accumulate(_pieces(tokenizer, ids)))
    assert shown[-1] == whole
    assert all(whole.startswith(part) for part in shown)


@pytest.mark.parametrize("text", ["😀", "👩‍💻", "👍🏽", "é", "東京", "a😀b"])
def test_a_character_comes_whole_or_not_at_all(byte_level: Tokenizer, text: str):
    stream = StreamDecoder(byte_level)
    shown = ""
    data = text.encode()
    alphabet = {byte_level.token_bytes(i): i for i in range(byte_level.vocab_size)}
    for n in range(len(data)):
        shown += stream.feed(alphabet[data[n : n + 1]])
        assert shown == data[: n + 1].decode(errors="ignore")
    assert shown == text
    assert stream.finish() == ""


def test_a_character_cut_off_at_the_end_shows_as_one_mark(byte_level: Tokenizer):
    alphabet = {byte_level.token_bytes(i): i for i in range(byte_level.vocab_size)}
    ids = [alphabet[bytes([byte])] for byte in "ok 😀".encode()[:-1]]
    assert _pieces(byte_level, ids)[-1] == "\ufffd"
    assert byte_level.decode(ids) == "ok \ufffd"


def test_special_tokens_give_no_text_and_do_not_split_characters(byte_level: Tokenizer):
    end = byte_level.encode("</s>")
    assert len(end) == 1
    alphabet = {byte_level.token_bytes(i): i for i in range(byte_level.vocab_size)}
    ids = [alphabet[bytes([byte])] for byte in "é".encode()]
    assert byte_level.decode([*end, ids[0], *end, ids[1], *end]) == "é"


def test_a_continued_text_keeps_the_space_a_new_one_drops(tmp_path: Path):
    for kind in ("byte_fallback", "unigram"):
        tokenizer = Tokenizer.from_directory(save(KINDS[kind](), tmp_path))
        ids = tokenizer.encode("the wall", add_special_tokens=False)
        for at_start, expected in ((True, "the wall"), (False, " the wall")):
            stream = StreamDecoder(tokenizer, at_start=at_start)
            text = "".join([stream.feed(token) for token in ids]) + stream.finish()
            assert text == expected


def test_ids_out_of_range_are_refused(byte_level: Tokenizer):
    last = byte_level.vocab_size - 1
    for wrong in (-1, last + 1, 10**9):
        with refused(RequestError, str(wrong), f"0 to {last}"):
            StreamDecoder(byte_level).feed(wrong)


@settings(deadline=None, max_examples=60)
@given(text=any_text, stop=st.lists(st.text(min_size=1, max_size=3), max_size=3), data=st.data())
def test_text_stream_cuts_before_the_stop_string(
    byte_level: Tokenizer, text: str, stop: list[str], data: st.DataObject
):
    text = text.replace("</s>", "")
    if text and data.draw(st.booleans()):
        a = data.draw(st.integers(0, len(text) - 1))
        stop.append(text[a : a + data.draw(st.integers(1, 4))])
    ids = byte_level.encode(text)
    stream = TextStream(byte_level, stop)
    shown = ""
    for token in ids:
        shown += stream.feed(token)
        if stream.stopped:
            break
    shown += stream.finish()
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    assert shown == (text[: min(ends)[1]] if ends else text)
    assert stream.stopped == bool(ends)


def test_text_stream_finds_a_stop_string_in_what_finish_brings(byte_level: Tokenizer):
    alphabet = {byte_level.token_bytes(i): i for i in range(byte_level.vocab_size)}
    stream = TextStream(byte_level, ["\ufffd"])
    assert stream.feed(alphabet["😀".encode()[:1]]) == ""
    assert stream.finish() == ""
    assert stream.stopped


def test_special_tokens_that_are_kept_are_text(byte_level: Tokenizer):
    (turn,) = byte_level.encode("<|turn|>")
    (end,) = byte_level.encode("</s>")
    text = byte_level.encode("a😀b")
    ids = [turn, *text, end, turn, *text]
    stream = TextStream(byte_level, keep=["<|turn|>", "not a token"])
    assert "".join([stream.feed(token) for token in ids]) == "<|turn|>a😀b<|turn|>a😀b"
    assert byte_level.decode(ids) == "a😀ba😀b"
    stops = TextStream(byte_level, ["n|>a"], keep=["<|turn|>"])
    assert "".join([stops.feed(token) for token in ids]) == "<|tur"
    # A character that the token cuts off comes before it.
    alphabet = {byte_level.token_bytes(i): i for i in range(byte_level.vocab_size)}
    half = [alphabet[bytes([byte])] for byte in "😀".encode()[:2]]
    broken = TextStream(byte_level, keep=["<|turn|>"])
    assert "".join([broken.feed(token) for token in [*half, turn]]) == "\ufffd<|turn|>"


def test_a_kept_token_opens_the_text(tmp_path: Path):
    tokenizer = Tokenizer.from_directory(save(KINDS["byte_fallback"](), tmp_path))
    (turn,) = tokenizer.encode("<|turn|>", add_special_tokens=False)
    words = tokenizer.encode("the wall", add_special_tokens=False)
    assert tokenizer.decode(words) == "the wall"
    stream = StreamDecoder(tokenizer, keep=["<|turn|>"])
    shown = "".join([stream.feed(token) for token in [turn, *words]]) + stream.finish()
    # The space that marks a word is dropped only where the word opens the text.
    assert shown == "<|turn|> the wall"
