"""Builds the native CPU kernels on Linux; everything else is in pyproject.toml.

The extension is optional: without a C++20 compiler the package installs and works through MLX's
own operations, and says so once. Its name carries the MLX version it was compiled against, because
MLX's C++ interface changes with patch releases.
"""

import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = Path("mlxserve/kernels/cpu")
FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
FLAGS += [
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-DNDEBUG",
    "-DNB_DOMAIN=mlx",
    "-Wall",
    "-Wextra",
]
# GCC 12 takes the undefined lanes of its own AVX-512 header for a mistake.
FLAGS += [
    "-Wno-unknown-warning-option",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
    "-Wno-psabi",
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
# On other processors those files compile to plain C++, which is never chosen.
LEVELS = {}
if platform.machine() == "x86_64":
    LEVELS = {
        "level_avx2": AVX2,
        "level_avx512": AVX512,
        "level_avx512vnni": [*AVX512, "-mavx512vnni"],
    }


class BuildNative(build_ext):
    """Each file with the flags of its instruction level, several at once."""

    def build_extension(self, ext: Extension) -> None:
        """Raises CompileError, which setuptools turns into a warning: the extension is optional."""
        compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")
        if not os.environ.get("CXX") and which(compiler[0]) is None:
            compiler = ["c++"]  # this Python was built elsewhere, with a compiler that isn't here
        build = Path(self.build_temp)
        build.mkdir(parents=True, exist_ok=True)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        for old in target.parent.glob("_native_*.so"):
            old.unlink()
        with ThreadPoolExecutor(max_workers=self.parallel or 2) as pool:
            objects = list(
                pool.map(lambda source: _compile(compiler, ext, source, build), ext.sources)
            )
        library = Path(_spec_folder("mlx")) / "lib"
        link = ["-shared", *shlex.split(os.environ.get("LDFLAGS", "")), f"-L{library}", "-lmlx"]
        _run([*compiler, *objects, "-o", str(target), *link])


def _compile(compiler: list[str], ext: Extension, source: str, build: Path) -> str:
    name = Path(source).stem
    target = str(build / f"{name}.o")
    includes = [f"-isystem{folder}" for folder in ext.include_dirs]
    module = f"-DMODULE_NAME={ext.name.rpartition('.')[2]}"
    flags = [*FLAGS, *LEVELS.get(name, []), *shlex.split(os.environ.get("CXXFLAGS", ""))]
    _run([*compiler, *flags, module, *includes, "-c", source, "-o", target])
    return target


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(str(error)) from error


def _spec_folder(package: str) -> str:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise CompileError(f"{package} isn't installed")
    return next(iter(spec.submodule_search_locations))


def native() -> list[Extension]:
    """The extension, where it can be built."""
    if not sys.platform.startswith("linux") or find_spec("mlx") is None:
        return []
    import nanobind

    binding = Path(nanobind.__file__).parent
    version = metadata.version("mlx").replace(".", "_")
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    return [
        Extension(
            f"mlxserve.kernels.cpu._native_{version}",
            [*sources, str(binding / "src" / "nb_combined.cpp")],
            include_dirs=[
                sysconfig.get_path("include"),
                str(Path(_spec_folder("mlx")) / "include"),
                str(binding / "include"),
                str(binding / "ext" / "robin_map" / "include"),
            ],
            optional=True,
        )
    ]


# convert/ is installed as mlxserve_convert: nobody's site-packages gets a module called convert.
setup(
    packages=[*find_packages(include=["mlxserve*"]), "mlxserve_convert"],
    package_dir={"mlxserve_convert": "convert"},
    ext_modules=native(),
    cmdclass={"build_ext": BuildNative},
)
