"""Uploads to a Hub (a server on loopback): what arrives, what is refused before any work."""

import logging

import pytest
from mlxserve_convert import upload

from mlxserve.errors import ModelError, RequestError
from tests.convert.sources import convert, write
from tests.support.hub_upload_server import TOKEN, serving_uploads


@pytest.fixture
def server(monkeypatch):
    from huggingface_hub import constants

    with serving_uploads() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)  # read from HF_ENDPOINT, once
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(upload, "PAUSES_S", (0, 0))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "src")


@pytest.mark.parametrize(("repo", "private"), [("me/tiny-4bit", False), ("team/secret", True)])
def test_every_file_arrives(server, source, tmp_path, repo, private):
    seen = []
    made = convert(
        source,
        tmp_path / "out",
        bits=4,
        upload_repo=repo,
        private=private,
        on_progress=lambda *args: seen.append(args),
    )
    assert made.url == f"{server.url}/{repo}"
    assert server.private == {repo: private}
    here = {path.name: path.read_bytes() for path in made.path.iterdir()}
    assert server.files(repo) == here
    assert f"mlxserve chat --model {repo}\n" in here["README.md"].decode()
    assert seen[-1] == ("upload", 0, None)
    assert server.posted.count(f"/api/models/{repo}/commit/main") == 1


REFUSED = [
    ({"upload_repo": "tiny"}, ["upload_repo is 'tiny'", "OWNER/NAME"]),
    ({"upload_repo": "me/tiny@main"}, ["upload_repo is 'me/tiny@main'", "OWNER/NAME"]),
    ({"upload_repo": "me/a--b"}, ["upload_repo is 'me/a--b'", "OWNER/NAME"]),
    ({"upload_repo": "you/tiny"}, ["no member of you", "me or team"]),
    ({"upload_repo": "me/taken"}, ["upload_repo is me/taken, which exists already"]),
    ({"private": True}, ["private is set"]),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=str)
def test_refused_before_work(server, source, tmp_path, options, words):
    server.add("me/taken", {"model.safetensors": b"1"})
    with pytest.raises(RequestError) as error:
        convert(source, tmp_path / "out", bits=4, **options)
    one_line(error, *words)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
    assert server.posted == []


def one_line(error, *words):
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert str(word) in text, text


def test_tokens_are_checked_before_work(server, source, tmp_path, monkeypatch):
    def refused(*words):
        with pytest.raises((RequestError, ModelError)) as error:
            convert(source, tmp_path / "out", bits=4, upload_repo="me/tiny")
        one_line(error, *words)
        assert not (tmp_path / "out").exists()

    server.who["auth"]["accessToken"]["role"] = "read"
    refused("upload_repo is me/tiny, and the token may only read", "hf auth login")
    server.once.append(("whoami", 403))
    refused("the Hub forbids it to this token (403)", "may write to me")
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    refused("the Hub refused the token (401)", "hf auth login")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.hf_api.get_token", lambda: None)
    refused("there is no token of the Hub here", "hf auth login")
    assert server.posted == []


@pytest.mark.parametrize(
    ("part", "status", "words"),
    [
        ("repos/create", 403, ["the Hub forbids it to this token (403)"]),
        ("repos/create", 409, ["me/tiny exists already"]),
        ("/preupload/", 403, ["(403)"]),
        ("/lfs/", 403, ["(403)"]),
        ("/commit/", 400, ["the Hub answered 400"]),
    ],
)
def test_a_failed_upload_leaves_the_directory_and_says_how_to_go_on(
    server, source, tmp_path, part, status, words
):
    server.once.append((part, status))
    out = tmp_path / "out"
    with pytest.raises(ModelError) as error:
        convert(source, out, bits=4, upload_repo="me/tiny", private=True)
    again = f"{out} is whole, and `hf upload me/tiny {out} --private` uploads it"
    one_line(error, *words, again)
    assert (out / "model.safetensors").exists()
    assert (out / "README.md").exists()


def test_what_may_pass_is_tried_again_without_what_arrived(server, source, tmp_path, caplog):
    server.once += [("/commit/", 503), ("/commit/", 500)]
    with caplog.at_level(logging.WARNING):
        made = convert(source, tmp_path / "out", bits=4, upload_repo="me/tiny")
    assert server.files("me/tiny").keys() == {path.name for path in made.path.iterdir()}
    assert caplog.text.count("trying again") == 2
    assert sum(path.startswith("/lfs/") for path in server.posted) == 1  # the one large file, once


def test_it_gives_up(server, source, tmp_path):
    server.once += [("/commit/", 503)] * 3
    with pytest.raises(ModelError) as error:
        convert(source, tmp_path / "out", bits=4, upload_repo="me/tiny")
    one_line(error, "the Hub can't take it now (503)", "hf upload me/tiny")


def test_a_hub_that_is_away(server, source, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError) as error:
        convert(source, tmp_path / "out", bits=4, upload_repo="me/tiny")
    one_line(error, "the connection to http://127.0.0.1:9 failed")
    assert not (tmp_path / "out").exists()


def test_refusals_that_xet_tells_in_words(server, source, tmp_path, monkeypatch):
    """hf_xet asks for a token of its own, which this server doesn't give."""
    from huggingface_hub import constants

    pytest.importorskip("hf_xet")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    with pytest.raises(ModelError) as error:
        convert(source, tmp_path / "out", bits=4, upload_repo="me/tiny")
    one_line(error, "the Hub refused the token (401)", "hf upload me/tiny")


def test_an_interrupted_upload_says_how_to_go_on(server, source, tmp_path, monkeypatch, caplog):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", bits=4, upload_repo="me/tiny")
    assert "the upload was interrupted" in caplog.text
    assert f"`hf upload me/tiny {tmp_path / 'out'}` uploads it" in caplog.text
    assert (tmp_path / "out" / "model.safetensors").exists()
