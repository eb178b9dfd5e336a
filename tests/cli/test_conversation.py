"""What a saved chat may hold, and that saving never damages a file."""

import json
import os

import pytest

from mlxserve.cli import conversation
from mlxserve.cli.conversation import Conversation
from mlxserve.errors import RequestError


def message(role, content="x", **more):
    return {"role": role, "content": content, **more}


@pytest.fixture
def chat():
    chat = Conversation("Be brief.")
    chat.add("Wer bist du? 🐻", "Ein Bär.", "who am I", interrupted=False)
    chat.add("Why?", "Be", "", interrupted=True)
    return chat


def test_saved_and_loaded(chat, tmp_path):
    path = tmp_path / "chat.json"
    chat.save(path)
    assert conversation.load(path) == chat
    assert json.loads(path.read_text(encoding="utf-8")) == [
        message("system", "Be brief."),
        message("user", "Wer bist du? 🐻"),
        message("assistant", "Ein Bär.", reasoning_content="who am I"),
        message("user", "Why?"),
        message("assistant", "Be", interrupted=True),
    ]
    assert "Bär" in path.read_text(encoding="utf-8")
    chat.save(path)  # a saved chat may be overwritten
    assert list(tmp_path.iterdir()) == [path]
    empty = Conversation()
    empty.save(path)
    assert conversation.load(path) == empty


def test_what_the_model_is_sent(chat):
    sent = chat.prompt("And now?")
    assert sent[0] == message("system", "Be brief.")
    assert sent[2] == message("assistant", "Ein Bär.", reasoning_content="who am I")
    assert sent[4:] == [message("assistant", "Be"), message("user", "And now?")]
    assert len(chat.messages) == 4


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "isn't JSON"),
        (b"\xff[]", "isn't JSON in UTF-8"),
        (b"[" * 100_000, "isn't JSON"),
        (b'{"messages": []}', "isn't a list of messages"),
        ([1], "messages[0] is a int"),
        ([message("tool")], "messages[0] has role 'tool'"),
        ([{"content": "x"}], "messages[0] has role None"),
        ([{"role": "user"}], "messages[0] has content None"),
        ([message("user", ["x"])], "messages[0] has content ['x']"),
        ([message("user", "\ud800"), message("assistant")], "surrogate"),
        ([message("user"), message("assistant", reasoning_content=1)], "reasoning_content 1"),
        ([message("user"), message("assistant", interrupted=1)], "interrupted 1"),
        ([message("assistant")], "messages[0] is the assistant's and must be the user's"),
        ([message("user"), message("user")], "messages[1] is the user's"),
        ([message("system"), message("user"), message("system")], "messages[2] is the system's"),
        ([message("user")], "a question that has no answer"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused_by_name(tmp_path, content, words):
    path = tmp_path / "chat.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(RequestError) as caught:
        conversation.load(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_too_large_or_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(conversation, "MAX_FILE_BYTES", 10)
    (tmp_path / "large").write_text("[" + " " * 20 + "]")
    for name, words in (("large", "over 0 MiB"), ("none", "No such file"), (".", "directory")):
        with pytest.raises(RequestError, match=words):
            conversation.load(tmp_path / name)


def test_saving_overwrites_nothing_else(chat, tmp_path):
    path = tmp_path / "thesis.txt"
    path.write_text("years of work")
    with pytest.raises(RequestError, match="isn't a saved chat; choose another name"):
        chat.save(path)
    assert path.read_text() == "years of work"
    with pytest.raises(RequestError, match="No such file"):
        chat.save(tmp_path / "none" / "chat.json")


def test_a_full_disk_leaves_the_old_file(chat, tmp_path, monkeypatch):
    path = tmp_path / "chat.json"
    chat.save(path)
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    chat.add("more", "text", "", interrupted=False)
    with pytest.raises(RequestError, match="No space left"):
        chat.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
