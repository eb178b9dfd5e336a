"""What a conversion cost: measured while it is written, and against its source."""

import os
import signal
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from mlxserve_convert import quality, stream

import mlxserve
from mlxserve.comparison import compare
from mlxserve.errors import RequestError
from tests.convert.sources import config, convert, linears, tensors, tiny, write
from tests.convert.test_interruption import killed


def expected_errors(source, made):
    """By module, in float64, from the files themselves; and over all."""
    found, block = tensors(made), config(made)["quantization"]
    errors, sums = {}, np.zeros(2)
    for module in linears(source):
        if f"{module}.scales" not in found:
            continue
        how = block.get(module, block)
        scales, biases = found[f"{module}.scales"], found.get(f"{module}.biases")
        if biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        back = mx.dequantize(
            found[f"{module}.weight"], scales, biases, how["group_size"], how["bits"],
            mode=how["mode"], dtype=mx.float32,
        )  # fmt: skip
        w = np.array(source[f"{module}.weight"].astype(mx.float32), np.float64)
        pair = np.array([((np.array(back, np.float64) - w) ** 2).sum(), (w**2).sum()])
        errors[module] = np.sqrt(pair[0] / pair[1])
        sums += pair
    return errors, np.sqrt(sums[0] / sums[1])


def expect_errors(cost, source, made):
    errors, error = expected_errors(source, made)
    assert dict(cost.errors) == pytest.approx(errors, rel=1e-3)
    assert cost.error == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize(
    "options",
    [{"bits": 4}, {"mode": "mxfp4"}, {"mode": "nvfp4"}, {"recipe": "mixed_2_6", "group_size": 32}],
    ids=str,
)
def test_errors_are_those_of_the_files(tmp_path, monkeypatch, options):
    monkeypatch.setattr(stream, "PIECE_BYTES", 96 * 256)  # several pieces to a matrix
    model = tiny()
    made = convert(write(tmp_path / "src", model), tmp_path / "out", **options)
    expect_errors(made.quality, model.weights, made.path)
    assert made.quality.comparison is None
    assert made.quality.not_compared == "it was left out"
    worst = made.quality.worst(2)
    assert [error for _, error in worst] == sorted(made.quality.errors.values())[:-3:-1]
    card = (made.path / "README.md").read_text()
    for name, error in worst:
        assert f"{name} {error:.1%}" in card


@pytest.mark.full
def test_errors_outlive_an_interruption(tmp_path):
    model = tiny()
    source = write(tmp_path / "src", model)
    killed(source, tmp_path / "out", 7)
    made = convert(source, tmp_path / "out", bits=4)
    expect_errors(made.quality, model.weights, made.path)


def test_nothing_quantised_has_no_error(tmp_path):
    made = convert(write(tmp_path / "src"), tmp_path / "out")
    assert (made.quality.errors, made.quality.error) == ({}, 0)
    assert "error of weights" not in (made.path / "README.md").read_text()


@pytest.fixture
def short_text(monkeypatch, tmp_path):
    path = tmp_path / "text"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 5)
    monkeypatch.setattr(quality, "HELD_OUT", path)
    return path.read_text()


def test_the_result_is_compared_with_its_source(tmp_path, short_text):
    source = write(tmp_path / "src")
    made = convert(source, tmp_path / "out", bits=2, quality=True)
    found = made.quality.comparison
    with mlxserve.load(source) as a, mlxserve.load(made.path) as b:
        want = compare(a, b, short_text)
    assert found is not None
    assert found.mean_divergence == want.mean_divergence > 0
    assert (found.perplexity, found.agreement) == (want.perplexity, want.agreement)
    assert found.tokens == len(short_text) - 1
    card = (made.path / "README.md").read_text()
    assert f"| perplexity | {want.perplexity:.3f}, the source's" in card
    assert f"mean {want.mean_divergence:.4f}, 95th percentile {want.p95_divergence:.4f}" in card
    assert f"{want.agreement:.1%} of {want.tokens:,} tokens" in card


@pytest.mark.usefixtures("short_text")
def test_what_doesn_t_fit_or_load_isn_t_compared_and_says_so(tmp_path, monkeypatch):
    source = write(tmp_path / "src")
    with monkeypatch.context() as patch:
        patch.setattr("mlxserve.comparison.device_limit_bytes", lambda: 1 << 20)
        made = convert(source, tmp_path / "out", bits=4, quality=True)
    assert made.quality.comparison is None
    assert "the two models take" in made.quality.not_compared
    assert "not measured: the two models take" in (made.path / "README.md").read_text()
    assert made.quality.errors

    (source / "tokenizer.json").unlink()
    made = convert(source, tmp_path / "again", bits=4, quality=True)
    assert "tokenizer" in made.quality.not_compared
    assert (made.path / "model.safetensors").exists()


@pytest.mark.full
def test_an_interruption_while_comparing_keeps_what_is_written(tmp_path):
    source = write(tmp_path / "src")
    code = (
        "import os, signal, sys\n"
        "from mlxserve_convert import conversion, convert\n"
        "conversion.measure = lambda *args: os.kill(os.getpid(), signal.SIGINT)\n"
        "convert(sys.argv[1], sys.argv[2], bits=4)\n"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT
    assert not (tmp_path / "out").exists()
    assert ".out.converting" in os.listdir(tmp_path)
    made = convert(source, tmp_path / "out", bits=4)
    assert made.quality.errors


@pytest.mark.full
@pytest.mark.usefixtures("short_text")
def test_report(tmp_path):
    source = write(tmp_path / "src")
    made = convert(source, tmp_path / "out", bits=4, quality=True, report=True)
    text = (made.path / "report.md").read_text()
    for name, error in made.quality.errors.items():
        assert f"| {name} | 4 bits in groups of 64 | {error:.2%} |" in text
    for plot in ("report-errors.png", "report-divergence.png"):
        assert f"({plot})" in text
        assert (made.path / plot).read_bytes().startswith(b"\x89PNG")
    assert "[report.md](report.md)" in (made.path / "README.md").read_text()

    plain = convert(source, tmp_path / "plain", dtype="float16", report=True)
    assert "left out" in (plain.path / "report.md").read_text()
    assert not list(plain.path.glob("*.png"))


def test_a_report_without_matplotlib_is_refused_before_work(tmp_path, monkeypatch):
    monkeypatch.setattr("mlxserve_convert.report.find_spec", lambda name: None)
    with pytest.raises(RequestError) as error:
        convert(write(tmp_path / "src"), tmp_path / "out", bits=4, report=True)
    assert "pip install 'mlxserve[report]'" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_the_texts_are_long_and_have_no_paragraph_in_common():
    texts = [quality.HELD_OUT, quality.TEXTS / "calibration.txt"]
    paragraphs = [set(path.read_text(encoding="utf-8").split("\n\n")) for path in texts]
    assert paragraphs[0].isdisjoint(paragraphs[1])
    assert all(len(path.read_text(encoding="utf-8").split()) > 1300 for path in texts)
