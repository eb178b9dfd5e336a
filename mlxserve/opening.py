"""From the name of a model to its files, and to the loaded model, or a part of it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from os import PathLike
from pathlib import Path

from mlxserve.config import EngineConfig
from mlxserve.engine.cache_plan import cache_uses
from mlxserve.engine.footprint import loaded_bytes
from mlxserve.errors import ModelError
from mlxserve.kernels import matmul
from mlxserve.memory import check_weights, device_limit_bytes
from mlxserve.models.base import ALONE, Group, Model
from mlxserve.models.load import load_model, shard_checkpoint
from mlxserve.models.tensor_parallel import Shard
from mlxserve.sources import fingerprint
from mlxserve.sources.checkpoint import Checkpoint, open_checkpoint
from mlxserve.sources.gguf_quant import Q6K
from mlxserve.sources.resolve import resolve
from mlxserve.types import OnProgress


@dataclass(frozen=True, slots=True)
class Opened:
    """A model's files; of them, no more than headers were read."""

    path: Path
    checkpoint: Checkpoint
    config: EngineConfig

    def facts(self) -> dict[str, str]:
        """What all ranks that compute this model must have alike, by name."""
        return {
            **versions(),
            "model": fingerprint.model(self.path),
            "settings": repr(self.config),
        }

    def part(self, group: Group = ALONE, layers: range | None = None) -> Shard | None:
        """What this rank of a group loads; None: all of it. layers: those of the group.

        Raises ModelError and RequestError where the model can't be divided so, and CapacityError
        where the part doesn't fit into memory.
        """
        whole = group.size == 1 and layers is None
        shard = None if whole else shard_checkpoint(self.checkpoint, group, layers)
        limit = self.config.memory_limit_bytes or device_limit_bytes()
        check_weights(self.weight_bytes(shard), limit)
        return shard

    def weight_bytes(self, shard: Shard | None = None) -> int:
        """Of a part, or of all, once loaded."""
        checkpoint = self.checkpoint
        return loaded_bytes(
            checkpoint.config,
            checkpoint.size_bytes,
            form=matmul.form(),
            elements=checkpoint.elements,
            shard=shard,
        )

    def load(
        self, shard: Shard | None = None, cancelled: Callable[[], bool] = lambda: False
    ) -> Model:
        """See `models.load.load_model`. shard: from `part`."""
        checkpoint = self.checkpoint
        return load_model(
            checkpoint.config,
            checkpoint.weights() if shard is None else checkpoint.weights(shard.region),
            shard=shard,
            uses=partial(cache_uses, config=self.config),
            deterministic=self.config.deterministic,
            cancelled=cancelled,
        )


def versions() -> dict[str, str]:
    """Of what must be the same on all ranks, whatever they compute."""
    return {
        "mlxserve": version("mlxserve"),
        "mlx": version("mlx"),
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }


def open_model(
    model: str | PathLike[str],
    config: EngineConfig,
    *,
    on_progress: OnProgress | None = None,
    gguf_q6_k: Q6K = "8bit",
) -> Opened:
    """Find a model, and fetch it if it isn't here. Errors: see `mlxserve.load`."""
    if not isinstance(model, str | PathLike):
        raise ModelError(f"a model is {model!r}; give a name or a path")
    path = resolve(model if isinstance(model, str) else Path(model), on_progress)
    return Opened(path, open_checkpoint(path, gguf_q6_k=gguf_q6_k), config)
