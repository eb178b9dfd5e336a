"""`doctor`: 0 on a machine that works, 1 and a fix on one that doesn't."""

import platform
from importlib.metadata import version

import pytest

from mlxserve.kernels import registry


def test_healthy(cli):
    done = cli("doctor")
    assert done.code == 0, done.stdout
    assert done.stderr == ""
    assert f"mlxserve    {version('mlxserve')}" in done.stdout
    assert f"mlx         {version('mlx')}" in done.stdout
    assert platform.python_version() in done.stdout
    assert "Metal" in done.stdout
    assert "memory" in done.stdout
    for choice in registry.report():
        assert f"{choice.op}: {choice.implementation} ({choice.reason})" in done.stdout


def test_home_that_cannot_be_written_to(cli, tmp_path):
    (tmp_path / "file").write_text("")
    done = cli("doctor", MLXSERVE_HOME=str(tmp_path / "file" / "below"))
    assert done.code == 1
    assert "can't be written to" in done.stdout
    assert "fix: set MLXSERVE_HOME" in done.stdout


def test_other_mlx_than_the_pinned_one(cli):
    done = cli.python("""
import sys, importlib.metadata as metadata
sys.argv = ["mlxserve", "doctor"]
real = metadata.version
metadata.version = lambda name: "0.1.2" if name == "mlx" else real(name)
from mlxserve.cli import main
main()
""")
    assert done.code == 1
    assert "0.1.2, and mlxserve is built for mlx" in done.stdout
    assert "fix: pip install --force-reinstall 'mlx" in done.stdout


def test_mlx_that_cannot_be_imported(cli):
    done = cli.python("""
import sys
sys.argv = ["mlxserve", "doctor"]
sys.modules["mlx"] = None
from mlxserve.cli import main
main()
""")
    assert done.code == 1
    assert "wrong  mlx" in done.stdout
    assert "fix: pip install" in done.stdout
    assert "models" in done.stdout  # the other checks went on
    assert done.stderr == ""


@pytest.mark.skipif(platform.system() != "Linux", reason="only on Linux")
def test_missing_kernels_are_a_note(cli, tmp_path):
    done = cli.python(f"""
import pathlib, sys
sys.argv = ["mlxserve", "doctor"]
from mlxserve.kernels import native
native.FOLDER = pathlib.Path({str(tmp_path)!r})
from mlxserve.cli import main
main()
""")
    assert done.code == 0
    assert "note   kernels     slow: the native CPU kernels weren't built" in done.stdout
    assert "fix: install g++ (version 11 or later) and install mlxserve again" in done.stdout
    assert "matmul: reference" in done.stdout
    assert done.stderr == ""
