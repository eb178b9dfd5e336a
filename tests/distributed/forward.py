"""What each rank of a group does in the tests of parted models. Quick to import."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.models.load import load_model, shard_checkpoint
from mlxserve.sources.checkpoint import open_checkpoint
from tests.support.dense_view import run_dense


class RingGroup:
    """A `models.base.Group` over MLX's ring."""

    def __init__(self) -> None:
        self._group = mx.distributed.init(strict=True, backend="ring")
        self.rank, self.size = self._group.rank(), self._group.size()

    def sum(self, x: mx.array) -> mx.array:
        if self.size == 2:  # a + b is b + a
            return mx.distributed.all_sum(x, group=self._group)
        parts = mx.distributed.all_gather(x[None], group=self._group)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def gather(self, x: mx.array, widths: Sequence[int]) -> mx.array:
        padding = [(0, 0)] * (x.ndim - 1) + [(0, max(widths) - x.shape[-1])]
        parts = mx.distributed.all_gather(mx.pad(x, padding)[None], group=self._group)
        return mx.concatenate([p[..., :n] for p, n in zip(parts, widths, strict=True)], axis=-1)


def logits(cases: Sequence[tuple[str, str | None]], ids: Sequence[int], folder: str) -> None:
    """Load each model's part and save its logits over `ids`, as `<case>-<rank>.npy`.

    cases: a path, and the dtype to compute in. Prints, in JSON, the bytes that MLX holds once each
    part is loaded, and the heads of its cache.
    """
    group = RingGroup()
    told: list[dict[str, Any]] = []
    for i, (path, dtype) in enumerate(cases):
        checkpoint = open_checkpoint(Path(path))
        shard = shard_checkpoint(checkpoint, group)
        before = mx.get_active_memory()
        model = load_model(
            checkpoint.config,
            checkpoint.weights(shard.region),
            shard=shard,
            compute_dtype=None if dtype is None else getattr(mx, dtype),
        )
        held = mx.get_active_memory() - before
        told.append({"bytes": held, "kv_heads": model.layer_specs()[0].heads})
        out = run_dense(model, np.array(ids, np.int32)).astype(mx.float32)
        np.save(Path(folder) / f"{i}-{group.rank}.npy", np.array(out))
    print(json.dumps(told))
