"""The native kernels once more: under sanitizers, and with each instruction level by itself."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlxserve.config import CPU_LEVELS

ROOT = Path(__file__).parents[1]
SIMDE = "/usr/include/simde"
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.system() != "Linux", reason="only on Linux"),
]


def run_pytest(*arguments: str, cwd: Path = ROOT, **environment: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]


def test_the_references_alone():
    """What runs where nothing was compiled."""
    folders = [f"tests/{name}" for name in ("cache", "models", "engine")]
    run_pytest("-m", "not slow and not real", *folders, MLXSERVE_KERNELS="reference")


@pytest.mark.parametrize("level", CPU_LEVELS)
def test_each_instruction_level(level):
    from mlxserve.kernels.native import load

    found = load().module
    if found is None:
        pytest.skip("no native kernels were built")
    usual = found.level()
    if not found.set_level(level):
        pytest.skip(f"only on processors with {level}")
    found.set_level(usual)
    folders = [f"tests/{name}" for name in ("kernels", "cache", "models", "engine")]
    run_pytest("-m", "not slow and not real", *folders, MLXSERVE_CPU_LEVEL=level)


def copy_checkout(to: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("mlxserve", "tests"):
        shutil.copytree(ROOT / name, to / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to)
    return to


def build(checkout: Path, **environment: str) -> None:
    built = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=checkout,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert list(checkout.rglob("_native_*.so")), built.stderr[-4000:]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """A build with the very sources of the AVX-512 levels, for processors that don't have them."""
    if not Path(SIMDE).is_dir():
        pytest.skip("only on machines with libsimde-dev")
    checkout = copy_checkout(tmp_path_factory.mktemp("emulated") / "checkout")
    cpu = checkout / "mlxserve" / "kernels" / "cpu"
    emulation = ROOT / "tests" / "support" / "avx512_emulation.h"
    for level, macros in (("avx512", "F"), ("avx512vnni", "F VNNI")):
        defined = "".join(f"#define __AVX512{name}__ 1\n" for name in macros.split())
        source = cpu / f"level_{level}.cpp"
        source.write_text(f'#include "{emulation}"\n{defined}{source.read_text()}')
    changed = replaced(cpu / "levels.cpp", '__builtin_cpu_supports("avx512', '("avx512')
    changed += replaced(checkout / "setup.py", '"level_avx512": AVX512', '"level_avx512": AVX2')
    changed += replaced(checkout / "setup.py", '[*AVX512, "-mavx512vnni"]', "AVX2")
    assert changed == 7
    build(checkout)
    return checkout


@pytest.mark.parametrize("level", ["avx512vnni", "avx512"])
def test_avx512_by_emulation(emulated, level):
    run_pytest(
        *("-m", "not slow and not real and not full", "tests/kernels", "-rs"),
        cwd=emulated,
        PYTHONPATH=str(emulated),
        MLXSERVE_CPU_LEVEL=level,
    )


def replaced(path: Path, old: str, new: str) -> int:
    text = path.read_text()
    path.write_text(text.replace(old, new))
    return text.count(old)


@pytest.mark.parametrize("level", ["best", "portable"])
def test_no_access_out_of_bounds_and_nothing_undefined(tmp_path, level):
    checkout = copy_checkout(tmp_path / "checkout")
    build(checkout, CXXFLAGS=f"{SANITIZERS} -O1 -g1", LDFLAGS=SANITIZERS)
    libraries = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    run_pytest(
        *("-m", "not slow and not real and not full", "tests/kernels"),
        cwd=checkout,
        PYTHONPATH=str(checkout),
        LD_PRELOAD=" ".join(libraries),
        # Python itself leaks on purpose, and so does the pool of threads.
        ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1",
        **({} if level == "best" else {"MLXSERVE_CPU_LEVEL": level}),
    )
