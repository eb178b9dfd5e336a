"""The commands over a Hub on loopback: what is said, asked and refused before a download."""

import json
import os
import pty
import select
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.conftest import MLXSERVE
from tests.sources.making import write_gguf
from tests.support.hub_server import serving

# Starts a process or a server per test, too long for `make check`.
pytestmark = pytest.mark.full


@pytest.fixture
def hub(cli, tmp_path, tiny_model_dir):
    """A Hub with `tester/tiny` that the program's runs use, with an empty cache."""
    with serving() as server:
        server.add_directory("tester/tiny", tiny_model_dir)
        cli.env |= server.env(tmp_path / "hf")
        cli.env.pop("HF_TOKEN")
        yield server


@pytest.fixture
def snapshots(tmp_path) -> Path:
    return tmp_path / "hf" / "hub" / "models--tester--tiny" / "snapshots"


@pytest.fixture
def at_terminal(cli):
    """Runs the program at a terminal of its own, which types `answer` once asked."""

    def run(*args: str, answer: str) -> tuple[int, str]:
        master, slave = pty.openpty()
        process = subprocess.Popen(
            [MLXSERVE, *args], stdin=slave, stdout=slave, stderr=slave, env=cli.env
        )
        os.close(slave)
        seen, end = "", time.monotonic() + 60
        while time.monotonic() < end:
            if select.select([master], [], [], 0.1)[0]:
                try:
                    data = os.read(master, 65536)
                except OSError:
                    break
                if not data:
                    break
                seen += data.decode()
                if answer and "[y/N]" in seen:
                    os.write(master, answer.encode())
                    answer = ""
        os.close(master)
        return process.wait(30), seen

    return run


def test_load_downloads_and_answers(cli, hub):
    source = """
import mlxserve
with mlxserve.load("tester/tiny") as llm:
    print(len(mlxserve.generate(llm, "Hello", max_tokens=5, ignore_eos=True).token_ids))
"""
    done = cli.python(source)
    assert (done.code, done.stdout, done.stderr) == (0, "5\n", "")
    asked = len(hub.asked)
    assert cli.python(source, HF_HUB_OFFLINE="1").stdout == "5\n"
    assert len(hub.asked) == asked
    gone = cli.python(source, HF_ENDPOINT="http://127.0.0.1:9")
    assert gone.stdout == "5\n"
    assert gone.stderr.startswith("using the copy of tester/tiny that is here: ")


def test_pull_says_what_it_takes_and_is_refused_without_a_terminal(cli, hub, snapshots):
    done = cli("pull", "tester/tiny")
    assert (done.code, done.stdout) == (2, "")
    *table, error = done.stderr.splitlines()
    assert [line.split()[0] for line in table] == [
        "tester/tiny", "download", "disk", "memory", "fits", "speed",
    ]  # fmt: skip
    assert "llama" in table[0]
    assert "for 2,048 tokens of context" in table[3]
    assert "yes, with room for 2,048 tokens" in table[4]
    assert "tokens/s" in table[5]
    assert error.startswith("error: there is no terminal to ask at; tester/tiny: add --yes")
    assert not snapshots.exists()


def test_pull_then_ls_then_generate_then_rm(cli, hub, snapshots):
    done = cli("pull", "tester/tiny", "--yes")
    assert done.code == 0
    [snapshot] = snapshots.iterdir()
    assert done.stdout == f"{snapshot}\n"
    assert "downloading ..." in done.stderr
    assert cli("pull", "tester/tiny") == (0, f"{snapshot}\n", "")
    verified = cli("pull", "tester/tiny", "--verify")
    assert (verified.code, verified.stdout) == (0, f"{snapshot}\n")
    assert cli("ls", "--paths") == (0, f"tester/tiny\t{snapshot}\n", "")
    assert cli("ls").stdout.splitlines()[1].split()[-2:] == ["llama", str(snapshot)]
    done = cli("generate", "-m", "tester/tiny", "-p", "Hi", "-n", "3", "-q", HF_HUB_OFFLINE="1")
    assert (done.code, done.stderr) == (0, "")
    assert cli("rm", "tester/tiny").code == 2
    assert snapshot.is_dir()
    done = cli("rm", "tester/tiny", "--yes")
    assert (done.code, done.stdout) == (0, "")
    assert done.stderr.startswith("removed tester/tiny, ")
    assert not snapshots.parent.exists()
    assert cli("ls").stdout == ""
    assert "is not on this machine" in cli("rm", "tester/tiny", "--yes").stderr


def test_pull_quiet(cli, hub):
    done = cli("pull", "tester/tiny", "--yes", "--quiet")
    assert (done.code, done.stderr) == (0, "")


def test_pull_asks_at_a_terminal(hub, at_terminal, snapshots):
    code, seen = at_terminal("pull", "tester/tiny", answer="n\n")
    assert code == 1
    assert "Download" in seen
    assert "nothing was done" in seen
    assert not snapshots.exists()
    code, seen = at_terminal("pull", "tester/tiny", answer="y\n")
    assert code == 0
    assert str(next(snapshots.iterdir())) in seen.replace("\r\n", "")


def test_plan_needs_the_config_only(cli, hub, snapshots, tiny_model_dir):
    done = cli("plan", "tester/tiny", "--json")
    assert (done.code, done.stderr) == (0, "")
    assert hub.downloads() == ["config.json"]
    assert not snapshots.exists()
    here = json.loads(cli("plan", str(tiny_model_dir), "--json").stdout)
    plan = json.loads(done.stdout)
    assert plan["cache"] == here["cache"]
    assert plan["memory"]["weight_bytes"] == pytest.approx(here["memory"]["weight_bytes"], rel=0.1)
    assert cli("pull", "tester/tiny", "--yes", "-q").code == 0
    hub.asked.clear()
    assert json.loads(cli("plan", "tester/tiny", "--json").stdout)["cache"] == plan["cache"]
    assert hub.asked == []


def test_generate_never_downloads_unasked(cli, hub, snapshots, at_terminal):
    done = cli("generate", "-m", "tester/tiny", "-p", "Hi", "-n", "3")
    assert (done.code, done.stdout) == (2, "")
    assert "`mlxserve pull tester/tiny --yes` downloads it" in done.stderr.splitlines()[-1]
    assert not snapshots.exists()
    code, _ = at_terminal("generate", "-m", "tester/tiny", "-p", "Hi", "-n", "3", answer="y\n")
    assert code == 0
    assert snapshots.exists()


def test_generate_stays_at_the_version_that_is_here(cli, hub, snapshots, tiny_model_dir):
    assert cli("pull", "tester/tiny", "--yes").code == 0
    files = {p.name: p.read_bytes() for p in tiny_model_dir.iterdir()}
    hub.add("tester/tiny", files | {"generation_config.json": b"{}"})
    done = cli("generate", "-m", "tester/tiny", "-p", "Hi", "-n", "3")
    assert done.code == 0
    assert "there is a newer tester/tiny; `mlxserve pull tester/tiny` downloads it" in done.stderr
    assert len(list(snapshots.iterdir())) == 1


def test_a_model_that_cannot_be_run_is_refused_before_the_download(cli, hub, tiny_model_dir):
    files = {p.name: p.read_bytes() for p in tiny_model_dir.iterdir()}
    hub.add("tester/odd", files | {"config.json": b'{"model_type": "mamba"}'})
    hub.asked.clear()
    done = cli("pull", "tester/odd", "--yes")
    assert done.code == 2
    assert "model_type 'mamba' isn't supported" in done.stderr
    assert hub.downloads() == ["config.json"]


def test_rm_of_one_gguf_and_of_one_revision(cli, hub, tmp_path, tiny_model_dir):
    hub_cache = tmp_path / "hf" / "hub"
    data = write_gguf(tmp_path / "a.gguf").read_bytes()
    hub.add("tester/ggufs", {"m.Q4_0.gguf": data, "m.Q8_0.gguf": data + b"\0" * 32})
    for path in ("Q4_0", "Q8_0"):
        code = f"""
from mlxserve.sources import resolve
print(resolve.resolve("tester/ggufs:{path}"))"""
        assert cli.python(code).code == 0
    names = [line.split("\t")[0] for line in cli("ls", "--paths").stdout.splitlines()]
    assert names == ["tester/ggufs/m.Q4_0.gguf", "tester/ggufs/m.Q8_0.gguf"]
    assert cli("rm", names[0], "--yes").code == 0
    assert cli("ls", "--paths").stdout.split("\t")[0] == "tester/ggufs"
    assert len(list((hub_cache / "models--tester--ggufs" / "blobs").iterdir())) == 1
    assert cli("rm", "tester/ggufs:Q8_0", "--yes").code == 0
    assert not (hub_cache / "models--tester--ggufs").exists()

    files = {p.name: p.read_bytes() for p in tiny_model_dir.iterdir()}
    hub.add("tester/tiny", files | {"generation_config.json": b"{}"}, "v1")
    for name in ("tester/tiny", "tester/tiny@v1"):
        assert cli("pull", name, "--yes", "-q").code == 0
    done = cli("rm", "tester/tiny@v1", "--yes")
    assert (done.code, done.stderr) == (0, "removed tester/tiny@v1, 2 bytes\n")
    assert cli("ls", "--paths").stdout.startswith("tester/tiny\t")
    assert cli("pull", "tester/tiny").stderr == ""


@pytest.mark.parametrize(
    ("status", "text"),
    [(401, "(401)"), (403, "(403"), (404, "(404)"), (429, "rate limit"), (500, "(500)")],
)
def test_a_hub_that_refuses(cli, hub, status, text):
    hub.statuses = {"/api/": (status, {})}
    done = cli("pull", "tester/tiny", "--yes")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: tester/tiny") or "public model tester/tiny" in done.stderr
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


def test_ctrl_c(cli, hub, snapshots):
    import signal

    hub.go.clear()
    with cli.start("pull", "tester/tiny", "--yes") as process:
        assert hub.half.wait(60)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert cli("ls", "--paths").stdout == ""
    hub.go.set()
    assert cli("pull", "tester/tiny", "--yes").code == 0
