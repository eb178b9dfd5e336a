"""Which layers each stage of a pipeline has, by the memory and the speed of its machines."""

from collections.abc import Sequence
from typing import cast

import mlx.nn as nn
import msgspec

from mlxserve import device
from mlxserve.engine.estimates import place_layers
from mlxserve.engine.footprint import memory_bandwidth, parts_of
from mlxserve.errors import RequestError
from mlxserve.memory import device_limit_bytes
from mlxserve.models import tensors
from mlxserve.models.registry import build
from mlxserve.models.tensors import HEAD
from mlxserve.opening import Opened

ALIKE = 0.85  # of the fastest: below that a machine counts as slower, above it may be noise
WEIGHTS_SHARE = 0.8  # of memory, at the most, if layers can be placed so


class Power(msgspec.Struct, array_like=True, frozen=True):
    """What a rank has. bytes_per_s: that it reads from memory, which a step's time depends on."""

    memory_bytes: int
    bytes_per_s: float


def power(opened: Opened) -> Power:
    """Of this machine; measured, where its chip isn't known."""
    limit = opened.config.memory_limit_bytes or device_limit_bytes()
    return Power(limit, memory_bandwidth(device.name())[0])


def place_stages(opened: Opened, powers: Sequence[Power], tensor: int) -> list[range]:
    """Consecutive layers for each stage, at least one, so that all take about as long.

    powers: of all ranks; tensor: how many of them a stage has. The first stage has the embedding
    and the head beside its layers. Raises RequestError for more stages than layers, and where
    memory doesn't hold them.
    """
    config = opened.checkpoint.config
    model = build(config)
    n = model.config.layers
    parts = parts_of(cast(nn.Module, model), n)
    stages = [powers[i : i + tensor] for i in range(0, len(powers), tensor)]
    if len(stages) > n:
        raise RequestError(
            f"a pipeline of {len(stages)} stages, and the model has {n} layers; use {n} at the most"
        )
    tied = HEAD not in tensors.expected(model)
    beside = parts.first + parts.last - (parts.first if tied else 0)
    size = opened.weight_bytes() / (beside + sum(parts.layers))
    fastest = max(min(p.bytes_per_s for p in stage) for stage in stages)
    speeds, memories = [], []
    for stage in stages:
        speed = min(p.bytes_per_s for p in stage)
        speeds.append(fastest if speed > ALIKE * fastest else speed)
        memories.append(WEIGHTS_SHARE * tensor * min(p.memory_bytes for p in stage))
    counts = place_layers(
        [int(size * count) for count in parts.layers],
        speeds,
        first=int(size * parts.last),
        limits=[memories[0] - size * (beside - parts.last), *memories[1:]],
    )
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
