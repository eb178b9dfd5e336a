"""`generate`: what goes to stdout, what to stderr, and how it ends."""

import contextlib
import json
import re
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

import mlxserve
from mlxserve.cli import generate as command
from mlxserve.cli import models, terminal
from mlxserve.types import Completion, Timings, Usage

# Starts a process or a server per test, too long for `make check`.
pytestmark = pytest.mark.full

QUESTION = "Why is the sky blue?"
STATISTICS = (
    r"\d+ prompt tokens( at [\d.]+/s)?, \d+ new( at [\d.]+/s)?, first after [\d.]+ s \(\w+\)\n"
)


@pytest.fixture
def tiny(cli, tiny_model_dir):
    """`generate` with the tiny model, at most 8 tokens."""

    def run(*args, **kwargs):
        return cli("generate", "-m", str(tiny_model_dir), "-n", "8", *args, **kwargs)

    return run


@pytest.fixture(scope="module")
def expected(tiny_model_dir):
    """What Python's API answers, as the program prints it."""
    with mlxserve.load(tiny_model_dir) as llm:

        def answer(prompt, **sampling):
            text = mlxserve.generate(llm, prompt, max_tokens=8, **sampling).text
            return text if text.endswith("\n") or not text else text + "\n"

        yield answer


def user(text):
    return {"role": "user", "content": text}


def test_answer_on_stdout_and_numbers_on_stderr(tiny, expected):
    done = tiny("--prompt", QUESTION)
    assert done.code == 0
    assert done.stdout == expected([user(QUESTION)])
    assert done.stdout.strip()
    assert re.fullmatch(STATISTICS, done.stderr), done.stderr


def test_quiet(tiny, expected):
    assert tiny("--prompt", QUESTION, "--quiet") == (0, expected([user(QUESTION)]), "")


def test_raw_has_no_template(tiny, expected):
    done = tiny("--prompt", QUESTION, "--raw", "--quiet")
    assert done == (0, expected(QUESTION), "")
    assert done.stdout != expected([user(QUESTION)])


def test_system(tiny, expected):
    done = tiny("--prompt", QUESTION, "--system", "Be brief.", "--quiet")
    assert done == (0, expected([{"role": "system", "content": "Be brief."}, user(QUESTION)]), "")


def test_system_with_raw_is_refused(tiny):
    assert_refused(tiny("--prompt", "x", "--raw", "--system", "y"), "--system", "--raw")


def test_prompt_from_stdin(tiny, expected):
    text = "Ein Bär 🐻\nzweite Zeile"
    assert tiny("--prompt", "-", "--quiet", stdin=text.encode()).stdout == expected([user(text)])


def test_terminal_that_has_not_every_letter(tiny, expected):
    answer = expected([user(QUESTION)])
    assert not answer.isascii()
    done = tiny("--prompt", QUESTION, "--quiet", PYTHONIOENCODING="ascii")
    assert done == (0, answer.encode("ascii", "replace").decode(), "")


def test_stdin_loses_the_newline_of_echo_except_in_raw(tiny, expected):
    stdin = f"{QUESTION}\n".encode()
    assert tiny("--prompt", "-", stdin=stdin).stdout == expected([user(QUESTION)])
    assert tiny("--prompt", "-", "--raw", stdin=stdin).stdout == expected(QUESTION + "\n")


def test_seeded_sampling_as_in_python(tiny, expected):
    options = ["--temp", "0.9", "--top-k", "40", "--top-p", "0.95", "--seed", "7"]
    answer = expected([user(QUESTION)], temperature=0.9, top_k=40, top_p=0.95, seed=7)
    assert tiny("--prompt", QUESTION, *options).stdout == answer


@pytest.fixture
def loads(monkeypatch):
    """What the program loads a model with, and then samples with; no model is loaded."""
    seen = []

    def load(model, engine, **kwargs):
        seen.append(engine)
        tokenizer = SimpleNamespace(chat_template=None)
        return contextlib.nullcontext(SimpleNamespace(tokenizer=tokenizer))

    monkeypatch.setattr(models, "load", load)
    monkeypatch.setattr(
        command._Answer, "stream", lambda self, sampling: seen.append(sampling) or 0
    )
    return seen


def test_every_option_reaches_sampling(here, loads):
    line = (
        "generate --quiet --prompt x --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --seed 5 "
        "--repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3 "
        "--logit-bias 5=-1.5 --logit-bias 6=2 --max-tokens 9 --min-tokens 4 --stop a --stop b "
        "--stop-token-id 7 --stop-token-id 8 --ignore-eos"
    )
    assert here(*line.split()).code == 0
    assert loads[1] == {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 5,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {5: -1.5, 6: 2.0},
        "max_tokens": 9,
        "min_tokens": 4,
        "stop": ("a", "b"),
        "stop_token_ids": (7, 8),
        "ignore_eos": True,
    }


def test_every_option_reaches_the_engine(here, loads, tmp_path):
    line = (
        "generate --quiet --prompt x --kv-bits 8/4 --max-kv-size 512 --keep 4 "
        f"--max-batched-tokens 16 --memory 1.5 --trace {tmp_path}/t.json "
        "--deterministic"
    )
    assert here(*line.split()).code == 0
    assert loads[0] == {
        "max_batch": 1,
        "kv_bits": "8/4",
        "max_kv_size": 512,
        "keep": 4,
        "max_batched_tokens": 16,
        "memory_limit_bytes": 3 << 29,
        "trace": tmp_path / "t.json",
        "deterministic": True,
    }
    assert here("generate", "--quiet", "--prompt", "x").code == 0
    assert loads[2] == {"max_batch": 1}


def test_packed_cache_and_trace(tiny, tiny_model_dir, tmp_path):
    """Four bits change the answer to a prompt of more than a page, as they do in Python."""
    text = QUESTION * 8
    with mlxserve.load(tiny_model_dir, kv_bits=4) as llm:
        packed = llm.generate([user(text)], max_tokens=8).text
    done = tiny("--prompt", text, "--kv-bits", "4", "--trace", str(tmp_path / "t.json"))
    assert done.stdout.rstrip("\n") == packed.rstrip("\n")
    assert done.stdout != tiny("--prompt", text).stdout
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


@pytest.mark.parametrize("cached", [0, 131_008])
@pytest.mark.parametrize(("rate", "ttft_s"), [(None, None), (99.9, 0.12), (1234.5, 123.45)])
def test_statistics_fit_a_line(cached, rate, ttft_s):
    timings = Timings(ttft_s=ttft_s, prefill_tokens_per_s=rate, decode_tokens_per_s=rate)
    for prompt, new in ((131_071, 512), (131_071, 32_768)):
        done = Completion(
            text="",
            token_ids=(),
            finish_reason="cancelled",
            usage=Usage(prompt, new, cached),
            timings=timings,
        )
        line = terminal.statistics(done)
        assert len(line) <= 80
        assert line.startswith(f"{prompt} prompt tokens")
        assert ("131008 cached" in line) == bool(cached)
        assert f" {new} new" in line
    assert terminal.statistics(replace(done, usage=Usage(9, 2, 8), timings=timings)).startswith(
        f"9 prompt tokens, 8 cached, 2 new{terminal.per_second(rate)}"
    )


def assert_refused(done, *words):
    """Exit code 2, nothing on stdout, one line on stderr that has the words, and no traceback."""
    assert done.code == 2
    assert done.stdout == ""
    line = done.stderr.strip().splitlines()[-1]
    assert line.lower().startswith("error: ")
    for word in words:
        assert word in line
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--temperature", "warm", "'warm' isn't a number"),
        ("--temp", "-1", "temperature is -1"),
        ("-t", "nan", "temperature is nan"),
        ("--top-k", "1.5", "'1.5' isn't a whole number"),
        ("--top-k", "-1", "top_k is -1"),
        ("--top-p", "0", "top_p is 0"),
        ("--top-p", "1.1", "top_p is 1.1"),
        ("--min-p", "2", "min_p is 2"),
        ("--repetition-penalty", "0", "repetition_penalty is 0"),
        ("--presence-penalty", "inf", "presence_penalty is inf"),
        ("--frequency-penalty", "101", "frequency_penalty is 101"),
        ("--logit-bias", "5", "'5'; write ID=VALUE"),
        ("--logit-bias", "a=1", "'a=1'; write ID=VALUE"),
        ("--logit-bias", "5=nan", "logit_bias[5] is nan"),
        ("--logit-bias", "-5=1", "is -5"),
        ("--seed", "x", "'x' isn't a whole number"),
        ("--seed", "-1", "seed is -1"),
        ("--max-tokens", "0", "max_tokens is 0"),
        ("--max-tokens", "", "'' isn't a whole number"),
        ("--min-tokens", "9", "min_tokens (9)"),
        ("--stop", "", "stop string ''"),
        ("--stop-token-id", "two", "'two' isn't a whole number"),
        ("--stop-token-id", "-2", "is -2"),
        ("--system", b"\xff", "--system isn't valid UTF-8"),
        ("--kv-bits", "5", "kv_bits is '5'; it must be 16, 8 or 4"),
        ("--kv-bits", "8/", "kv_bits is '8/'"),
        ("--max-kv-size", "0", "keep is 0 and max_kv_size 0"),
        ("--keep", "4", "keep is 4, which needs max_kv_size"),
        ("--max-batched-tokens", "0", "max_batched_tokens is 0"),
        ("--max-batched-tokens", "many", "'many' isn't a whole number"),
        ("--memory", "0", "--memory is 0; it must be a finite number above 0"),
        ("--memory", "nan", "--memory is nan"),
        ("--memory", "8GB", "'8GB' isn't a number"),
        ("--trace", "/", "--trace is '/', and no file can be made there"),
        ("--trace", "no-such-folder/t.json", "--trace is 'no-such-folder/t.json'"),
        ("--prompt-cache", "none.st", "none.st: No such file"),
        ("--prompt-cache", __file__, "it is not a prompt cache"),
        ("--prompt", "", "the prompt is empty"),
        ("--prompt", b"a\xff", "--prompt isn't valid UTF-8 at character 1"),
    ],
)
def test_bad_value_is_named(here, option, value, words):
    done = here("generate", "--prompt", "x", "-n", "8", option, value)
    assert_refused(done, words)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--logit-bias", "100000=1"], "100000"),
        (["--stop-token-id", "100000"], "100000"),
        (["--top-k", "100000"], "100000"),
    ],
)
def test_value_that_only_the_model_can_refuse(tiny, args, words):
    assert_refused(tiny("--prompt", "x", *args), words)


def test_prompt_longer_than_the_context(tiny):
    assert_refused(tiny("--prompt", "-", stdin=b"word " * 20_000), "tokens", "shorten")


def test_missing_prompt(here):
    assert_refused(here("generate"), "--prompt")


def test_empty_stdin(cli):
    assert_refused(cli("generate", "--prompt", "-"), "the prompt is empty")


def test_stdin_that_is_not_utf8(cli):
    done = cli("generate", "--prompt", "-", stdin=b"caf\xe9")
    assert_refused(done, "stdin isn't valid UTF-8", "0xe9", "offset 3")


def test_missing_model(here, tmp_path):
    name = str(tmp_path / "none")
    assert_refused(here("generate", "-m", name, "--prompt", "x"), name)


def test_directory_without_a_model(cli, tmp_path):
    assert_refused(cli("generate", "-m", str(tmp_path), "--prompt", "x"), str(tmp_path))


def endless(cli, model):
    """An answer that is as long as the context allows."""
    return cli.start("generate", "-m", str(model), "-n", "100000", "--ignore-eos", "--prompt", "x")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_the_answer_cleanly(cli, tiny_model_dir, number, code):
    with endless(cli, tiny_model_dir) as process:
        first = process.stdout.read(1)
        process.send_signal(number)
        rest, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert (first + rest).endswith(b"\n")
    assert stderr.startswith(b"interrupted: about ")
    assert stderr.count(b"\n") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_while_the_model_loads(cli, number, code):
    done = cli.python(f"""
import os, sys, mlxserve
sys.argv = ["mlxserve", "generate", "--prompt", "x"]
mlxserve.load = lambda *args, **kwargs: os.kill(os.getpid(), {int(number)})
from mlxserve.cli import main
main()
""")
    assert done == (code, "", "")


def test_reader_that_goes_away_ends_it_quietly(cli, tiny_model_dir):
    with endless(cli, tiny_model_dir) as process:
        process.stdout.read(5)
        process.stdout.close()
        process.stdout = None
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGPIPE
    assert stderr == b""


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux is there /dev/full")
def test_full_disk(cli, tiny_model_dir, tmp_path):
    done = cli.shell(f"generate -m {tiny_model_dir} -n 8 --prompt x > /dev/full")
    assert_refused(done, "No space left")


def test_bug_of_ours_says_so(cli):
    source = """
import sys
sys.argv = ["mlxserve", "ls"]
import mlxserve.sources.pull as pull
def installed(): raise RuntimeError("boom")
pull.installed = installed
from mlxserve.cli import main
main()
"""
    done = cli.python(source)
    assert done.code == 1
    assert done.stderr.startswith("error: RuntimeError: boom\nthis is a bug in mlxserve")
    assert "Traceback" not in done.stderr
    assert "Traceback" in cli.python(source, MLXSERVE_DEBUG="1").stderr


def test_debug_shows_where_an_error_came_from(cli):
    done = cli("pull", "none", MLXSERVE_DEBUG="1")
    assert done.code == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.real
def test_default_model_answers(cli, smollm2_gguf):
    done = cli("generate", "-m", str(smollm2_gguf), "-n", "24", "--prompt", "What is 2 + 2?")
    assert done.code == 0
    assert "4" in done.stdout
