"""`eval A B`: the numbers are those of the library, and what is refused before a model loads."""

import json

import pytest
from mlxserve_convert.quality import HELD_OUT

import mlxserve
from mlxserve.comparison import compare
from tests.cli.test_generate import assert_refused
from tests.convert.sources import convert
from tests.support.model_dir import VOCAB_SIZE, write_thinking_model_dir

# Loads two models per test, too long for `make check`.
pytestmark = pytest.mark.full

TEXT = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.\n" * 2


@pytest.fixture(scope="module")
def smaller(tiny_model_dir, tmp_path_factory):
    """The tiny model in 3 bits."""
    to = tmp_path_factory.mktemp("smaller") / "3bit"
    return convert(tiny_model_dir, to, bits=3, group_size=32).path


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_numbers(here, tiny_model_dir, smaller, text_file):
    options = ("--text", text_file, "--context", "40", "--stride", "20")
    done = here("eval", tiny_model_dir, smaller, *options, "--json")
    assert done.code == 0, done.stderr
    assert done.stderr == "comparing ...\n"
    with mlxserve.load(tiny_model_dir) as a, mlxserve.load(smaller) as b:
        want = compare(a, b, TEXT, context=40, stride=20)
    assert json.loads(done.stdout) == pytest.approx(
        {
            "perplexity_a": want.reference_perplexity,
            "perplexity_b": want.perplexity,
            "kl_mean": want.mean_divergence,
            "kl_p95": want.p95_divergence,
            "top1_agreement": want.agreement,
            "tokens": len(TEXT.encode()) - 1,
            "context": 40,
            "stride": 20,
        }
    )
    assert want.mean_divergence > 0

    plain = here("eval", tiny_model_dir, smaller, *options, "--quiet")
    lines = dict(line.split(": ") for line in plain.stdout.splitlines())
    assert lines["kl_mean"] == f"{want.mean_divergence:.4f}"
    assert (lines["tokens"], plain.stderr) == (str(want.tokens), "")


def test_each_alone_has_the_same_perplexity(here, tiny_model_dir, smaller, text_file):
    windows = ("--context", "64", "--stride", "64", "--json", "-q")
    both = json.loads(here("eval", tiny_model_dir, smaller, "--text", text_file, *windows).stdout)
    for model, name in ((tiny_model_dir, "perplexity_a"), (smaller, "perplexity_b")):
        one = json.loads(here("eval", model, "--perplexity", text_file, *windows).stdout)
        assert both[name] == pytest.approx(one["perplexity"], rel=1e-5)


def test_the_shipped_text_is_the_default(here, tiny_model_dir, smaller):
    done = here("eval", tiny_model_dir, smaller, "--json", "-q")
    assert json.loads(done.stdout)["tokens"] == len(HELD_OUT.read_bytes()) - 1


def test_refusals(here, tiny_model_dir, smaller, text_file, tmp_path):
    pair = ("eval", tiny_model_dir, smaller)
    text = ("--text", text_file)
    assert_refused(here(*pair, "--perplexity", text_file), "--perplexity is for one model")
    assert_refused(here("eval", tiny_model_dir, *text), "--perplexity is missing", "two models")
    assert_refused(here("eval", tiny_model_dir), "--perplexity is missing")
    assert_refused(here(*pair, "--text", tmp_path / "none"), "none", "No such file")
    assert_refused(here(*pair, *text, "--context", "0"), "--context is 0")
    assert_refused(here(*pair, *text, "--context", "5000"), "--context is 5000", "2048")
    assert_refused(here(*pair, *text, "--context", "8", "--stride", "9"), "--stride is 9")
    assert_refused(here(*pair, *text, "--memory", "0.001"), "the two models take")
    assert_refused(here("eval", tiny_model_dir, tmp_path / "gone", *text), "gone")
    (tmp_path / "other").mkdir()
    other = write_thinking_model_dir(tmp_path / "other")
    assert_refused(
        here("eval", tiny_model_dir, other, *text),
        f"vocabularies of {VOCAB_SIZE} and {VOCAB_SIZE + 2} tokens",
    )
