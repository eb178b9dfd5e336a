"""`doctor`: 0 on a machine that works, 1 and a fix on one that doesn't."""

import platform
import re
from importlib.metadata import version
from pathlib import Path

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


def stand_in(name):
    # The child process finds it where the program does.
    root = str(Path(__file__).parents[2])
    return {"MLXSERVE_METAL_STAND_IN": f"tests.support.stand_ins.{name}", "PYTHONPATH": root}


@pytest.mark.full
def test_kernels(cli):
    done = cli("doctor", "--kernels")
    assert done.code == 0, done.stderr
    machine, heading, *lines = done.stdout.splitlines()
    assert f"MLX {version('mlx')}" in machine
    assert heading.split() == ["OP", "USE", "CHECK", "CHOICE", "REASON"]
    for choice in registry.report():
        check = "ok" if choice.implementation == "native" else "-"
        expected = [choice.op, "-", check, choice.implementation, *choice.reason.split()]
        assert expected in [line.split() for line in lines]


@pytest.mark.full
def test_kernels_of_a_mac_that_are_right(cli):
    done = cli.python(
        """
import sys
sys.argv = ["mlxserve", "doctor", "--kernels"]
from mlxserve.cli import kernel_table, main
from mlxserve.kernels.uses import AttentionUse, MatmulUse
attention = AttentionUse(2, 1, 64, "bfloat16", window=100)
kernel_table.COMMON_USES = (attention, MatmulUse(96, 128, 4, 64, "bfloat16"))
main()
""",
        **stand_in("right"),
    )
    assert done.code == 0, done.stderr
    assert "stand_ins.right" in done.stdout.splitlines()[0]
    lines = done.stdout.splitlines()[1:]
    headings = [line.split()[3:-2] for line in lines if line.startswith("OP ")]
    assert headings == [[], ["1x512", "8x512", "1x4096", "8x4096"], ["2", "4", "8", "16"]]
    (line,) = (line for line in lines if line.startswith("attention "))
    use, check, *times, choice, reason = re.split("  +", line)[1:]
    assert use == "2/1/64 bfloat16, window 100"
    assert 0 < float(check) < 0.01
    assert all(ours < mlx for ours, mlx in (map(float, time.split("/")) for time in times))
    assert (choice, reason) == ("metal", "faster at 4 of 4 sizes")
    assert f"checking attention for {use}" in done.stderr
    (line,) = (line for line in lines if line.startswith("matmul "))
    use, check, *times, choice, reason = re.split("  +", line)[1:]
    assert use == "96x128 bfloat16, 4 bits in groups of 64"
    assert len(times) == 4
    assert (choice, reason) == ("metal", "faster up to 16 rows")
    assert sum("ms a call" in line for line in lines) == 2


@pytest.mark.full
def test_kernels_that_fail_are_reported_and_make_the_exit_code_1(cli):
    done = cli("doctor", "--kernels", **stand_in("broken"))
    assert done.code == 1
    ops = ("attention ", "append  ", "matmul ", "norm  ", "rope  ")
    lines = [line for line in done.stdout.splitlines() if line.startswith(ops)]
    uses = ("32/8/128 bfloat16", "9/3/64 ", "4/1/256 ", "packed 8/8")
    uses += ("32/8/128 bfloat16, chunks", "packed 8/8, chunks")
    uses += ("keys 8/128 ", "values 8/128 ", "4096x4096 ", "14336x4096 ")
    uses += ("4096 bfloat16", "1152 bfloat16, one before", "32/8/128 ", "4/1/256 ")
    for line, use in zip(lines, uses, strict=True):
        assert use in line
        assert " failed  reference  the Metal kernel failed its check: RuntimeError: " in line
    assert done.stderr.count("please report this line") == 14


def test_kernels_of_a_model(cli, tiny_model_dir):
    done = cli("doctor", "--kernels", str(tiny_model_dir), **stand_in("right"))
    assert done.code == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("attention ")]
    assert [re.split("  +", line)[1:4] for line in lines] == [
        ["4/2/16 float32", "-", "reference"], ["4/2/16 float32, chunks", "-", "reference"],
    ]  # fmt: skip
    assert all("head dim 16 is none of 64" in line for line in lines)


def test_a_model_is_for_kernels_only(here):
    done = here("doctor", "some-model")
    assert done.code == 2
    assert "MODEL is 'some-model' without --kernels; add that" in done.stderr
