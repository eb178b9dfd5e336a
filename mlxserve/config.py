"""Settings as frozen dataclasses, and the only place that reads the environment.

Environment:
    MLXSERVE_HOME: where models of the catalog are kept (default: $XDG_CACHE_HOME/mlxserve,
        ~/.cache/mlxserve).
    MLXSERVE_DEBUG: 1 prints the traceback of every error (default: off).

    HF_HUB_OFFLINE: 1 downloads nothing, from the Hub or elsewhere (default: off).

huggingface_hub reads its own, which apply to models of the Hub: HF_HOME (their cache), HF_TOKEN,
HF_ENDPOINT and HF_HUB_DOWNLOAD_TIMEOUT are the ones of most use.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from mlxserve.errors import RequestError

DEFAULT_MODEL = "smollm2-135m"


def home() -> Path:
    """The directory that holds everything mlxserve keeps on disk."""
    if explicit := os.environ.get("MLXSERVE_HOME"):
        return Path(explicit).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "mlxserve"


def offline() -> bool:
    """Whether nothing may be downloaded; Hugging Face's own switch, which people know."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def debug() -> bool:
    """Whether an error is to be shown with its traceback."""
    return os.environ.get("MLXSERVE_DEBUG", "") not in ("", "0")


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
