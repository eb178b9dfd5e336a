"""A prompt's file is the same for any number of ranks: saved by some, loaded by others."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import httpx
import numpy as np
import pytest

import mlxserve
from mlxserve.cache import file
from tests.support.model_dir import END_ID, VOCAB_SIZE, write_model_dir
from tests.support.processes import TIMEOUT_S, running
from tests.support.tiny import Tiny, tiny_gemma3, tiny_llama

pytestmark = pytest.mark.full

LAUNCH = [sys.executable, "-m", "mlxserve", "launch", "-n"]
SIZES = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 2048, "eos_token_id": END_ID}
BOOK = "The quick brown fox jumps over the lazy dog. " * 5  # 225 tokens: three pages and a half
QUESTION = BOOK + "Who is lazy?"
NEW = 12
KEYS = ["a" * 8, "b" * 8]
CLOSE = 1e-4  # of log-probabilities


class Case(NamedTuple):
    """ranks: and stages of the pipeline that they are; kv_bits: of the cache; tokens: that the file
    has."""

    make: Callable[[], Tiny]
    ranks: tuple[int, int]
    kv_bits: str | None = None
    tokens: int = len(BOOK)


CASES = {
    "windows of two pages, two stages": Case(
        lambda: tiny_gemma3(sliding_window=70, **SIZES), (2, 2)
    ),
    "packed, 2 and 1 heads": Case(
        lambda: tiny_llama(num_attention_heads=9, num_key_value_heads=3, hidden_size=144, **SIZES),
        (2, 1), "8/4", 192,
    ),
    "one head on three ranks": Case(lambda: tiny_llama(num_key_value_heads=1, **SIZES), (3, 1)),
}  # fmt: skip


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    home = str(tmp_path_factory.mktemp("home"))
    return os.environ | {"MLXSERVE_HOME": home, "MLXSERVE_CPU_THREADS": "1"}


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(BOOK)
    return path


def written(path, tiny):
    path.mkdir()
    return write_model_dir(path, tiny)


def launched(env, ranks, *command):
    count, stages = map(str, ranks)
    args = [*LAUNCH, count, "--pipeline", stages, "--", *map(str, command)]
    return subprocess.run(args, env=env, capture_output=True, timeout=TIMEOUT_S, text=True)


def asked(llm):
    return llm.generate(QUESTION, max_tokens=NEW, ignore_eos=True, logprobs=True)


def likely(answer):
    return [token.logprob for token in answer.logprobs]


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_the_same_for_any_number_of_ranks(env, tmp_path, book, name):
    case = CASES[name]
    model, alone, ranks = (
        written(tmp_path / "model", case.make()),
        *(tmp_path / f"{whose}.st" for whose in ("alone", "ranks")),
    )
    with mlxserve.load(model, kv_bits=case.kv_bits) as llm:
        expected = asked(llm)
        assert expected.usage.cached_tokens == 0
        assert llm.save_cache(alone, BOOK) == case.tokens
    engine = ["--model", model, "--raw", *(["--kv-bits", case.kv_bits] if case.kv_bits else [])]

    given = ["--ignore-eos", "-n", NEW, "--prompt", QUESTION, "--prompt-cache", alone]
    done = launched(env, case.ranks, "generate", *engine, *given)
    assert done.stdout == expected.text + "\n", done.stderr
    assert f" prompt tokens, {case.tokens} cached, {NEW} new" in done.stderr

    done = launched(
        env, case.ranks, "cache", "build", *engine, "--prompt-file", book, "--out", ranks
    )
    assert f"{ranks}: {case.tokens} tokens" in done.stderr
    same_but_for_last_bits(file.read(alone), file.read(ranks))
    with mlxserve.load(model, kv_bits=case.kv_bits) as llm:
        assert llm.load_cache(ranks) == case.tokens
        got = asked(llm)
        assert (got.text, got.usage.cached_tokens) == (expected.text, case.tokens)
        assert likely(got) == pytest.approx(
            likely(expected), abs=CLOSE if not case.kv_bits else 0.02
        )


def same_but_for_last_bits(one, other):
    """Packed numbers may be rounded the other way, here and there."""
    file.verify(other)
    assert other.header == one.header
    for name, entry in one.layout.entries.items():
        if name != "checksums":
            a, b = one.tensor(name), other.tensor(name)
            if entry.form.dtype == "uint32":
                assert np.mean(a.view(np.uint8) != b.view(np.uint8)) < 0.01
            else:
                np.testing.assert_allclose(b, a, rtol=2e-3, atol=1e-4)


def test_a_server_of_two_ranks_has_it_for_each_of_its_users(env, tmp_path):
    model, saved = (
        written(tmp_path / "model", CASES["windows of two pages, two stages"].make()),
        tmp_path / "c",
    )
    with mlxserve.load(model) as llm:
        expected = asked(llm)
        llm.save_cache(saved, BOOK)
    serve = ["serve", model, "--port", "0", "--prompt-cache", saved, "--api-key", KEYS[0]]
    command = [*LAUNCH, "2", "--", *map(str, serve), "--api-key", KEYS[1]]
    with running(command, env) as server:
        for key in KEYS:
            done = httpx.post(
                f"{server.url}/v1/completions",
                json={"prompt": QUESTION, "max_tokens": NEW, "temperature": 0, "ignore_eos": True},
                headers={"Authorization": f"Bearer {key}"},
                timeout=TIMEOUT_S,
            ).json()
            assert done["choices"][0]["text"] == expected.text
            assert done["usage"]["prompt_tokens_details"]["cached_tokens"] == len(BOOK)
        server.signal(signal.SIGTERM)
        assert server.end() == 0


def test_a_file_of_another_model_is_refused_by_name(env, tmp_path):
    model = written(tmp_path / "model", tiny_llama(**SIZES))
    other = written(tmp_path / "other", tiny_llama(seed=9, **SIZES))
    saved = tmp_path / "c"
    with mlxserve.load(other) as llm:
        llm.save_cache(saved, BOOK)
    done = launched(env, (2, 1), "generate", "--model", model, "-p", "x", "--prompt-cache", saved)
    assert done.returncode == 2
    assert f"error: {saved}: it was made with model" in done.stderr
    assert "is lost" not in done.stderr
