"""The wheel: it holds the whole package and nothing else, and its program starts."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, which keeps the checkout clean, and with the setuptools that is here."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("mlxserve", "convert"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--wheel-dir", str(out)]
    command += ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    # Nobody runs these kernels: to optimise them takes most of the time.
    unoptimised = {**os.environ, "CXXFLAGS": "-O0"}
    done = subprocess.run(command, capture_output=True, text=True, env=unoptimised)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


@pytest.mark.full
def test_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    here = {
        package + str(path.relative_to(ROOT / folder))
        for folder, package in (("mlxserve", "mlxserve/"), ("convert", "mlxserve_convert/"))
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    sources, built = (".cpp", ".h"), {name for name in names if name.endswith(".so")}
    assert names - built == {name for name in here if not name.endswith((*sources, ".so"))}
    version = metadata.version("mlx").replace(".", "_")
    kernels = f"mlxserve/kernels/cpu/_native_{version}."
    assert [name.startswith(kernels) for name in built] == [True] * (sys.platform == "linux")


@pytest.mark.full
def test_wheel_runs_without_the_checkout(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import mlxserve, mlxserve_convert; from mlxserve.cli import main; "
        "print(mlxserve.__file__); print(mlxserve_convert.__file__); main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    where, converter, version = done.stdout.splitlines()
    assert Path(where) == tmp_path / "mlxserve" / "__init__.py"
    assert Path(converter) == tmp_path / "mlxserve_convert" / "__init__.py"
    assert version.startswith("mlxserve ")
    assert wheel.name.split("-")[1] == version.split()[1]
