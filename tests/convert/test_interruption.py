"""Interrupted conversions go on, and the target is whole or not there."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest
from mlxserve_convert import directory_source, stream, workspace

from mlxserve.errors import ModelError
from tests.convert.sources import bits, convert, tensors, tiny, write

# Starts a process for most tests, too long for `make check`.
pytestmark = pytest.mark.full

KILLED = """
import os, signal, sys
from mlxserve_convert import convert, workspace
written = 0
finished = workspace.Workspace.finished
def kill(self, *facts):
    global written
    finished(self, *facts)
    written += 1
    if written == int(sys.argv[3]):
        os.kill(os.getpid(), getattr(signal, sys.argv[4]))
workspace.Workspace.finished = kill
convert(sys.argv[1], sys.argv[2], bits=4, quality=False)
"""


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "src")


@pytest.fixture
def fetched(monkeypatch):
    """The names of the tensors that are read."""
    names = []
    fetch = directory_source.Plain.fetch

    def recorded(self, *piece):
        names.append(self.name)
        return fetch(self, *piece)

    monkeypatch.setattr(directory_source.Plain, "fetch", recorded)
    return names


def killed(source, target, after, how="SIGKILL"):
    command = [sys.executable, "-c", KILLED, str(source), str(target), str(after), how]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert not target.exists()
    return done


def growing(target):
    return target.parent / f".{target.name}.converting"


def expect_whole(target, source, tmp_path):
    """What an uninterrupted conversion gives, and nothing else."""
    other = convert(source, tmp_path / "other", bits=4).path
    got, want = tensors(target), tensors(other)
    assert got.keys() == want.keys()
    assert all(bits(got[name]) == bits(w) for name, w in want.items())
    assert {p.name for p in target.iterdir()} == {p.name for p in other.iterdir()}
    assert not growing(target).exists()


@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT"])
def test_a_killed_conversion_goes_on(source, tmp_path, fetched, caplog, how):
    target = tmp_path / "out"
    killed(source, target, 7, how)
    journal = (growing(target) / "journal").read_text().splitlines()
    lines = [json.loads(line)["checksums"] for line in journal]
    written = {name for line in lines for name in line if name.endswith("weight")}
    assert len(written) >= 7
    convert(source, target, bits=4)
    assert written.isdisjoint(fetched)
    assert set(fetched) == tiny().weights.keys() - written
    assert "going on with an interrupted conversion" in caplog.text
    expect_whole(target, source, tmp_path)


def test_what_a_crash_lost_is_written_again(source, tmp_path, fetched):
    """As after a power cut: the journal says written, and the bytes never reached the disk."""
    target = tmp_path / "out"
    killed(source, target, 7)
    shard = growing(target) / "model.safetensors"
    size = shard.stat().st_size
    with shard.open("r+b") as f:
        header = 8 + int.from_bytes(f.read(8), "little")
        f.seek(header)
        f.write(b"\0" * 4096)
    assert shard.stat().st_size == size
    convert(source, target, bits=4)
    assert "model.embed_tokens.weight" in fetched
    expect_whole(target, source, tmp_path)


@pytest.mark.parametrize("damage", ["journal", "state", "shard"])
def test_a_damaged_rest_is_no_trap(source, tmp_path, damage):
    target = tmp_path / "out"
    killed(source, target, 7)
    if damage == "journal":
        with (growing(target) / "journal").open("ab") as f:
            lines = [b'{"checksums": \xff', b"[1]", b'{"checksums": 1, "squares": null}']
            lines += [b'{"checksums": {"nothing": 1}, "squares": null}', b'{"checksums": {"mod']
            f.write(b"\n".join(lines))
    elif damage == "state":
        (growing(target) / "state.json").write_text("{")
    else:
        (growing(target) / "model.safetensors").unlink()
    convert(source, target, bits=4)
    expect_whole(target, source, tmp_path)


def test_another_recipe_starts_over_and_says_so(source, tmp_path, fetched, caplog):
    target = tmp_path / "out"
    killed(source, target, 7)
    made = convert(source, target, bits=8)
    assert "with another recipe; starting over" in caplog.text
    assert set(fetched) == tiny().weights.keys()
    assert made.bits_per_weight > 8


def test_another_source_starts_over_and_says_so(source, tmp_path, fetched, caplog):
    target = tmp_path / "out"
    killed(source, target, 7)
    other = tiny(seed=1)
    again = write(tmp_path / "again", other)
    convert(again, target, bits=4)
    assert "with another source; starting over" in caplog.text
    assert set(fetched) == other.weights.keys()
    expect_whole(target, again, tmp_path)


def fail_at(monkeypatch, n, code):
    """The n-th write to a shard fails."""
    calls = 0
    pwrite = os.pwrite

    def failing(*args):
        nonlocal calls
        calls += 1
        if calls == n:
            raise OSError(code, os.strerror(code))
        return pwrite(*args)

    monkeypatch.setattr(workspace.os, "pwrite", failing)


@pytest.mark.parametrize(
    ("n", "code"), [(20, errno.ENOSPC), *((n, errno.EIO) for n in (2, 3, 17, 18, 19, 20))]
)
def test_a_disk_that_fails_midway(source, tmp_path, monkeypatch, n, code):
    target = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(stream, "PIECE_BYTES", 16 << 10)  # several pieces to a matrix
        fail_at(patch, n, code)
        with pytest.raises(ModelError) as error:
            convert(source, target, bits=4)
    what = "the disk is full" if code == errno.ENOSPC else os.strerror(code)
    assert what in str(error.value)
    assert growing(target).exists() == (str(growing(target)) in str(error.value))
    assert not target.exists()
    convert(source, target, bits=4)
    expect_whole(target, source, tmp_path)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="only on Linux")
def test_a_disk_that_fills_before_the_start(source, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ModelError, match=r"the disk is full; nothing was written"):
        convert(source, tmp_path / "out", bits=4)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_a_real_full_disk(source, tmp_path):
    """A limit on the size of files, which the system enforces."""
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
        "from mlxserve_convert import convert; convert(sys.argv[1], sys.argv[2], bits=4)"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "ModelError" in done.stderr
    assert "nothing was written" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_two_at_once(source, tmp_path):
    target = tmp_path / "out"
    growing(target).mkdir()
    with (growing(target) / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match="another process is converting to"):
            convert(source, target, bits=4)
        assert growing(target).exists()
    convert(source, target, bits=4)


def test_ctrl_c_ends_at_once_and_keeps_what_is_written(source, tmp_path):
    done = killed(source, tmp_path / "out", 3, "SIGINT")
    assert done.returncode == -signal.SIGINT
    assert (growing(tmp_path / "out") / "journal").read_text().count("\n") >= 3
