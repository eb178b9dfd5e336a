"""The model card: a README.md with what the Hub wants to know, and what a reader does."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from mlxserve.files import read_text
from mlxserve.report import count_bytes
from mlxserve.sources.mlx_quant import Quantised

from .plan import Item, Plan
from .quality import Quality
from .quality import facts as quality_facts

_FRONT = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)
REPORT = "report.md"  # beside the card, where it was asked for
_KEPT = ("license", "license_name", "license_link", "language")


class Origin(NamedTuple):
    """What was converted: a directory or file, its name on the Hub, if it has one, and the kinds of
    packed numbers that it had, "" if none."""

    path: Path
    repo: str | None
    packed: str

    @property
    def name(self) -> str:
        """What the model is called."""
        if self.repo is not None:
            return self.repo.rpartition("/")[2]
        return self.path.resolve().name.removesuffix(".gguf")


def model_card(plan: Plan, origin: Origin, quality: Quality, where: str, *, report: bool) -> str:
    """The card's text. where: what to give as --model; report: whether there is one beside it."""
    front = ["library_name: mlx", "pipeline_tag: text-generation", "tags:", "- mlx"]
    name, repo = origin.name, origin.repo
    if repo is not None:
        front += [f"base_model: {repo}", "base_model_relation: quantized"]
    front += _kept_front(origin.path / "README.md")
    made_from = f"`{name}`" if repo is None else f"[{repo}](https://huggingface.co/{repo})"
    lines = [
        "---",
        *front,
        "---",
        "",
        f"# {name}, {'converted' if plan.recipe is None else 'quantised'} for MLX",
        "",
        f"Made from {made_from} by `mlxserve convert`.",
        "",
        *table(plan_facts(plan, origin.packed)),
        "",
        "## What that cost",
        "",
        *table(quality_facts(quality)),
        "",
        *([f"[{REPORT}]({REPORT}) has the error of each matrix.", ""] if report else []),
        "## How to run it",
        "",
        "```",
        f"mlxserve chat --model {where}",
        f"mlx_lm.chat --model {where}",
        "```",
        "",
    ]
    return "\n".join(lines)


def plan_facts(plan: Plan, packed: str) -> list[tuple[str, str]]:
    """Names and values of what was done."""
    rows = [
        ("parameters", f"{plan.parameters:,}"),
        ("size", count_bytes(plan.weight_bytes)),
        ("bits per weight", f"{plan.bits_per_weight:.2f}"),
        ("recipe", (plan.recipe.name or "one for all") if plan.recipe else "not quantised"),
    ]
    for scheme, items in _by_scheme(plan.items):
        size = sum(item.parameters for item in items) / plan.parameters
        what = describe(scheme) if scheme else "not quantised, " + _dtypes(items)
        rows.append((what, f"{size:.1%} of the weights: {_ends(items)}"))
    if packed:
        rows.append(("the source's own numbers", f"{packed}, unpacked first"))
    return rows


def table(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Markdown, without a heading."""
    return ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)]


def describe(scheme: Quantised) -> str:
    """A scheme in words."""
    kind = "" if scheme.mode == "affine" else f"{scheme.mode}, "
    return f"{kind}{scheme.bits} bits in groups of {scheme.group_size}"


def _by_scheme(items: Iterable[Item]) -> list[tuple[Quantised | None, list[Item]]]:
    found: dict[Quantised | None, list[Item]] = {}
    for item in items:
        found.setdefault(item.scheme, []).append(item)
    return sorted(found.items(), key=lambda pair: -sum(i.parameters for i in pair[1]))


def _dtypes(items: Iterable[Item]) -> str:
    return " and ".join(sorted({item.parts[0].dtype for item in items}))


def _ends(items: Iterable[Item]) -> str:
    """What the tensors are called, without their layers."""
    names = (item.parts[0].name.removesuffix(".weight").removesuffix(".bias") for item in items)
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))


def _kept_front(card: Path) -> list[str]:
    """The licence and languages of the source's own card."""
    if not card.is_file():
        return []
    found = _FRONT.match(read_text(card))
    lines, keep = [], False
    for line in found[1].split("\n") if found else []:
        if not line.startswith((" ", "-")):
            keep = line.partition(":")[0] in _KEPT
        if keep:
            lines.append(line)
    return lines
