"""`mlxserve plan --hosts --link`: how long steps take with what hosts send each other.

What is computed is bounded by memory and FLOP/s, as without links; what is sent, by
`distributed.cost`. So times are bounds as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mlxserve.cli.plan_figures import Figure, Setting, seconds
from mlxserve.cli.plan_hosts import Host, cache_read
from mlxserve.config import EngineConfig
from mlxserve.distributed import cost
from mlxserve.distributed.cost import Link, Sent
from mlxserve.engine import cache_plan, estimates
from mlxserve.engine.scheduler import part_tokens
from mlxserve.errors import RequestError

LINKS = "Links"


class Row(NamedTuple):
    """A way of dividing the model, over a link. figures: by what they are of."""

    way: str
    link: Link
    by_load: dict[str, Figure]

    @property
    def figures(self) -> list[Figure]:
        return list(self.by_load.values())


def parse_links(texts: Sequence[str]) -> tuple[Link, ...]:
    """The links of these names, or of figures as in `0.3/40`; all that have names for none.

    Raises RequestError for what is neither.
    """
    return tuple(map(_link, dict.fromkeys(texts))) or tuple(cost.LINKS.values())


def _link(text: str) -> Link:
    if text in cost.LINKS:
        return cost.LINKS[text]
    try:
        latency_ms, gigabits = map(float, text.split("/"))
    except ValueError:
        raise RequestError(
            f"--link is {text!r}; write one of {', '.join(cost.LINKS)}, or a message's latency in "
            "ms and Gbit/s, as in 0.3/40"
        ) from None
    estimates.check_above_zero("--link", latency_ms)
    estimates.check_above_zero("--link", gigabits)
    return Link(text, latency_ms / 1e3, gigabits * 1e9 / 8)


def rows(
    at: Setting, found: Mapping[str, list[Host]], links: Sequence[Link], asked: Mapping[str, Any]
) -> list[Row]:
    """A row for each way and link, with figures of what was asked for; none for nothing."""
    if not {"bandwidth", "tflops"} & asked.keys():
        return []
    return [
        Row(way, link, dict(_figures(at, way, hosts, link, asked)))
        for way, hosts in found.items()
        for link in links
    ]


def _figures(
    at: Setting, way: str, hosts: list[Host], link: Link, asked: Mapping[str, Any]
) -> Iterator[tuple[str, Figure]]:
    name, label = f"{way}_{link.name}", f"{way}, {link.name}"
    if "bandwidth" in asked:
        for users in sorted({1, at.users}):
            load = "batch" if users > 1 else "solo"
            step = _decode(at, way, hosts, link, users, asked["bandwidth"] * 1e9)
            who = f"all {users:,} together" if users > 1 else "one user alone"
            rate = users / step.s
            yield (
                f"{load} step",
                Figure(
                    f"{name}_{load}_step_s",
                    f"{label}, step, {who}",
                    step.s,
                    f"at least {_ms(step.s)}",
                    step.formula,
                    step.numbers,
                ),
            )
            yield (
                f"{load} rate",
                Figure(
                    f"{name}_{load}_tokens_per_s",
                    f"{label}, {who}",
                    rate,
                    f"at most {rate:,.1f} tokens/s",
                    "users / step",
                    f"{users:,} / {_ms(step.s)}",
                ),
            )
    if "tflops" in asked:
        step = _prefill(at, way, len(hosts), link, asked)
        figure = Figure(
            f"{name}_prefill_s",
            f"{label}, prompt",
            step.s,
            f"at least {_ms(step.s)}",
            step.formula,
            step.numbers,
        )
        yield "prompt", figure


class _Time(NamedTuple):
    """Seconds, and how they were found, see `Figure`."""

    s: float
    formula: str
    numbers: str


def _decode(
    at: Setting, way: str, hosts: list[Host], link: Link, users: int, bandwidth: float
) -> _Time:
    """A step that gives so many users a token. bandwidth: of each host's memory, bytes/s."""
    sent = _sent(at, users, users)

    def reads_s(parts: int) -> list[float]:
        """Of each host, for one part of the users."""
        each = users / parts
        return [
            (host.at.model.weight_bytes + each * cache_read(host.at)) / bandwidth for host in hosts
        ]

    if way == "tensor":
        reads = reads_s(1)
        return _Time(
            cost.tensor_s(link, sent, reads),
            "(weights + users * cache read for a user, on a host) / bandwidth + (2 * layers + 1) * "
            "a sum of users * width + a sum of ids and a gather of users * vocabulary / hosts",
            f"{_ms(max(reads))} + {_sums(link, len(hosts), [sent])}",
        )
    took, parts = min(
        (cost.pipeline_s(link, sent, reads_s(parts), parts), parts)
        for parts in range(1, min(users, len(hosts)) + 1)
    )
    reads, hop_s = reads_s(parts), cost.hop_s(link, sent, parts)
    return _Time(
        took,
        "the larger of what one part of the users takes on its way, a message of users / parts * "
        "width from each host, and of parts * the slowest host",
        f"max({_ms(sum(reads))} + {len(hosts)} * {_ms(hop_s)}, {parts} * {_ms(max(reads))})",
    )


def _prefill(at: Setting, way: str, hosts: int, link: Link, asked: Mapping[str, Any]) -> _Time:
    """A prompt, cut to the engine's steps."""
    tokens, mfu = asked.get("prompt_tokens", at.context_tokens), asked.get("mfu", 0.5)
    most = cache_plan.step_tokens(EngineConfig())
    if way == "pipeline":
        most = min(most, part_tokens(tokens, hosts))
    steps = [min(most, tokens - start) for start in range(0, tokens, most)]
    all_sent = [_sent(at, count, int(i == len(steps) - 1)) for i, count in enumerate(steps)]
    alone_s = estimates.prefill_s(at.model.parameters, tokens, asked["tflops"] * 1e12, mfu)
    if way == "tensor":
        alone_s /= hosts
        return _Time(
            alone_s + sum(cost.tensor_sent_s(link, hosts, sent) for sent in all_sent),
            "2 * parameters * tokens / (hosts * FLOP/s * share of the peak) + in each step (2 * "
            "layers + 1) sums of its tokens * width, its ids, and in the last a gather of logits",
            f"{_ms(alone_s)} + {_sums(link, hosts, all_sent)}",
        )
    part_s = alone_s / len(steps)
    host_s, hop_s = part_s / hosts, cost.hop_s(link, all_sent[0])
    return _Time(
        cost.prompt_pipeline_s(link, all_sent, [host_s] * hosts),
        "parts = steps; 2 * parameters * tokens / parts / (FLOP/s * share of the peak), and a "
        "message of a part's tokens * width from each host; then the other parts, each on one host",
        f"{_ms(part_s)} + {hosts} * {_ms(hop_s)} + {len(steps) - 1:,} * {_ms(host_s)}",
    )


def _sums(link: Link, hosts: int, steps: Sequence[Sent]) -> str:
    """What steps of tensor parallel send: sums of hidden states, and the rest."""
    count = 2 * steps[0].layers + 1
    sums_s = sum(cost.gather_s(link, hosts, sent.hidden_bytes) for sent in steps)
    rest_s = sum(cost.tensor_sent_s(link, hosts, sent) for sent in steps) - count * sums_s
    return f"{count} * {_ms(sums_s)} + {_ms(rest_s)}"


def _sent(at: Setting, tokens: int, rows: int) -> Sent:
    model = at.model
    return Sent(
        layers=len(model.specs),
        width=model.width,
        vocabulary=model.step.vocab_size,
        itemsize=model.step.itemsize,
        tokens=tokens,
        rows=rows,
    )


def _ms(took: float) -> str:
    return f"{took * 1e3:.3g} ms" if took < 0.9995 else seconds(took)


def table(at: Setting, found: Sequence[Row]) -> list[tuple[str, ...]]:
    """The figures as text, a head first; a column for each that was asked for."""
    heads = {
        "solo step": "ONE USER",
        "solo rate": "TOKENS/S",
        "batch step": f"{at.users:,} USERS",
        "batch rate": "TOKENS/S",
        "prompt": "PROMPT",
    }
    kept = [load for load in heads if found and load in found[0].by_load]
    lines = [("DIVIDED BY", "LINK", *(heads[load] for load in kept))]
    for row in found:
        values = [(load, row.by_load[load].value) for load in kept]
        cells = (f"{x:,.1f}" if load.endswith("rate") else _ms(x) for load, x in values)
        lines.append((row.way, row.link.name, *cells))
    return lines


def notes(links: Sequence[Link]) -> tuple[str, ...]:
    """What a message takes over each."""
    return tuple(
        f"{link.name}: a message = {_ms(link.latency_s)} + bytes / {link.bytes_per_s * 8e-9:.4g} "
        f"Gbit/s, hosts are a {'mesh' if link.mesh else 'ring'}"
        for link in links
    )
