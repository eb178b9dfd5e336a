"""Which kernels run, and what is said where they can't: builds, levels, threads, overrides."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlxserve.errors import RequestError
from mlxserve.kernels import native, registry

ROOT = Path(__file__).parents[2]
linux = pytest.mark.skipif(platform.system() != "Linux", reason="only on Linux")


@pytest.fixture(autouse=True)
def choose_anew():
    yield
    registry.forget()


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    """In a process of its own: the level and the threads are chosen once."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


REPORT = """
from mlxserve.kernels import registry
for choice in registry.report(): print(choice.op, choice.implementation, choice.reason)
"""


@linux
def test_this_machine_has_native_kernels():
    found = native.load()
    if found.module is None:
        pytest.skip(f"no native kernels: {found.reason}; {found.fix}")
    assert [choice.implementation for choice in registry.report()] == ["native"] * len(registry.OPS)


@pytest.mark.full
@linux
@pytest.mark.parametrize("level", ["avx2", "portable"])
def test_level_and_threads_come_from_the_environment(level):
    done = run(REPORT, MLXSERVE_CPU_LEVEL=level, MLXSERVE_CPU_THREADS="3")
    if "can't run" in done.stderr:
        pytest.skip(f"only on processors with {level}")
    assert f"matmul native {level}, 3 threads" in done.stdout, done.stderr


@pytest.mark.parametrize(("name", "value", "message"), [
    ("MLXSERVE_CPU_LEVEL", "sse9", "choose avx512vnni, avx512, avx2, portable"),
    ("MLXSERVE_CPU_THREADS", "0", "a number from 1 to 256"),
    ("MLXSERVE_CPU_THREADS", "two", "a number from 1 to 256"),
    ("MLXSERVE_KERNELS", "fast", "write reference, native, metal, or OP=reference"),
    ("MLXSERVE_KERNELS", "gated=metal", "metal gated; only attention, matmul, append, norm, rope"),
    ("MLXSERVE_KERNELS", "soup=native", "names 'soup'; the ops are attention, append, matmul"),
])  # fmt: skip
def test_settings_that_make_no_sense(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    registry.forget()
    if name.startswith("MLXSERVE_CPU") and platform.system() != "Linux":
        pytest.skip("only on Linux")
    with pytest.raises(RequestError, match=message):
        registry.native("matmul")


@linux
def test_metal_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setenv("MLXSERVE_KERNELS", "attention=metal")
    registry.forget()
    with pytest.raises(RequestError, match="metal attention, and MLX has no Metal here"):
        registry.report()


@pytest.mark.skipif(not mx.metal.is_available(), reason="only on Macs with Metal")
def test_native_is_refused_on_metal(monkeypatch):
    monkeypatch.setenv("MLXSERVE_KERNELS", "native")
    registry.forget()
    with pytest.raises(RequestError, match="native matmul, which is for CPUs"):
        registry.native("matmul")


def test_an_override_asks_for_the_reference(monkeypatch):
    monkeypatch.setenv("MLXSERVE_KERNELS", "reference")
    registry.forget()
    assert {choice.implementation for choice in registry.report()} == {"reference"}
    assert registry.native("matmul") is None


@linux
def test_one_op_may_be_overridden(monkeypatch):
    if native.load().module is None:
        pytest.skip("no native kernels were built")
    monkeypatch.setenv("MLXSERVE_KERNELS", "reference,matmul=native")
    registry.forget()
    assert [c.op for c in registry.report() if c.implementation == "native"] == ["matmul"]


@linux
def test_a_kernel_that_fails_its_check_is_not_used(monkeypatch, caplog):
    if native.load().module is None:
        pytest.skip("no native kernels were built")
    registry.forget()
    monkeypatch.setattr("mlxserve.kernels.matmul.check", wrong)
    assert registry.native("matmul") is None
    assert caplog.messages == ["the native matmul kernel is off, please report this: it is wrong"]
    (choice,) = (choice for choice in registry.report() if choice.op == "matmul")
    assert "failed its check" in choice.reason


def wrong(module):
    raise ArithmeticError("it is wrong")


@linux
@pytest.mark.parametrize(("files", "reason"), [
    ([], "weren't built"), (["_native_0_1_2.cpython-311.so"], "built for MLX 0.1.2, this is"),
])  # fmt: skip
def test_without_a_build_one_warning_says_how_to_mend_it(
    monkeypatch, tmp_path, caplog, files, reason
):
    for name in files:
        (tmp_path / name).write_text("")
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    registry.forget()
    assert [registry.native(op) for op in registry.OPS] == [None] * len(registry.OPS)
    (message,) = caplog.messages  # once, not for each op
    assert reason in message
    assert "install mlxserve again" in message
    assert {choice.implementation for choice in registry.report()} == {"reference"}


def test_differences_are_found():
    a = mx.array([1.0, 2.0])
    registry.check_close("op", a, a, 1e-6)
    for other in ([1.0, 2.001], [float("nan"), 2.0]):
        with pytest.raises(ArithmeticError, match=r"op is .* away from its reference"):
            registry.check_close("op", mx.array(other), a, 1e-6)


def test_cores_follow_affinity_and_quota(monkeypatch, tmp_path):
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(native, "CPU_QUOTA", quota)
    monkeypatch.setattr(native.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    assert native.usable_cores() == 4
    for text, cores in (("max 100000", 4), ("150000 100000", 2), ("50000 100000", 1)):
        quota.write_text(text)
        assert native.usable_cores() == cores


AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]


@linux
@pytest.mark.full
@pytest.mark.parametrize(("level", "flags"), [
    ("avx512vnni", [*AVX512, "-mavx512vnni"]),
    pytest.param("avx512", AVX512, marks=pytest.mark.slow),
    pytest.param("avx2", AVX2, marks=pytest.mark.slow),
    ("portable", []),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_no_function_of_a_level_is_shared(tmp_path, level, flags):
    """One that the linker may take from any file could hold instructions that a machine lacks."""
    if not shutil.which("nm") or not shutil.which("g++"):
        pytest.skip("needs g++ and nm")
    source = ROOT / "mlxserve" / "kernels" / "cpu" / f"level_{level}.cpp"
    target = tmp_path / f"{level}.o"
    command = ["g++", "-std=c++20", "-O1", "-Wno-psabi", *flags, "-c", "-o", str(target)]
    subprocess.run([*command, str(source)], check=True)
    symbols = subprocess.run(["nm", str(target)], check=True, capture_output=True, text=True)
    own = f"8mlxserve{len(level)}{level}"  # the level's own namespace
    weak = [line for line in symbols.stdout.splitlines() if line.split()[-2] in "WVu"]
    assert [line for line in weak if own not in line] == []


CROWDED = """
import resource
from pathlib import Path
import mlx.core as mx
from mlxserve.kernels.native import load
kernels = load().module
kernels.set_threads(256)
x, weight = mx.ones((64, 8192)), mx.ones((8192,))
mx.eval(x, weight)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)  # 32 stacks of 8 MiB
print(bool((kernels.rms_norm(x, weight, 0.0) == 1).all()))
"""


@linux
def test_fewer_threads_than_asked_for_do():
    if native.load().module is None:
        pytest.skip("only on machines with native kernels")
    if "ASAN_OPTIONS" in os.environ:
        pytest.skip("its shadow memory leaves no room for limits")
    done = run(CROWDED)
    assert done.stdout == "True\n", done.stderr
