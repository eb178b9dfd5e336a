"""Which layers each stage of a pipeline has, by the memory and the speed of its machines."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
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
WEIGHTS_SHARE = 0.8  # of memory, at the most: the cache and a step need the rest


class Power(msgspec.Struct, array_like=True, frozen=True):
    """What a rank has. bytes_per_s: that it reads from memory, which a step's time depends on."""

    memory_bytes: int
    bytes_per_s: float


def power(opened: Opened) -> Power:
    """Of this machine; measured, where its chip isn't known."""
    limit = opened.config.memory_limit_bytes or device_limit_bytes()
    return Power(limit, memory_bandwidth(device.name())[0])


def alike_on_one_host(powers: Mapping[int, Power], hosts: Mapping[int, str]) -> list[Power]:
    """Of all ranks, by number, with one speed for all of a host, which they have measured at once.

    powers, hosts: by rank, what it has, and the name of its machine.
    """
    ranks = sorted(powers)
    speeds = {
        host: max(powers[rank].bytes_per_s for rank in ranks if hosts[rank] == host)
        for host in set(hosts.values())
    }
    return [Power(powers[rank].memory_bytes, speeds[hosts[rank]]) for rank in ranks]


def place_stages(opened: Opened, powers: Sequence[Power], tensor: int) -> list[range]:
    """Consecutive layers for each stage, at least one, so that all take about as long for them.

    powers: of all ranks; tensor: how many of them a stage has. The first stage's memory has to hold
    the embedding and the head, too. Raises RequestError for more stages than layers, and where
    memory doesn't hold them.
    """
    model = build(opened.checkpoint.config)
    n = model.config.layers
    stages = [powers[i : i + tensor] for i in range(0, len(powers), tensor)]
    if len(stages) > n:
        raise RequestError(
            f"a pipeline of {len(stages)} stages, and the model has {n} layers; use {n} at the most"
        )
    parts = parts_of(cast(nn.Module, model), n)
    tied = HEAD not in tensors.expected(model)
    beside = parts.first + parts.last - (parts.first if tied else 0)
    size = opened.weight_bytes() / (beside + sum(parts.layers))
    limits = [WEIGHTS_SHARE * tensor * min(p.memory_bytes for p in stage) for stage in stages]
    limits[0] = max(0.0, limits[0] - size * beside)
    # The head takes time for answers, and none for prompts, for which stages would be uneven by as
    # many layers as were taken off the first: gemma3-270m, of which it is most, read a prompt no
    # faster over two ranks than in one, and 1.5 times as fast with layers divided evenly.
    counts = place_layers([int(size * n) for n in parts.layers], _speeds(stages), limits=limits)
    return [range(end - n, end) for n, end in zip(counts, accumulate(counts), strict=True)]


def _speeds(stages: Sequence[Sequence[Power]]) -> list[float]:
    """Of each stage: its slowest rank's."""
    speeds = [min(power.bytes_per_s for power in stage) for stage in stages]
    fastest = max(speeds)
    return [fastest if speed > ALIKE * fastest else speed for speed in speeds]
