"""Settings as frozen dataclasses, and the only place that reads the environment.

Environment:
    MLXSERVE_HOME: where models of the catalog are kept (default: $XDG_CACHE_HOME/mlxserve,
        ~/.cache/mlxserve).
    MLXSERVE_DEBUG: 1 prints the traceback of every error (default: off).
    MLXSERVE_KERNELS: for debugging, "reference" computes everything with MLX's own operations;
        "attention=reference,matmul=native" chooses op by op; "attention=metal" takes the Metal
        kernel unchecked (default: see `mlxserve doctor`).
    MLXSERVE_KERNEL_CHECK_S: how many seconds the check of a Metal kernel may take, once per Mac and
        kind of layer, when a model loads (default: 60).
    MLXSERVE_METAL_STAND_IN: for tests, a module whose `run(launch)` plays the GPU of a Mac.
    MLXSERVE_CPU_LEVEL: avx512vnni, avx512, avx2 or portable, for the native CPU kernels (default:
        the best).
    MLXSERVE_CPU_THREADS: threads of the native CPU kernels (default: the cores it may use).

    HF_HUB_OFFLINE: 1 downloads nothing, from the Hub or elsewhere (default: off).

huggingface_hub reads its own, which apply to models of the Hub: HF_HOME (their cache), HF_TOKEN,
HF_ENDPOINT and HF_HUB_DOWNLOAD_TIMEOUT are the ones of most use.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from mlxserve.errors import RequestError

DEFAULT_MODEL = "smollm2-135m"
CPU_LEVELS = ("avx512vnni", "avx512", "avx2", "portable")
MAX_CPU_THREADS = 256
MAX_KERNEL_CHECK_S = 3600


def home() -> Path:
    """The directory that holds everything mlxserve keeps on disk. Raises RequestError."""
    explicit = os.environ.get("MLXSERVE_HOME")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    path = Path(explicit) if explicit else Path(cache) / "mlxserve"
    try:
        return path.expanduser()
    except RuntimeError:  # in containers, a user may have no name and no home
        raise RequestError(
            f"{path} can't be found, since this user has no home directory; set MLXSERVE_HOME to "
            "a directory"
        ) from None


def offline() -> bool:
    """Whether nothing may be downloaded; Hugging Face's own switch, which people know."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def debug() -> bool:
    """Whether an error is to be shown with its traceback."""
    return os.environ.get("MLXSERVE_DEBUG", "") not in ("", "0")


def kernel_overrides() -> dict[str, str]:
    """Implementations asked for by op; the op "" stands for all others. Raises RequestError."""
    chosen = {}
    for part in filter(None, os.environ.get("MLXSERVE_KERNELS", "").split(",")):
        op, _, name = part.strip().rpartition("=")
        if name not in ("reference", "native", "metal"):
            raise RequestError(
                f"MLXSERVE_KERNELS has {part!r}; write reference, native, metal, or OP=reference, "
                "OP=native, OP=metal"
            )
        chosen[op] = name
    return chosen


def kernel_check_s() -> float:
    """Seconds that the check of a Metal kernel may take. Raises RequestError."""
    text = os.environ.get("MLXSERVE_KERNEL_CHECK_S") or "60"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_KERNEL_CHECK_S:
        raise RequestError(
            f"MLXSERVE_KERNEL_CHECK_S is {text!r}; it must be a number of seconds above 0, up to "
            f"{MAX_KERNEL_CHECK_S}"
        )
    return seconds


def metal_stand_in() -> str | None:
    """The module that plays a Mac's GPU in tests, or None."""
    return os.environ.get("MLXSERVE_METAL_STAND_IN") or None


def cpu_level() -> str | None:
    """The instruction level asked for, or None for the best there is. Raises RequestError."""
    level = os.environ.get("MLXSERVE_CPU_LEVEL") or None
    if level not in (None, *CPU_LEVELS):
        raise RequestError(f"MLXSERVE_CPU_LEVEL is {level!r}; choose {', '.join(CPU_LEVELS)}")
    return level


def cpu_threads() -> int | None:
    """The number of threads asked for, or None for the cores it may use. Raises RequestError."""
    text = os.environ.get("MLXSERVE_CPU_THREADS")
    if not text:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= MAX_CPU_THREADS:
        raise RequestError(
            f"MLXSERVE_CPU_THREADS is {text!r}; it must be a number from 1 to {MAX_CPU_THREADS}"
        )
    return int(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How one engine schedules and how much memory it may take.

    max_batch: rows (requests) computed together in one step.
    max_batched_tokens: tokens computed in one step, over all rows; prompts are cut to it. None asks
        the device: a step should not last much longer than a person waits after Ctrl-C.
    memory_limit_bytes: for weights, cache and activations together; None asks the device.
    """

    max_batch: int = 32
    max_batched_tokens: int | None = None
    memory_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_batched_tokens", "memory_limit_bytes"):
            value = getattr(self, name)
            if value is None and name != "max_batch":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RequestError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if self.max_batched_tokens is not None and self.max_batched_tokens < self.max_batch:
            raise RequestError(
                f"max_batched_tokens ({self.max_batched_tokens}) is smaller than max_batch "
                f"({self.max_batch}); every running request needs one token per step"
            )
