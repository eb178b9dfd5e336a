"""Finds clang, and compiles with it.

What it made is kept by content, in the folder mlxserve/metal-emulator of the user's cache or in
MLXSERVE_METAL_EMULATOR_CACHE. That may be deleted at any time.
"""

import hashlib
import inspect
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

from tests.support.metal import arithmetic
from tests.support.metal.arithmetic import count_arithmetic

_HERE = Path(__file__).parent
_COUNTING = inspect.getsource(arithmetic)
_OLDEST = 17
# The one that CI installs, then newer ones, then older.
_NAMES = ("clang++-19", *(f"clang++-{n}" for n in range(20, 30)), "clang++-18", "clang++-17")
_NEEDED = (
    f"the Metal emulator needs clang++ {_OLDEST} or later; on Debian: apt-get install clang-19"
)

# Warnings are the business of the lint. Metal rounds halves at every operation, knows no aliasing
# by type here, and its literals are floats.
_COMMON = (
    *("-std=gnu++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-Wno-everything", "-fno-strict-aliasing"),
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-cl-single-precision-constant"),
)
FAST = ("-O2",)
# What merges, splits or moves accesses would blur whose they are. Private variables start with a
# pattern that is a NaN and a huge integer.
CHECKED = (
    *("-O1", "-gline-tables-only", "-DMSL_CHECK", "-fno-vectorize", "-fno-slp-vectorize"),
    *("-mllvm", "-disable-vector-combine", "-mllvm", "-disable-loop-idiom-all"),
    # Once unrolled, a write past the end of a private array would be optimised away unseen.
    *("-mllvm", "-pragma-unroll-threshold=0", "-mllvm", "-unroll-threshold=0"),
    *("-fsanitize=thread", "-mllvm", "-tsan-instrument-func-entry-exit=0"),
    *("-mllvm", "-tsan-instrument-atomics=0", "-mllvm", "-tsan-instrument-read-before-write=1"),
    "-fsanitize=bounds,alignment,shift,integer-divide-by-zero,float-cast-overflow",
    "-fsanitize=signed-integer-overflow,bool",
    "-ftrivial-auto-var-init=pattern",
)


class CompileError(Exception):
    """The compiler's messages."""


@cache
def unavailable() -> str:
    """Why there is no emulator on this machine, or ""."""
    if sys.platform != "linux":
        return "only on Linux: the Metal emulator"
    return "" if _find() else _NEEDED


def clang() -> str:
    """The compiler's path. Raises RuntimeError where there is none."""
    if reason := unavailable():
        raise RuntimeError(reason)
    return _find()


def has_fused_multiply_add() -> bool:
    """Whether code is compiled for a processor with one."""
    return platform.machine() == "aarch64" or bool(_processor())


def compile_kernel(text: str, flags: Sequence[str], *, count: bool = False) -> Path:
    """The library of a translation unit. Raises CompileError with clang's messages.

    count: arithmetic.
    """
    flags = [*_COMMON, *_processor(), *flags]
    precompiled = _precompiled_header(tuple(flags))
    key = _key(precompiled.name, _runtime_key(), text, *([_COUNTING] if count else []))

    def build(folder: Path, target: Path) -> None:
        source, code, object_file = (folder / f"kernel.{end}" for end in ("cpp", "ll", "o"))
        source.write_text(text, encoding="utf-8")
        command = [clang(), *flags, "-include-pch", precompiled, source]
        if count:
            _run([*command, "-S", "-emit-llvm", "-o", code], CompileError)
            code.write_text(count_arithmetic(code.read_text(encoding="utf-8")), encoding="utf-8")
            as_it_is = ("-Xclang", "-disable-llvm-passes")
            _run([clang(), "-O1", "-fPIC", *as_it_is, "-c", code, "-o", object_file])
        else:
            _run([*command, "-c", "-o", object_file], CompileError)
        _run([clang(), "-shared", "-o", target, object_file, *_runtime(), "-lm"])

    return _cached(f"kernel-{key}.so", build)


def check_syntax(text: str, flags: Sequence[str]) -> str:
    """Clang's messages about a translation unit, "" if there are none."""
    key = _key(_version(clang()), _headers().name, *flags, text)

    def build(folder: Path, target: Path) -> None:
        source = folder / "kernel.cpp"
        source.write_text(text, encoding="utf-8")
        command = [clang(), *flags, "-fsyntax-only", f"-I{_headers()}", source]
        done = subprocess.run(command, capture_output=True, text=True)
        target.write_text(done.stderr, encoding="utf-8")

    return _cached(f"syntax-{key}.txt", build).read_text(encoding="utf-8")


def _find() -> str:
    for name in (*_NAMES, "clang++"):
        path = shutil.which(name)
        if path and int(_version(path).partition(".")[0]) >= _OLDEST:
            return path
    return ""


@cache
def _version(path: str) -> str:
    printed = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"version (\d[\w.+~:-]*)", printed)
    return found[1] if found else "0"


@cache
def _processor() -> tuple[str, ...]:
    """Conversions of halves are slow without the instructions that most processors have."""
    if platform.machine() != "x86_64":
        return ()
    known = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    return ("-march=x86-64-v3",) if {"avx2", "bmi2", "f16c", "fma", "movbe"} <= set(known) else ()


def _folder() -> Path:
    if named := os.environ.get("MLXSERVE_METAL_EMULATOR_CACHE"):
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "mlxserve" / "metal-emulator"


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _cached(name: str, build: Callable[[Path, Path], None]) -> Path:
    """A file of the cache, made by build(scratch folder, file) if it isn't there.

    Two processes may make it at the same time: each moves its own there whole.
    """
    path = _folder() / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as scratch:
            target = Path(scratch) / name
            build(Path(scratch), target)
            target.replace(path)
    return path


def _run(command: Iterable[str | Path], error: type[Exception] = RuntimeError) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise error(done.stderr)
    return done.stdout


@cache
def _headers() -> Path:
    """The folder of our headers. A precompiled header must find them where it saw them, and the
    checkout may move; so they are copied."""
    files = sorted((_HERE / "include" / "msl").iterdir())
    texts = {file.name: file.read_text(encoding="utf-8") for file in files}
    path = _folder() / f"include-{_key(*texts, *texts.values())}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as scratch:
            built = Path(scratch) / "include"
            (built / "msl").mkdir(parents=True)
            for name, text in texts.items():
                (built / "msl" / name).write_text(text, encoding="utf-8")
            try:
                built.rename(path)
            except OSError:
                if not path.exists():  # otherwise another process was first
                    raise
    return path


@cache
def _precompiled_header(flags: tuple[str, ...]) -> Path:
    header = _headers() / "msl" / "metal.h"
    include = f"-I{_headers()}"
    # The system's headers may change too.
    used = _run([clang(), *flags, include, "-M", header]).replace("\\\n", " ").split()[1:]
    contents = [hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in used]
    key = _key(_version(clang()), str(header), *flags, *contents)

    def build(_: Path, target: Path) -> None:
        timeless = ("-Xclang", "-fno-pch-timestamp")
        _run([clang(), *flags, include, *timeless, "-x", "c++-header", header, "-o", target])

    return _cached(f"metal-{key}.pch", build)


@cache
def _runtime_key() -> str:
    files = sorted((_HERE / "runtime").iterdir())
    texts = [file.read_text(encoding="utf-8") for file in files]
    return _key(_version(clang()), _headers().name, *_processor(), *texts)


@cache
def _runtime() -> tuple[Path, ...]:
    """The runtime's objects. They must not be checked themselves."""
    flags = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti")

    def compiled(source: Path) -> Path:
        def build(_: Path, target: Path) -> None:
            include = f"-I{_headers()}"
            _run([clang(), *flags, *_processor(), include, "-c", source, "-o", target])

        return _cached(f"{source.stem}-{_runtime_key()}.o", build)

    return tuple(compiled(source) for source in sorted((_HERE / "runtime").glob("*.cpp")))
