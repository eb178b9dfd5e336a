"""`mlxserve plan --hosts`: a model and its cache divided over several Macs, in two ways.

Tensor parallel: each host computes a share of every layer (Shoeybi et al. 2019, arXiv:1909.08053).
Pipeline parallel: each computes consecutive layers (Huang et al. 2018, arXiv:1811.06965). What
hosts send each other is left out here: see `plan_links`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mlxserve.cache.spec import Latent, LayerSpec, State
from mlxserve.cli import plan_figures
from mlxserve.cli.plan_figures import MEMORY, Figure, PlannedModel, Setting, seconds
from mlxserve.engine import estimates
from mlxserve.errors import RequestError
from mlxserve.report import count_binary as size

HOSTS = "Hosts"


class Host(NamedTuple):
    """What one host has: layers, and a setting of its share of the model and its memory."""

    layers: int
    at: Setting

    @property
    def load_bytes(self) -> int:
        return self.at.users * self.at.sequence_bytes()

    @property
    def fits(self) -> bool:
        return self.load_bytes <= self.at.room_bytes


def parse_hosts(text: str) -> tuple[int, ...]:
    """Bytes of memory of each host, from GiB with commas between. Raises RequestError."""
    try:
        memories = [float(part) for part in text.split(",")]
    except ValueError:
        memories = []
    if len(memories) < 2:
        raise RequestError(
            f"--hosts is {text!r}; write the memory of each of several Macs in GiB, as in 64,36"
        )
    for memory in memories:
        estimates.check_above_zero("--hosts", memory)
    return tuple(int(memory * 2**30) for memory in memories)


def ways(at: Setting, memories: Sequence[int]) -> dict[str, list[Host]]:
    """The hosts' shares by each way of dividing that the model allows.

    Raises RequestError for more hosts than it has query heads and layers.
    """
    model, count = at.model, len(memories)
    found: dict[str, list[Host]] = {}
    if count <= _fewest_query_heads(model):
        found["tensor"] = _tensor(at, memories)
    if count <= len(model.specs):
        found["pipeline"] = _pipeline(at, memories)
    if not found:
        raise RequestError(
            f"--hosts has {count}, and {model.name} has {len(model.specs)} layers, so many are of "
            "no use; write fewer"
        )
    return found


def _fewest_query_heads(model: PlannedModel) -> int:
    return min((heads for heads in model.step.heads if heads), default=1)


def _tensor(at: Setting, memories: Sequence[int]) -> list[Host]:
    """The same share for each: that of the host with the most heads.

    Heads of keys and values aren't cut. With fewer than hosts some hosts have the same one, and
    divide its query heads. A latent or a recurrent state is whole on every host.
    """
    model, count = at.model, len(memories)
    parts = model.parts
    heads = max(
        (_share(spec.heads, query_heads, count) for spec, query_heads in _heads(model)), default=1
    )
    weights = heads * parts.attention + (model.parameters - parts.attention) / count
    share = replace(
        model,
        specs=tuple(_part_of_layer(spec, count) for spec in model.specs),
        weight_bytes=_bytes_of(model, weights),
    )
    return [
        Host(len(model.specs), replace(at, model=share, memory_bytes=memory)) for memory in memories
    ]


def _heads(model: PlannedModel) -> Iterator[tuple[Any, int]]:
    pairs = zip(model.specs, model.step.heads, strict=True)
    return ((spec, heads) for spec, heads in pairs if not isinstance(spec, State))


def _share(kv_heads: int, query_heads: int, hosts: int) -> float:
    """The largest share of a layer's attention: whole groups, or part of one."""
    heads = query_heads if hosts > kv_heads else kv_heads
    return -(-heads // hosts) / heads


def _part_of_layer(spec: LayerSpec, hosts: int) -> LayerSpec:
    if isinstance(spec, State | Latent):
        return spec
    return replace(spec, heads=-(-spec.heads // hosts))


def _pipeline(at: Setting, memories: Sequence[int]) -> list[Host]:
    """Consecutive layers for each, so that the fullest host is as empty as can be.

    The first has the embedding and the head too, see `models.tensor_parallel`.
    """
    model = at.model
    parts = model.parts
    beside = _bytes_of(model, model.parameters - sum(parts.layers))
    weights = [_bytes_of(model, count) for count in parts.layers]
    caches = [
        at.users * estimates.sequence_bytes([spec], at.context_tokens, at.itemsize, at.bits)
        for spec in model.specs
    ]
    needs = [weight + cached for weight, cached in zip(weights, caches, strict=True)]
    counts = estimates.place_layers(needs, memories, beside)
    hosts, begin = [], 0
    for index, (count, memory) in enumerate(zip(counts, memories, strict=True)):
        end = begin + count
        held = sum(weights[begin:end]) + beside * (index == 0)
        step = replace(model.step, heads=model.step.heads[begin:end])
        share = replace(model, specs=model.specs[begin:end], weight_bytes=held, step=step)
        hosts.append(Host(count, replace(at, model=share, memory_bytes=memory)))
        begin = end
    return hosts


def _bytes_of(model: PlannedModel, parameters: float) -> int:
    """Their share of the weights' bytes, all parameters taken to be stored alike."""
    return int(model.weight_bytes * parameters / model.parameters)


def sections(
    at: Setting, found: Mapping[str, list[Host]], asked: Mapping[str, Any]
) -> dict[str, list[Figure]]:
    """The figures by heading, as `plan_figures.sections` has them for one machine."""
    told = {
        "Cache": plan_figures.cache(at),
        MEMORY: list(plan_figures.needs(at)),
        HOSTS: list(_fit(found)),
        "Speed": [*_decode(at, found, asked), *_prefill(at, found, asked)],
        **plan_figures.loads(asked),
    }
    return {heading: figures for heading, figures in told.items() if figures}


def _fit(found: Mapping[str, list[Host]]) -> Iterator[Figure]:
    """What the fullest host has to hold, and whether all fit."""
    formulas = {
        "tensor": "weights * (share of attention * largest share of heads + the rest / hosts)",
        "pipeline": "weights of its layers, on the first host of embedding and output head too",
    }
    for way, hosts in found.items():
        held = max(host.at.model.weight_bytes for host in hosts)
        yield Figure(
            f"{way}_weight_bytes",
            f"{way}, weights",
            held,
            f"{size(held)} on a host at the most",
            formulas[way],
        )
        fits = all(host.fits for host in hosts)
        yield Figure(
            f"{way}_fits",
            f"{way}, fits",
            fits,
            "yes" if fits else "NO, on the hosts below",
            "on each host: cache of its heads or layers <= room for the cache",
        )


def _decode(
    at: Setting, found: Mapping[str, list[Host]], asked: Mapping[str, Any]
) -> Iterator[Figure]:
    """A bound for all hosts together, each of which has the bandwidth."""
    if "bandwidth" not in asked:
        return
    formulas = {
        "tensor": "users * bandwidth / (weights + users * cache read for a user), on a host",
        "pipeline": "users * bandwidth / the larger of what a host reads for the parts of the "
        "batch and what all hosts read for one part",
    }
    for way, hosts in found.items():
        for users in sorted({1, at.users}):
            read = _bytes_read(way, hosts, users)
            rate = users * asked["bandwidth"] * 1e9 / read
            each = f", {rate / users:,.1f} each" if users > 1 else ""
            yield Figure(
                f"{way}_{'batch' if users > 1 else 'solo'}_tokens_per_s",
                f"{way}, " + (f"all {users:,} together" if users > 1 else "one user alone"),
                rate,
                f"at most {rate:,.1f} tokens/s{each}",
                formulas[way],
                f"{users:,} * {asked['bandwidth']:g} GB/s / {size(read)}",
            )


def _bytes_read(way: str, hosts: list[Host], users: int) -> float:
    """What is read one after the other until every user has a token.

    Tensor parallel, all hosts read at once. In a pipeline the batch goes through the hosts in
    parts, of which each host reads one after the other, its weights for each; and a part is read
    for by one host after the other. As many parts as are best.
    """
    reads = [(host.at.model.weight_bytes, cache_read(host.at)) for host in hosts]
    if way == "tensor":
        return max(weights + users * cached for weights, cached in reads)
    return min(
        max(
            max(parts * weights + users * cached for weights, cached in reads),
            sum(weights + users / parts * cached for weights, cached in reads),
        )
        for parts in range(1, min(users, len(hosts)) + 1)
    )


def cache_read(at: Setting) -> int:
    """Bytes of a host's cache that a step reads for one user."""
    return estimates.read_bytes(at.model.specs, at.context_tokens, at.itemsize, at.bits)


def _prefill(
    at: Setting, found: Mapping[str, list[Host]], asked: Mapping[str, Any]
) -> Iterator[Figure]:
    """A bound for all hosts together, each of which has the FLOP/s."""
    if "tflops" not in asked:
        return
    count = len(next(iter(found.values())))
    tokens, mfu = asked.get("prompt_tokens", at.context_tokens), asked.get("mfu", 0.5)
    flops = count * asked["tflops"] * 1e12
    took = estimates.prefill_s(at.model.parameters, tokens, flops, mfu)
    yield Figure(
        "prefill_s",
        "prompt",
        took,
        f"at least {seconds(took)} for {tokens:,} tokens",
        "2 * parameters * tokens / (hosts * FLOP/s * share of the peak)",
        f"2 * {at.model.parameters:,} * {tokens:,} / ({count} * {asked['tflops']:g}e12 * {mfu:g})",
    )


def table(found: Mapping[str, list[Host]]) -> list[tuple[str, ...]]:
    """Each host's share as text, a head first."""
    rows = [("DIVIDED BY", "HOST", "MEMORY", "LAYERS", "WEIGHTS", "CACHE", "ROOM", "FITS")]
    for way, hosts in found.items():
        for number, host in enumerate(hosts, 1):
            sizes = (host.at.memory_bytes, host.at.model.weight_bytes, host.load_bytes)
            memory, weights, load = map(size, sizes)
            fits = "yes" if host.fits else "NO"
            room = size(host.at.room_bytes)
            rows.append((way, str(number), memory, str(host.layers), weights, load, room, fits))
    return rows


def plain(found: Mapping[str, list[Host]]) -> dict[str, list[dict[str, Any]]]:
    """Each way's hosts, for scripts."""
    return {
        way: [
            {
                "memory_bytes": host.at.memory_bytes,
                "layers": host.layers,
                "weight_bytes": host.at.model.weight_bytes,
                "load_bytes": host.load_bytes,
                "room_bytes": host.at.room_bytes,
                "fits": host.fits,
            }
            for host in hosts
        ]
        for way, hosts in found.items()
    }
