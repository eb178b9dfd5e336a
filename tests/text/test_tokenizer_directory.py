"""Tokenizers from a model directory: against `tokenizers` and transformers, and damaged files."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, processors
from tokenizers import Tokenizer as Backend

from mlxserve.errors import ModelError, RequestError
from mlxserve.text.tokenizer import Tokenizer
from tests.text.support import any_text, refused
from tests.text.training import KINDS, byte_level, save, with_bos, write_json


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    backend = KINDS[request.param]()
    return Tokenizer.from_directory(save(backend, tmp_path_factory.mktemp("model"))), backend


@pytest.mark.full
@settings(deadline=None, max_examples=80)
@given(text=any_text)
def test_encoding_and_decoding_are_those_of_tokenizers(both: tuple[Tokenizer, Backend], text: str):
    tokenizer, backend = both
    ids = tokenizer.encode(text)
    assert ids == backend.encode(text).ids
    assert tokenizer.decode(ids) == backend.decode(ids)


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_decoding_any_ids_is_that_of_tokenizers(
    both: tuple[Tokenizer, Backend], data: st.DataObject
):
    tokenizer, backend = both
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    ours, theirs = tokenizer.decode(ids), backend.decode(ids)
    # Where bytes aren't UTF-8, tokenizers marks each of them, and good ones beside them.
    if not (tokenizer.decoding.byte_fallback and "\ufffd" in ours):
        assert ours == theirs


def test_token_bytes_join_to_the_text(both: tuple[Tokenizer, Backend]):
    tokenizer, _ = both
    text = "the harbour"
    data = b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode(text))
    assert data.decode().removeprefix(" ") == text


@pytest.mark.parametrize("puts_bos", [False, True])
@pytest.mark.parametrize("add_bos", [None, False, True])
def test_bos_is_added_as_transformers_does(tmp_path: Path, puts_bos: bool, add_bos: bool | None):
    transformers = pytest.importorskip("transformers")
    backend = with_bos(byte_level()) if puts_bos else byte_level()
    config = {} if add_bos is None else {"add_bos_token": add_bos}
    save(backend, tmp_path, **config)
    ours = Tokenizer.from_directory(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in ("", "the wall", "<s>the"):
        # transformers goes by tokenizer.json alone; here the config wins, as it does in GGUF files.
        if add_bos in (None, puts_bos):
            assert ours.encode(text) == theirs(text)["input_ids"]
        plain = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == plain
        adds = puts_bos if add_bos is None else add_bos
        assert ours.encode(text) == ([ours.bos_id] if adds else []) + plain


def test_an_end_token_is_never_put_after_a_prompt(tmp_path: Path):
    backend = byte_level()
    ids = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    tokenizer = Tokenizer.from_directory(save(backend, tmp_path))
    assert tokenizer.encode("a")[0] == tokenizer.bos_id
    assert not tokenizer.eos_ids & set(tokenizer.encode("a"))


def test_a_saved_length_limit_or_padding_is_not_applied(tmp_path: Path):
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_directory(save(backend, tmp_path))
    text = "the harbour was quiet and the boats lay tied"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("a")) == 1


def test_tokens_may_be_strings_or_mappings_in_either_file(tmp_path: Path):
    save(byte_level(), tmp_path, eos_token={"content": "<|turn|>", "lstrip": False})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.eos_ids == set(tokenizer.encode("<|turn|>"))
    write_json(tmp_path / "tokenizer_config.json", {})
    write_json(tmp_path / "special_tokens_map.json", {"eos_token": "</s>", "bos_token": "<s>"})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.eos_ids == set(tokenizer.encode("</s>"))
    assert [tokenizer.bos_id] == tokenizer.encode("<s>")


def test_end_ids_come_from_every_file(tmp_path: Path):
    save(byte_level(), tmp_path)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [7, 8]})
    write_json(tmp_path / "config.json", {"eos_token_id": 9})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.eos_ids == {7, 8, 9, *tokenizer.encode("</s>")}


def test_tokenizer_json_alone_is_enough(tmp_path: Path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (None, frozenset())
    assert tokenizer.decode(tokenizer.encode("the wall 😀")) == "the wall 😀"


def test_template_files_replace_the_configs(tmp_path: Path):
    save(byte_level(), tmp_path, chat_template=[{"name": "default", "template": "old"}])
    (tmp_path / "chat_template.jinja").write_text("new {{ bos_token }}é", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.chat_templates == {"default": "new {{ bos_token }}é", "rag": "rag"}
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "new <s>é"


def test_an_older_template_file_lies_between_the_config_and_the_newer_file(tmp_path: Path):
    save(byte_level(), tmp_path, chat_template="config")
    write_json(tmp_path / "chat_template.json", {"chat_template": "older"})
    assert Tokenizer.from_directory(tmp_path).chat_templates == {"default": "older"}
    named = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    write_json(tmp_path / "chat_template.json", {"chat_template": named})
    assert Tokenizer.from_directory(tmp_path).chat_templates == {"default": "a", "rag": "b"}
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert Tokenizer.from_directory(tmp_path).chat_templates == {"default": "newer", "rag": "b"}


def test_tokens_only_the_config_declares_are_added(tmp_path: Path):
    backend = byte_level()
    n = backend.get_vocab_size()
    declared = {
        str(n): {"content": "<|call|>", "special": True},
        str(n + 1): {"content": "<plan>", "special": False},
    }
    tokenizer = Tokenizer.from_directory(save(backend, tmp_path, added_tokens_decoder=declared))
    assert tokenizer.encode("<|call|><plan>") == [n, n + 1]
    assert tokenizer.decode([n, n + 1]) == "<plan>"
    assert tokenizer.vocab_size == n + 2
    save(backend, tmp_path, added_tokens_decoder={str(n + 5): {"content": "<|call|>"}})
    with refused(ModelError, "'<|call|>'", str(n + 5), str(n)):
        Tokenizer.from_directory(tmp_path)


def test_gaps_in_the_ids_are_in_range_and_have_no_text(tmp_path: Path):
    backend = byte_level()
    state = json.loads(backend.to_str())
    state["model"]["vocab"]["far"] = 1000
    write_json(tmp_path / "tokenizer.json", state)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.vocab_size == 1001
    assert tokenizer.decode([1000, 999]) == "far"
    with refused(RequestError, "1001", "0 to 1000"):
        tokenizer.decode([1001])


def test_missing_files_are_named(tmp_path: Path):
    with refused(ModelError, str(tmp_path), "no tokenizer.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with refused(ModelError, "tokenizer.model", "isn't a SentencePiece model"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{", []),
        ("tokenizer.json", "{}", []),
        ("tokenizer.json", "", []),
        ("tokenizer_config.json", "{", ["not proper JSON"]),
        ("tokenizer_config.json", "[]", ["not a JSON object"]),
        ("tokenizer_config.json", "[" * 100_000, ["not proper JSON"]),
        ("tokenizer_config.json", '{"chat_template": 3}', ["chat_template"]),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}', ["chat_template"]),
        ("tokenizer_config.json", '{"eos_token": "<none>"}', ["eos_token", "'<none>'"]),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}', ["added_tokens_decoder"]),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', ["added_tokens_decoder"]),
        ("generation_config.json", '{"eos_token_id": "2"}', ["eos_token_id", "'2'"]),
        ("config.json", '{"eos_token_id": [2, null, -1]}', ["eos_token_id", "-1"]),
        ("chat_template.jinja", b"\xff\xfe", ["not UTF-8"]),
        ("chat_template.json", '{"chat_template": 3}', ["chat_template must be a string"]),
        ("chat_template.json", "{", ["not proper JSON"]),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str | bytes, words: list[str]):
    save(byte_level(), tmp_path)
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(data)
    with refused(ModelError, str(tmp_path), name.removesuffix(".jinja"), *words):
        Tokenizer.from_directory(tmp_path)


SIDE_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/tools.jinja",
]


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A snapshot of a Hub cache with every file that is read."""
    root = tmp_path / "repo" / "snapshots" / "abc"
    (root / "additional_chat_templates").mkdir(parents=True)
    save(byte_level(), root)
    for name in SIDE_FILES:
        if not (root / name).exists():
            (root / name).write_text("{}")
    return root


@pytest.mark.parametrize("name", SIDE_FILES)
def test_links_out_of_the_directory_are_refused(full: Path, tmp_path: Path, name: str):
    (full / name).rename(tmp_path / "secret")
    (full / name).symlink_to(tmp_path / "secret")
    with refused(ModelError, name, "leads out of its directory"):
        Tokenizer.from_directory(full)


def test_a_sentencepiece_model_may_not_lead_out(full: Path, tmp_path: Path):
    (full / "tokenizer.json").unlink()
    (tmp_path / "secret").write_bytes(b"x")
    (full / "tokenizer.model").symlink_to(tmp_path / "secret")
    with refused(ModelError, "tokenizer.model", "leads out of its directory"):
        Tokenizer.from_directory(full)


def test_links_to_the_blobs_of_a_cache_work(full: Path):
    blobs = full.parents[1] / "blobs"
    blobs.mkdir()
    for i, name in enumerate(SIDE_FILES):
        (full / name).rename(blobs / f"hash{i}")
        (full / name).symlink_to(blobs / f"hash{i}")
    assert set(Tokenizer.from_directory(full).chat_templates) == {"default", "tools"}


@pytest.mark.parametrize("name", SIDE_FILES)
def test_files_too_large_are_refused(full: Path, name: str):
    os.truncate(full / name, (64 << 20) + 1)
    with refused(ModelError, name, "larger than 64 MiB"):
        Tokenizer.from_directory(full)


@pytest.mark.parametrize(
    ("decoder", "word"),
    [
        (None, "no decoder"),
        (decoders.WordPiece(), "WordPiece"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.CTC(), "CTC"),
        (decoders.Sequence([decoders.Strip(" ", 1, 0)]), "Strip"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "Strip"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]), "Replace"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.ByteFallback()]), "ByteLevel"),
    ],
)
def test_decoders_not_understood_are_refused_by_name(tmp_path: Path, decoder: Any, word: str):
    backend = byte_level()
    backend.decoder = decoder
    with refused(ModelError, "decoder", word):
        Tokenizer.from_directory(save(backend, tmp_path))


def test_special_flags_of_named_tokens(tmp_path: Path):
    backend = byte_level()
    backend.add_tokens([AddedToken("<plain>", special=False)])
    tokenizer = Tokenizer.from_directory(save(backend, tmp_path, pad_token="<absent>"))
    assert tokenizer.decode(tokenizer.encode("a<plain>b</s>")) == "a<plain>b"


def test_threads_agree_and_a_long_text_does_not_stop_them(tmp_path: Path):
    tokenizer = Tokenizer.from_directory(save(byte_level(), tmp_path))
    text = "The baker counts twelve loaves, and then 1,337 more. 東京\n" * 6_000
    results: list[list[int]] = []
    thread = threading.Thread(target=lambda: results.append(tokenizer.encode(text)))
    ticks = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        ticks += 1
    # Holding the interpreter's lock for the whole call would leave one or two.
    assert ticks >= 20
    assert results == [tokenizer.encode(text)]


def test_importing_costs_nothing_heavy():
    code = (
        "import sys, mlxserve.text.tokenizer\n"
        "print([m for m in ('jinja2', 'tokenizers', 'mlx', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
