"""From what compare.py measured to Markdown: medians, ratios, bandwidth, lines. No measuring here.

`results` is what goes into the JSON file, so that a report can be made again from it:

    machine: facts, with `threads` and `bandwidth`, bytes per second, one per round and model
    engines: by name, {"about": {...}, "note": ...} or {"skipped": why and what to do}
    models: a list of {name, file, size_bytes, kv_layers, read_s, points, engines}
        points: {kind: "prefill" or "decode", context, batch}
        engines: by name, {weight_bytes, kv_itemsize, loads, samples, failed, left_out}
            loads: {load_s, first_token_s, peak}
            samples: by point, {s, others, peak, ...}, one per round
                s: of reading all prompts, or of the median step of one decode
                others: the part of the cores that other processes took
            failed, left_out: by point, why there is no number
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

OURS = "mlxserve"
Results = Mapping[str, Any]
NOTHING = "-"
QUIET = 0.05


class Line(NamedTuple):
    """y = a + b x, and the largest distance of a point from it, relative to the point."""

    a: float
    b: float
    worst: float


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Line | None:
    """The line with least squares; None for fewer than two different xs."""
    if len(set(xs)) < 2:
        return None
    x0, y0 = mean(xs), mean(ys)
    b = sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True))
    b /= sum((x - x0) ** 2 for x in xs)
    a = y0 - b * x0
    worst = max(abs(a + b * x - y) / y for x, y in zip(xs, ys, strict=True))
    return Line(a, b, worst)


def kv_bytes(layers: Iterable[Sequence[Any]], tokens: float, itemsize: int) -> float:
    """Bytes of keys and values that one row's step reads. layers: (heads, dim, window or None)."""
    return sum(
        2 * heads * dim * itemsize * (tokens if window is None else min(tokens, window))
        for heads, dim, window in layers
    )


def point_name(point: Mapping[str, Any]) -> str:
    """How a point is called in tables and JSON."""
    many = f" x{point['batch']}" if point["batch"] > 1 else ""
    return f"{point['kind']} {point['context']}{many}"


def seconds(engine: Results, point: Mapping[str, Any]) -> float | None:
    """The median over rounds; None where nothing was measured."""
    samples = engine["samples"].get(point_name(point), [])
    return median(sample["s"] for sample in samples) if samples else None


def rate(engine: Results, point: Mapping[str, Any]) -> float | None:
    """Tokens per second over all rows."""
    s = seconds(engine, point)
    tokens = point["batch"] * (point["context"] if point["kind"] == "prefill" else 1)
    return None if s is None else tokens / s


def step_bytes(model: Results, engine: Results, point: Mapping[str, Any]) -> float:
    """What a decode step has to read: the weights once, and every row's keys and values."""
    cached = kv_bytes(model["kv_layers"], _tokens(engine, point), engine["kv_itemsize"])
    return engine["weight_bytes"] + point["batch"] * cached


def _tokens(engine: Results, point: Mapping[str, Any]) -> float:
    """A row's tokens half way through the measured steps; the first step isn't among them."""
    samples = engine["samples"].get(point_name(point), [])
    steps = len(samples[0].get("step_s", ())) if samples else 0
    return point["context"] + 1 + (steps + 1) / 2


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; columns but the first are aligned right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def number(value: float | None, unit: float = 1, digits: int = 3) -> str:
    """A value in units, to some digits; a dash for None."""
    if value is None:
        return NOTHING
    value /= unit
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def ratio(ours: float | None, theirs: float | None, *, less_is_better: bool = False) -> str:
    """How many times better ours is: above 1 we win, in either kind of number."""
    if ours is None or theirs is None or not ours or not theirs:
        return NOTHING
    return f"{(theirs / ours if less_is_better else ours / theirs):.2f}x"


def compared(
    model: Results,
    rows: Iterable[tuple[str, Callable[[Results], float | None], float, bool]],
    *,
    ratios: bool = True,
) -> str:
    """A table with a column per engine, then our ratio to each of the others.

    rows: title, the value of an engine, its unit, and whether less is better.
    """
    engines = model["engines"]
    others = [name for name in engines if name != OURS] if ratios and OURS in engines else []
    lines = []
    for title, value, unit, less in rows:
        values = {name: value(engine) for name, engine in engines.items()}
        cells = [number(v, unit) for v in values.values()]
        cells += [ratio(values[OURS], values[name], less_is_better=less) for name in others]
        lines.append([title, *cells])
    return table(["", *engines, *(f"us / {name}" for name in others)], lines)


def _title(point: Mapping[str, Any]) -> str:
    if point["kind"] == "prefill":
        return f"prefill {point['context']}"
    return f"decode, context {point['context']}, batch {point['batch']}"


def speed(model: Results) -> str:
    """Tokens per second at every point; a batch's are those of all its rows."""
    return compared(
        model,
        [(f"{_title(p)}, tok/s", lambda e, p=p: rate(e, p), 1, False) for p in _points(model)],
    )


def bandwidth(model: Results, bytes_per_s: float) -> str:
    """Percent of the measured bandwidth that a decode step's bytes over its time come to."""

    def percent(engine: Results, point: Mapping[str, Any]) -> float | None:
        s = seconds(engine, point)
        return None if s is None else 100 * step_bytes(model, engine, point) / s / bytes_per_s

    decodes = _points(model, "decode")
    return compared(
        model,
        [(f"{_title(p)}, %", lambda e, p=p: percent(e, p), 1, False) for p in decodes],
        ratios=False,
    )


def context_line(model: Results, engine: Results, bytes_per_s: float) -> list[str]:
    """The line through a single row's step times, and what its slope would be at full bandwidth.

    Two points always lie on a line, so it takes three.
    With windows the bytes don't grow evenly either, so theirs is the slope of the same fit.
    """
    points = [p for p in _points(model, "decode") if p["batch"] == 1]
    times = {p["context"]: s for p in points if (s := seconds(engine, p)) is not None}
    tokens = [_tokens(engine, p) for p in points if p["context"] in times]
    cached = [kv_bytes(model["kv_layers"], n, engine["kv_itemsize"]) for n in tokens]
    line, read = fit_line(tokens, list(times.values())), fit_line(tokens, cached)
    if len(times) < 3 or line is None or read is None:
        return [NOTHING] * 6
    least = read.b / bytes_per_s
    return [
        number(line.a, 1e-3),
        number(line.b, 1e-6),
        number(read.b),
        number(least, 1e-6),
        f"{line.b / least:.2f}x",
        f"{100 * line.worst:.1f} %",
    ]


def load_and_memory(model: Results) -> str:
    """Load time and peak memory, against reading the file and against weights plus cache."""
    points = _points(model)

    def loads(key: str) -> Callable[[Results], float | None]:
        return lambda e: median(x[key] for x in e["loads"]) if e["loads"] else None

    def usable(engine: Results) -> float | None:
        both = [x["load_s"] + x["first_token_s"] for x in engine["loads"]]
        return median(both) if both else None

    def peak(engine: Results) -> float | None:
        found = [s["peak"] for samples in engine["samples"].values() for s in samples]
        return max(found, default=None)

    def needed(engine: Results) -> float | None:
        sizes = [step_bytes(model, engine, p) for p in points if point_name(p) in engine["samples"]]
        return max(sizes, default=None)

    def over(engine: Results) -> float | None:
        most, least = peak(engine), needed(engine)
        return most / least if most and least else None

    read_s = median(model["read_s"])
    return "\n\n".join(
        [
            compared(
                model,
                [
                    ("load, s", loads("load_s"), 1, True),
                    ("load and a first token, s", usable, 1, True),
                    ("peak memory once loaded, MB", loads("peak"), 1e6, True),
                    ("peak memory of all, MB", peak, 1e6, True),
                ],
            ),
            compared(
                model,
                [
                    (
                        "load / reading the GGUF file",
                        lambda e: _over(loads("load_s")(e), read_s),
                        1,
                        True,
                    ),
                    ("weights and largest cache, MB", needed, 1e6, True),
                    ("peak memory / weights and cache", over, 1, True),
                ],
                ratios=False,
            ),
            f"Reading the file from the page cache: {number(read_s)} s.",
        ]
    )


def _over(value: float | None, by: float) -> float | None:
    return None if value is None else value / by


def thread_shares(model: Results) -> str:
    """Percent of a decode step in which the thread that builds it is on a core."""

    def share(engine: Results, point: Mapping[str, Any]) -> float | None:
        samples = engine["samples"].get(point_name(point), [])
        known = [s["thread_share"] for s in samples if s.get("thread_share") is not None]
        return 100 * median(known) if known else None

    decodes = _points(model, "decode")
    return compared(
        model,
        [(f"{_title(p)}, %", lambda e, p=p: share(e, p), 1, True) for p in decodes],
        ratios=False,
    )


def _points(model: Results, kind: str | None = None) -> list[Mapping[str, Any]]:
    return [p for p in model["points"] if kind in (None, p["kind"])]


def noise(model: Results) -> str:
    """How far the rounds disagree, and what else ran on the machine, at worst."""
    spreads, others = [(1.0, "")], [(0.0, "")]
    for name, engine in model["engines"].items():
        for point, samples in engine["samples"].items():
            times = [sample["s"] for sample in samples]
            spreads.append((max(times) / min(times), f"{name}, {point}"))
            others += [(s.get("others") or 0.0, f"{name}, {point}") for s in samples]
    lines = []
    if max(spreads)[0] > 1:
        lines.append("Slowest over fastest round, at worst: {:.2f} ({}).".format(*max(spreads)))
    if max(others)[0] > QUIET:
        share, where = max(others)
        lines.append(
            f"**Other processes took up to {100 * share:.0f} % of the cores ({where}): run this "
            "on an idle machine.** llama.cpp suffers most, since its threads wait for each other."
        )
    return " ".join(lines)


def missing(model: Results) -> list[str]:
    """Why there are dashes, a line for each reason."""
    lines: dict[str, list[str]] = {}
    for name, engine in model["engines"].items():
        for what in ("left_out", "failed"):
            for point, why in engine[what].items():
                word = "failed" if what == "failed" else "left out"
                lines.setdefault(f"{name}, {word} ({why})", []).append(point)
    return [f"- {head}: {', '.join(points)}." for head, points in lines.items()]


def preamble(results: Results) -> str:
    """The machine, the engines as they were built, and those that aren't here."""
    machine = results["machine"]
    found = machine["bandwidth"]
    lines = [
        "# mlxserve beside llama.cpp and mlx-lm",
        "",
        f"- {machine['cpu']}, {machine['cores']} cores ({', '.join(machine['features'])}), "
        f"{machine['system']}, Python {machine['python']}; {machine['threads']} threads.",
        f"- Read bandwidth measured in this run: {number(max(found, default=None), 1e9)} GB/s "
        f"(by round: {', '.join(number(b, 1e9) for b in found)}).",
        f"- Medians over {results['options']['rounds']} round(s), a point measured in one engine "
        "after the other, and over the steps of a decode. tok/s of a batch are those of all rows. "
        "`us / X`: above 1, mlxserve is better.",
    ]
    for name, engine in results["engines"].items():
        if "skipped" in engine:
            lines.append(f"- **{name}: skipped.** {engine['skipped']}")
        else:
            about = engine["about"]
            lines.append(f"- {name} {about['version']}: {engine['note']}. {about['info']}")
    return "\n".join([*lines, *(f"- **{text}**" for text in results.get("warnings", ()))])


def markdown(results: Results) -> str:
    """The whole report."""
    bytes_per_s = max(results["machine"]["bandwidth"], default=0.0)
    parts = [preamble(results)]
    for model in results["models"]:
        parts.append(f"## {model['name']} ({model['file']}, {number(model['size_bytes'], 1e6)} MB)")
        if not model["engines"] or not bytes_per_s:
            parts.append("Nothing was measured.")
            continue
        parts += [speed(model), *(text for text in [noise(model)] if text)]
        parts += ["\n".join(missing(model))] if missing(model) else []
        parts += [
            "### Bandwidth\n\nBytes of the engine's weight file and of the keys and values "
            "read, over the time of a decode step, in percent of the measured bandwidth.",
            bandwidth(model, bytes_per_s),
            "### Step time over context\n\nOne row: time = a + b * context. Least b: bytes of keys "
            "and values a token adds, over the measured bandwidth.",
            table(
                [
                    "",
                    "a, ms",
                    "b, us",
                    "bytes a token",
                    "least b, us",
                    "b / least b",
                    "worst point",
                ],
                [
                    [name, *context_line(model, engine, bytes_per_s)]
                    for name, engine in model["engines"].items()
                ],
            ),
            "### Load and memory",
            load_and_memory(model),
            "### Python and graph building\n\nShare of a decode step in which the thread that "
            "builds it is on a core itself.",
            thread_shares(model),
        ]
    return "\n\n".join(parts) + "\n"
