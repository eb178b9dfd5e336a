"""`eval --perplexity`: the number, against transformers and token by token, and what is refused."""

import json
import math
import re
import signal

import numpy as np
import pytest
import torch

from mlxserve.cli import eval as command
from mlxserve.perplexity import windows
from tests.cli.test_generate import assert_refused
from tests.support.model_dir import END_ID, VOCAB_SIZE, byte_tokenizer
from tests.support.tiny import reference_logits, tiny_llama

# Starts a process or a server per test, too long for `make check`.
pytestmark = pytest.mark.full

TEXT = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 🥊\n" * 3


@pytest.fixture(scope="module")
def reference():
    """transformers' model with the weights of `tiny_model_dir`."""
    return tiny_llama(
        vocab_size=VOCAB_SIZE, max_position_embeddings=2048, eos_token_id=END_ID
    ).reference


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def measure(cli, tiny_model_dir, text_file):
    def run(*args, **kwargs):
        return cli("eval", "--perplexity", str(text_file), str(tiny_model_dir), *args, **kwargs)

    return run


def numbers(done):
    assert done.code == 0, done.stderr
    return json.loads(done.stdout)


def cross_entropy(reference, context: int, stride: int) -> tuple[float, int]:
    """transformers' own mean loss, with every label that doesn't count set to -100."""
    ids = torch.tensor(byte_tokenizer().encode(TEXT).ids)
    total, tokens = 0.0, 0
    for start, end, scored_from in windows(len(ids), context, stride):
        labels = ids[start:end].clone()
        labels[: scored_from - start] = -100
        with torch.no_grad():
            loss = reference(ids[None, start:end], labels=labels[None]).loss
        total += float(loss) * (end - scored_from)
        tokens += end - scored_from
    return total / tokens, tokens


@pytest.mark.parametrize(("context", "stride"), [(32, 16), (32, 32), (50, 7), (1, 1), (512, 256)])
def test_perplexity_is_transformers(measure, reference, context, stride):
    got = numbers(measure("--context", str(context), "--stride", str(stride), "--json"))
    loss, tokens = cross_entropy(reference, context, stride)
    assert math.log(got["perplexity"]) == pytest.approx(loss, abs=1e-5)
    size = len(TEXT.encode()) - 1  # one token per byte, and the first isn't predicted
    assert (got["tokens"], got["bytes"]) == (tokens, size)
    assert got["bits_per_byte"] == pytest.approx(loss / math.log(2), abs=1e-5)
    assert (got["context"], got["stride"], got["complete"]) == (context, stride, True)


def test_token_by_token(measure, reference):
    """With stride 1 each token is predicted from the `context` tokens before it, one by one."""
    context = 20
    got = numbers(measure("--context", str(context), "--stride", "1", "--json"))
    ids = np.array(byte_tokenizer().encode(TEXT).ids, np.int32)
    losses = []
    for i in range(1, len(ids)):
        last = reference_logits(reference, ids[max(0, i - context) : i])[-1].astype(np.float64)
        losses.append(np.log(np.exp(last - last.max()).sum()) + last.max() - last[ids[i]])
    assert math.log(got["perplexity"]) == pytest.approx(np.mean(losses), abs=1e-5)


def test_a_packed_cache_is_measured_from_the_first_whole_page_on(measure, text_file):
    text_file.write_text("Twelve boxers hunt Victor across the great dike of Sylt.")
    plain = measure("--json")
    assert measure("--json", "--kv-bits", "4").stdout == plain.stdout
    text_file.write_text(TEXT)
    losses = [
        math.log(numbers(measure("--json", *bits))["perplexity"])
        for bits in ([], ["--kv-bits", "8"], ["--kv-bits", "4"])
    ]
    errors = [abs(loss - losses[0]) for loss in losses[1:]]
    assert 0 < errors[0] < 0.01
    assert errors[0] < errors[1] < 0.3


def test_what_is_printed(measure):
    done = measure()
    assert done.code == 0
    names = [line.split(": ")[0] for line in done.stdout.splitlines()]
    assert names == ["perplexity", "bits_per_byte", "tokens", "bytes", "context", "stride"]
    values = dict(line.split(": ") for line in done.stdout.splitlines())
    assert (values["context"], values["stride"]) == ("512", "256")
    assert re.fullmatch(r"\d+\.\d{4}", values["perplexity"])
    assert done.stderr.endswith(f"scoring {len(TEXT.encode()) - 1} tokens in 1 windows ...\n")
    assert measure("--quiet") == (0, done.stdout, "")


def test_half_of_a_small_context_is_the_stride(measure):
    got = numbers(measure("--context", "9", "--json"))
    assert (got["context"], got["stride"]) == (9, 4)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["is empty"]),
        (b"caf\xe9 au lait", ["isn't valid UTF-8", "0xe9", "offset 3"]),
        (b"a", ["single token", "at least two"]),
    ],
)
def test_bad_text(measure, text_file, content, words):
    text_file.write_bytes(content)
    assert_refused(measure(), str(text_file), *words)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--context", "0"], "--context is 0"),
        (["--stride", "-1"], "--stride is -1"),
        (["--context", "x"], "'x' isn't a whole number"),
        (["--kv-bits", "2"], "kv_bits is '2'"),
        (["--context", "16", "--stride", "17"], "--stride is 17, over the context of 16"),
    ],
)
def test_bad_numbers(here, text_file, args, words):
    assert_refused(here("eval", "--perplexity", str(text_file), *args), words)


def test_the_whole_context_of_a_model_may_be_used(measure, reference, text_file):
    """Then a window is longer than the context, by the token that is only predicted."""
    text_file.write_text(TEXT * 11, encoding="utf-8")
    got = numbers(measure("--context", "2048", "--stride", "2048", "--json"))
    assert got["tokens"] == len((TEXT * 11).encode()) - 1 > 2048


def test_numbers_that_only_the_model_can_refuse(measure):
    assert_refused(measure("--context", "4096"), "--context is 4096", "2048")
    assert_refused(measure("--stride", "513"), "--stride is 513, over the context of 512")


def test_missing_file_and_model(here, tmp_path, text_file):
    missing = str(tmp_path / "none.txt")
    assert_refused(here("eval", "--perplexity", missing), missing, "No such file")
    assert_refused(here("eval", "--perplexity", str(tmp_path)), "directory")
    assert_refused(here("eval"), "--perplexity")
    assert_refused(here("eval", "--perplexity", str(text_file), missing), missing)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_shows_what_is_known_so_far(cli, tiny_model_dir, text_file, number, code):
    source = f"""
import os, sys
from mlxserve.llm import LLM
read = LLM.prompt_logprobs
calls = []
def stop_in_the_third(self, ids):
    calls.append(ids)
    if len(calls) == 3:
        os.kill(os.getpid(), {int(number)})
    return read(self, ids)
LLM.prompt_logprobs = stop_in_the_third
sys.argv = ["mlxserve", "eval", "--perplexity", {str(text_file)!r}, {str(tiny_model_dir)!r},
            "--context", "10", "--stride", "5", "--json"]
from mlxserve.cli import main
main()
"""
    done = cli.python(source)
    assert done.code == code
    got = json.loads(done.stdout)
    assert (got["tokens"], got["bytes"], got["complete"]) == (15, 15, False)
    assert "interrupted: the text's beginning" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_model_gives_no_invalid_json(capsys):
    measured = command._Perplexity.__new__(command._Perplexity)
    measured.tokens, measured.context, measured.stride = 3, 8, 4
    measured._loss = 1e9
    measured._llm = type("", (), {"tokenizer": type("", (), {"vocab_size": 0, "special_ids": ()})})
    measured._ids, measured._size_bytes = [1, 2, 3, 4], 0
    measured.show(as_json=True, complete=True)
    assert json.loads(capsys.readouterr().out)["perplexity"] is None
