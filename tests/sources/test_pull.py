"""Pulling through the real pip, from a folder or a loopback server, and what goes wrong."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlxserve.errors import ModelError
from mlxserve.sources.catalog import CATALOG
from mlxserve.sources.pull import InstalledModel, installed, pull, resolve
from tests.sources.making import one_line, write_wheel
from tests.sources.wheel_server import serving

CONTENT = random.Random(0).randbytes(3_000_000)

CHILD = """
import json, resource, sys
from mlxserve.sources.catalog import CatalogEntry
from mlxserve.sources.pull import pull
limit = int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
seen = []
try:
    path = pull("tiny", lambda *a: seen.append(a), catalog={"tiny":
    CatalogEntry(**json.loads(sys.argv[1]))})
except Exception as e:
    print(json.dumps({"error": type(e).__name__, "text": str(e)}))
else:
    print(json.dumps({"path": str(path), "waited": ("wait", 0, None) in seen}))
"""  # fmt: skip


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel in a folder that pip is told to look in, and only there."""
    path, entry = write_wheel(tmp_path / "wheels", CONTENT)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return path, entry


def left(home):
    """What lies in the cache beside locks."""
    return sorted(p.name for p in home.rglob("*") if p.is_file() and p.name != ".lock")


def child(entry, env=None, limit=0):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(dataclasses.asdict(entry)), str(limit)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | (env or {}),
    )


def test_pull_then_there(home, wheel, capfd):
    catalog = {"tiny": wheel[1]}
    assert installed(catalog=catalog) == []
    stages = []
    path = pull("tiny", lambda *a: stages.append(a), catalog=catalog)
    assert path == home / "models/tiny/model.gguf"
    assert path.read_bytes() == CONTENT
    assert left(home) == ["model.gguf"]
    assert stages[-1] == ("unpack", len(CONTENT), len(CONTENT))
    assert {s[0] for s in stages} >= {"check", "unpack"}
    assert installed(catalog=catalog) == [InstalledModel("tiny", path, len(CONTENT))]
    wheel[0].unlink()
    assert pull("tiny", catalog=catalog) == path
    assert pull("tiny", catalog=catalog, verify=True) == path
    assert resolve("tiny", catalog=catalog) == path
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_verify_pulls_a_damaged_file_again(home, wheel):
    catalog = {"tiny": wheel[1]}
    path = pull("tiny", catalog=catalog)
    path.write_bytes(bytes(len(CONTENT)))
    assert pull("tiny", catalog=catalog) == path  # the cheap check sees the size only
    assert pull("tiny", catalog=catalog, verify=True).read_bytes() == CONTENT


def test_a_file_of_the_wrong_size_is_pulled_again(home, wheel):
    path = home / "models/tiny/model.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:-1])
    assert installed(catalog={"tiny": wheel[1]}) == []
    assert pull("tiny", catalog={"tiny": wheel[1]}).read_bytes() == CONTENT


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256", "size_bytes", "member"])
def test_contents_other_than_promised(home, wheel, field):
    wrong = {
        "wheel_sha256": "0" * 64,
        "sha256": "1" * 64,
        "size_bytes": len(CONTENT) - 1,
        "member": "tiny_model/other.gguf",
    }[field]
    entry = dataclasses.replace(wheel[1], **{field: wrong})
    with pytest.raises(ModelError, match="pull again") as e:
        pull("tiny", catalog={"tiny": entry})
    assert one_line(e.value, wheel[0].name)
    assert left(home) == []


def test_a_wheel_that_is_not_there(home, wheel):
    wheel[0].unlink()
    with pytest.raises(ModelError, match="No matching distribution found") as e:
        pull("tiny", catalog={"tiny": wheel[1]})
    assert one_line(e.value, "tiny-model==1.0", "pip config list")
    assert left(home) == []


def test_too_little_space_is_said_before_the_download(home, wheel):
    entry = dataclasses.replace(wheel[1], size_bytes=1 << 60)
    wheel[0].unlink()
    with pytest.raises(ModelError, match="MLXSERVE_HOME") as e:
        pull("tiny", catalog={"tiny": entry})
    assert one_line(e.value, "needs 1,152,9", "MB", home)


@pytest.mark.parametrize("limit", [1_000_000, 2_500_000])
def test_a_disk_that_fills_up(home, tmp_path, monkeypatch, limit):
    """The first limit hits pip; the second, over a wheel that packs well, hits our own writing."""
    content = CONTENT if limit == 1_000_000 else bytes(3_000_000)
    wheel, entry = write_wheel(tmp_path / "w", content)
    env = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent), "PIP_CONFIG_FILE": os.devnull}
    out, _ = child(entry, env, limit).communicate()
    result = json.loads(out)
    assert result["error"] == "ModelError"
    assert "File too large" in result["text"]
    assert "\n" not in result["text"]
    assert left(home) == []


def test_a_cache_that_cannot_be_written(tmp_path, wheel, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="MLXSERVE_HOME"):
        pull("tiny", catalog={"tiny": wheel[1]})


def test_progress_of_a_download(home, wheel, monkeypatch):
    with serving(wheel[0]) as server:
        for key, value in server.env.items():
            monkeypatch.setenv(key, value)
        seen = []
        pull("tiny", lambda *a: seen.append(a), catalog={"tiny": wheel[1]})
    size = wheel[0].stat().st_size
    downloads = [s for s in seen if s[0] == "download"]
    assert downloads[0] == ("download", 0, size)
    assert downloads[-1] == ("download", size, size)


def test_an_error_in_the_callback_ends_pip(home, wheel, monkeypatch):
    def interrupt(stage, done, total):
        raise KeyboardInterrupt

    with serving(wheel[0]) as server:
        server.go.clear()
        for key, value in server.env.items():
            monkeypatch.setenv(key, value)
        with pytest.raises(KeyboardInterrupt):
            pull("tiny", interrupt, catalog={"tiny": wheel[1]})
        assert server.gone.wait(20)
    assert left(home) == []


def test_ctrl_c_ends_pip_and_leaves_nothing(home, wheel):
    with serving(wheel[0]) as server:
        server.go.clear()
        process = child(wheel[1], server.env)
        assert server.half.wait(60)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert "KeyboardInterrupt" in err
        assert server.gone.wait(20)
    assert left(home) == []
    assert [p.name for p in (home / "models/tiny").iterdir()] == [".lock"]


def test_a_killed_pull_is_cleaned_up_by_the_next(home, wheel):
    with serving(wheel[0]) as server:
        server.go.clear()
        process = child(wheel[1], server.env)
        assert server.half.wait(60)
        process.kill()
        process.communicate()
        assert list((home / "models/tiny").glob("tmp-*"))
        server.go.set()
        out, _ = child(wheel[1], server.env).communicate()
    assert Path(json.loads(out)["path"]).read_bytes() == CONTENT
    assert sorted(p.name for p in (home / "models/tiny").iterdir()) == [".lock", "model.gguf"]


def test_two_at_once_download_once(home, wheel):
    with serving(wheel[0]) as server:
        server.go.clear()
        first = child(wheel[1], server.env)
        assert server.half.wait(60)
        second = child(wheel[1], server.env)
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(3)
        server.go.set()
        results = [json.loads(p.communicate()[0]) for p in (first, second)]
        assert server.wheels == 1
    assert [r["waited"] for r in results] == [False, True]
    assert {r["path"] for r in results} == {str(home / "models/tiny/model.gguf")}
    assert left(home) == ["model.gguf"]


def test_resolve_takes_paths_as_they_are(home, tmp_path, monkeypatch):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert resolve(file) == resolve(str(file)) == file
    assert resolve("m.gguf") == Path("m.gguf")
    assert resolve(tmp_path) == tmp_path
    assert resolve(".") == Path()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/m.gguf") == file


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("smolm2-135m", ["did you mean smollm2-135m?"]),
        ("SmolLM2-135M", ["did you mean smollm2-135m?"]),
        ("qwerty", ["give one of smollm2-135m"]),
        ("HuggingFaceTB/SmolLM2-135M", ["Hub", "not supported yet", "smollm2-135m"]),
        ("/no/such/dir", ["'/no/such/dir'"]),
        ("", ["''"]),
        ("a\nb\0", [r"'a\nb\x00'"]),
        ("x" * 10000, ["xxx..."]),
        ("~nobody-here/x", ["~nobody-here/x"]),
    ],
)
def test_unknown_names(home, tmp_path, monkeypatch, name, parts):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as e:
        resolve(name)
    assert one_line(e.value, "smollm2-135m", *parts), str(e.value)
    with pytest.raises(ModelError):
        pull(name)


def test_the_catalog_is_sound():
    for name, entry in CATALOG.items():
        assert name == name.lower()
        assert len(entry.sha256) == len(entry.wheel_sha256) == 64
        assert entry.file_name in entry.member


@pytest.mark.real
def test_the_default_model_has_the_catalogs_checksum(smollm2_gguf):
    import hashlib

    assert hashlib.sha256(smollm2_gguf.read_bytes()).hexdigest() == CATALOG["smollm2-135m"].sha256
