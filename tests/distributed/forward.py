"""What each rank of a group does in the tests of parted models. Quick to import."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.distributed.group import Ranks
from mlxserve.models.load import load_model, shard_checkpoint
from mlxserve.sources.checkpoint import open_checkpoint
from tests.support.dense_view import run_dense


def logits(cases: Sequence[tuple[str, str | None]], ids: Sequence[int], folder: str) -> None:
    """Load each model's part and save its logits over `ids`, as `<case>-<rank>.npy`.

    cases: a path, and the dtype to compute in. Prints, in JSON, the bytes that MLX holds once each
    part is loaded, and the heads of its cache.
    """
    group = Ranks("ring")
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
