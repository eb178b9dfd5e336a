"""`mlxserve convert` and `python -m convert`: options, output, downloads, interruption."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.convert.sources import config, tensors, tiny, write
from tests.support.hub_server import serving
from tests.support.hub_upload_server import TOKEN, serving_uploads

ROOT = Path(__file__).parents[2]
QUICKLY = ("--no-quality", "-q")


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "src")


def test_options_reach_the_conversion(here, source, tmp_path):
    out = tmp_path / "out"
    done = here(
        "convert", "--from", source, "--to", out, "--q-bits", "3", "--q-group-size", "32",
        "--mixed", "embeddings_8", "--dtype", "float16", "--no-quality",
    )  # fmt: skip
    assert (done.code, done.stdout) == (0, f"{out}\n")
    assert "bits per weight" in done.stderr
    block = config(out)["quantization"]
    assert (block["bits"], block["group_size"], block["mode"]) == (3, 32, "affine")
    assert block["lm_head"] == {"bits": 8, "group_size": 32, "mode": "affine"}
    assert str(tensors(out)["model.norm.weight"].dtype) == "mlx.core.float16"

    again = here("convert", "--from", out, "--to", tmp_path / "dense", "--dequantize", *QUICKLY)
    assert (again.code, again.stderr) == (0, "")
    assert tensors(tmp_path / "dense").keys() == tiny().weights.keys()
    floats = here(
        "convert", "--from", source, "--to", tmp_path / "fp", "--q-mode", "mxfp4", *QUICKLY
    )
    assert floats.code == 0
    assert config(tmp_path / "fp")["quantization"]["mode"] == "mxfp4"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--q-bits", "7"], "error: --q-bits is 7; affine takes 2, 3, 4, 5, 6, 8"),
        (["--q-bits", "four"], "'four' isn't a whole number"),
        (["--q-mode", "int8"], "error: --q-mode is 'int8'"),
        (["--mixed", "mixed_4_7"], "recipe 'mixed_4_7' is unknown (did you mean mixed_4_6?)"),
        (["--q-bits", "4", "--q-group-size", "48"], "error: --q-group-size is 48"),
        (["--dtype", "fp16"], "error: --dtype is 'fp16'"),
        (["--dequantize"], "error: --dequantize is set, and"),
        (["--private"], "error: --private is set, and nothing is to be uploaded"),
    ],
)
def test_wrong_options_are_one_line(here, source, tmp_path, options, why):
    done = here("convert", "--from", source, "--to", tmp_path / "out", *options)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert why in done.stderr
    assert not (tmp_path / "out").exists()


def test_help_names_the_choices(here):
    text = here("convert", "--help").stdout
    for word in ("--from", "--to", "--q-bits", "mxfp4", "--mixed", "--dequantize", "bfloat16"):
        assert word in text


@pytest.mark.full
def test_python_m_convert(cli, source, tmp_path):
    command = [sys.executable, "-m", "convert", "--from", str(source), "--to", str(tmp_path / "o")]
    done = subprocess.run(
        [*command, "--q-bits", "4", "--no-quality"],
        cwd=ROOT,
        env=cli.env,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'o'}\n")
    assert done.stderr.splitlines()[0] == "converting ..."


@pytest.mark.full
def test_a_model_of_the_hub(cli, tmp_path, tiny_model_dir):
    """It is described and asked about as `pull` does, and the card names it."""
    with serving() as server:
        server.add_directory("tester/tiny", tiny_model_dir)
        cli.env |= server.env(tmp_path / "hf")
        cli.env.pop("HF_TOKEN")
        command = [
            "convert",
            "--from",
            "tester/tiny",
            "--to",
            str(tmp_path / "out"),
            "--no-quality",
        ]
        asked = cli(*command, "--q-bits", "4", "--q-group-size", "32")
        assert asked.code == 2
        assert "there is no terminal to ask at" in asked.stderr
        assert not (tmp_path / "out").exists()
        wrong = cli(*command, "--q-bits", "7", "--yes")
        assert "--q-bits is 7" in wrong.stderr
        assert not (tmp_path / "hf" / "hub" / "models--tester--tiny" / "blobs").exists()
        done = cli(*command, "--q-bits", "4", "--q-group-size", "32", "--yes")
    assert (done.code, done.stdout) == (0, f"{tmp_path / 'out'}\n")
    assert "base_model: tester/tiny\n" in (tmp_path / "out" / "README.md").read_text()
    assert config(tmp_path / "out")["quantization"]["group_size"] == 32


@pytest.mark.full
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_command_goes_on(cli, tmp_path, sent):
    """Killed in the middle, by what a user or a system sends."""
    source = write(tmp_path / "src", tiny(num_hidden_layers=40, vocab_size=20_000))
    out, growing = tmp_path / "out", tmp_path / ".out.converting"
    command = ["convert", "--from", str(source), "--to", str(out), "--q-mode", "mxfp4"]
    command += ["--no-quality"]
    with cli.start(*command) as process:
        while not (growing / "journal").exists() or not (growing / "journal").stat().st_size:
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(sent)
        code = process.wait(60)
    if code == 0:
        pytest.skip("only on machines that take long enough")
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(sent, -sent)
    assert not out.exists()
    written = (growing / "journal").read_text().count("\n")
    assert written
    done = cli(*command)
    assert done.code == 0, done.stderr
    assert "going on with an interrupted conversion" in done.stderr
    assert not growing.exists()
    assert len(json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]) > 300
    assert os.listdir(tmp_path).count("out") == 1


@pytest.mark.full
def test_what_it_cost_is_printed_and_reported(here, source, tmp_path):
    out = tmp_path / "out"
    done = here("convert", "--from", source, "--to", out, "--q-bits", "4", "--report")
    assert (done.code, done.stdout) == (0, f"{out}\n")
    lines = done.stderr.splitlines()
    assert lines[:2] == ["converting ...", "comparing ..."]
    names = ["bits per weight", "size", "error of weights", "largest errors", "perplexity"]
    names += ["KL divergence", "same likeliest token"]
    for line, name in zip(lines[2:], names, strict=True):
        assert line.startswith(f"{name:20}  ")
    assert {"report.md", "report-errors.png", "report-divergence.png"} <= set(os.listdir(out))


@pytest.mark.full
def test_an_upload(cli, source, tmp_path):
    """Through HF_ENDPOINT and HF_TOKEN, as a user sets them."""
    with serving_uploads() as server:
        cli.env |= server.env(tmp_path / "hf") | {"HF_HUB_DISABLE_XET": "1"}
        command = ["convert", "--from", str(source), "--q-bits", "4", "--no-quality"]
        command += ["--upload-repo", "me/tiny", "--private"]
        refused = cli(*command, "--to", str(tmp_path / "out"), HF_TOKEN="")
        assert refused.code == 2
        assert refused.stderr.startswith("error: --upload-repo is me/tiny, and there is no token")
        assert not (tmp_path / "out").exists()
        done = cli(*command, "--to", str(tmp_path / "out"), HF_TOKEN=TOKEN)
        assert done.code == 0, done.stderr
        assert "uploading ...\n" in done.stderr
        assert f"{server.url}/me/tiny\n" in done.stderr
        assert server.private == {"me/tiny": True}
        assert server.files("me/tiny").keys() == set(os.listdir(tmp_path / "out"))
        taken = cli(*command, "--to", str(tmp_path / "again"), HF_TOKEN=TOKEN)
    assert taken.stderr.startswith("error: --upload-repo is me/tiny, which exists already")
    assert taken.stderr.count("\n") == 1
    assert not (tmp_path / "again").exists()
