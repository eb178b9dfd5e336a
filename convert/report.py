"""report.md: what a conversion did and what it cost, matrix by matrix, with plots."""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mlxserve.errors import RequestError

from .card import REPORT, Origin, describe, plan_facts, table
from .plan import Plan
from .quality import Quality, facts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ERRORS_PLOT, DIVERGENCE_PLOT = "report-errors.png", "report-divergence.png"
BINS = 60
_LAYER = re.compile(r"model\.layers\.(\d+)\.(?:.*\.)?(\w+)")


def check() -> None:
    """Raise RequestError where plots can't be made."""
    if find_spec("matplotlib") is None:
        raise RequestError(
            "report needs matplotlib, which isn't installed; `pip install 'mlxserve[report]'`",
            param="report",
        )


def write_report(folder: Path, origin: Origin, plan: Plan, quality: Quality) -> None:
    """Write the report and its plots. Raises OSError."""
    lines = [f"# {origin.name}: report of the conversion", ""]
    lines += [*table(plan_facts(plan, origin.packed)), "", *table(facts(quality)), ""]
    if (found := quality.comparison) is not None:
        _save(plot_divergence(found.divergence), folder / DIVERGENCE_PLOT)
        lines += [
            "## Divergence from the source",
            "",
            f"Of the next token's distribution, over {found.tokens:,} tokens of held-out text, "
            f"read in windows of {found.context} tokens that begin {found.stride} apart.",
            "",
            f"![Tokens by divergence]({DIVERGENCE_PLOT})",
            "",
        ]
    if quality.errors:
        _save(plot_errors(quality.errors), folder / ERRORS_PLOT)
        lines += [
            "## Error of each matrix",
            "",
            "The root mean square of what rounding changed, relative to that of the matrix.",
            "",
            f"![Errors by layer]({ERRORS_PLOT})",
            "",
            *_errors(plan, quality),
            "",
        ]
    (folder / REPORT).write_text("\n".join(lines), encoding="utf-8")


def _errors(plan: Plan, quality: Quality) -> list[str]:
    schemes = {i.parts[0].name.removesuffix(".weight"): i.scheme for i in plan.items if i.scheme}
    rows = ["| matrix | how | error |", "| --- | --- | ---: |"]
    for name, error in quality.worst(len(quality.errors)):
        rows.append(f"| {name} | {describe(schemes[name])} | {error:.2%} |")
    return rows


def plot_errors(errors: Mapping[str, float]) -> "Figure":
    """Errors over layers, a line for each kind of matrix; what is in no layer as a level."""
    figure, axes = _figure()
    kinds: dict[str, dict[int, float]] = {}
    for name, error in errors.items():
        if found := _LAYER.fullmatch(name):
            kinds.setdefault(found[2], {})[int(found[1])] = 100 * error
        else:
            axes.axhline(100 * error, linestyle=":", color="grey")
            axes.annotate(name, (0, 100 * error), fontsize=7, color="grey", va="bottom")
    for kind, by_layer in kinds.items():
        axes.plot(list(by_layer), list(by_layer.values()), marker=".", label=kind)
    axes.set(xlabel="layer", ylabel="relative error in %")
    axes.set_ylim(0, 110 * max(errors.values()))
    if kinds:
        axes.legend(fontsize=7, ncols=2)
    return figure


def plot_divergence(divergence: np.ndarray) -> "Figure":
    """How many tokens have which divergence, with its mean and 95th percentile."""
    figure, axes = _figure()
    least = 1e-6  # what is nearer counts as this
    values = np.maximum(divergence, least)
    axes.hist(values, bins=np.geomspace(least, max(values.max(), 10 * least), BINS))
    for value, name in (
        (float(divergence.mean()), "mean"),
        (float(np.percentile(divergence, 95)), "95th percentile"),
    ):
        axes.axvline(max(value, least), color="black", linestyle="--" if name == "mean" else ":",
                     label=f"{name} {value:.4f}")  # fmt: skip
    axes.set_xscale("log")
    axes.set(xlabel="KL divergence in nats", ylabel="tokens")
    axes.legend(fontsize=8)
    return figure


def _figure():
    # Not through pyplot, which keeps figures and looks for a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    return figure, figure.add_subplot()


def _save(figure: "Figure", path: Path) -> None:
    figure.savefig(path, dpi=120, metadata={"Software": None})
