"""The compiled CPU kernels: which build, at which instruction level, on how many threads."""

import importlib
import os
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

from mlxserve import config
from mlxserve.errors import RequestError

FOLDER = Path(__file__).with_name("cpu")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class Native:
    """module: None where there is none, and then why that is and what to do about it ("" on a Mac,
    where Metal is used)."""

    module: ModuleType | None
    reason: str
    fix: str = ""


@cache
def load() -> Native:
    """The kernels for this machine. Raises RequestError for settings that it can't follow."""
    if not sys.platform.startswith("linux"):
        return Native(None, "native CPU kernels are for Linux")
    version = metadata.version("mlx")
    again = "install g++ (version 11 or later) and install mlxserve again"
    name = f"_native_{version.replace('.', '_')}"
    # Looked up by the MLX version in its name: a build for another one must not even be loaded.
    if not any(FOLDER.glob(f"{name}.*.so")):
        built = sorted(path.name.split(".")[0] for path in FOLDER.glob("_native_*.so"))
        if not built:
            return Native(None, "the native CPU kernels weren't built", again)
        other = built[0].removeprefix("_native_").replace("_", ".")
        return Native(None, f"built for MLX {other}, this is {version}", "install mlxserve again")
    import mlx.core  # noqa: F401  its library must be loaded first

    try:
        module = importlib.import_module(f"mlxserve.kernels.cpu.{name}")
    except ImportError as error:
        return Native(None, f"they don't load: {error}", again)
    level = config.cpu_level()
    if level is not None and not module.set_level(level):
        raise RequestError(f"MLXSERVE_CPU_LEVEL is {level}, which this processor can't run")
    module.set_threads(config.cpu_threads() or usable_cores())
    return Native(module, f"{module.level()}, {module.threads()} threads")


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and a container's quota, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    try:
        quota, period = CPU_QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    if quota == "max":
        return cores
    return max(1, min(cores, -(-int(quota) // int(period))))
