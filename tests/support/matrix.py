# ruff: noqa: E501, RUF001
"""Every kind of cache in every situation: what is proven, as a table.

`python -m tests.support.matrix --write` writes tests/engine/MATRIX.md, in about two minutes.
"""

import sys
from pathlib import Path
from typing import NamedTuple

from mlxserve.config import EngineConfig
from mlxserve.engine.cache_plan import cache_groups
from mlxserve.errors import RequestError
from tests.support.caches import KINDS, REFUSED, SAMPLING
from tests.support.composed import ComposedModel
from tests.support.situations import SITUATIONS, Impossible, Stage

TABLE = Path(__file__).parents[1] / "engine" / "MATRIX.md"

HEAD = """# What the cache is proven to do

Written by `python -m tests.support.matrix --write`; tests/engine/test_matrix.py proves each cell again.

A row is a kind of cache: what the layers of a tiny model keep, and the settings. A column is what
happens to a request. In each cell, every answer was compared with that of the same request alone, its
prompt computed whole and nothing cached: each token, its logprob, and the 20 likeliest with theirs, to
the bit. The first number is how many tokens were compared so; what follows shows that it happened. With
small pages all of it is done greedily and again with seeded sampling; where several run, some do this
and some that. All is done with the kernels that users have: on Linux the native ones, with steps that
run from a recording where layers keep keys and values; greedily with small pages again with the
reference kernels of the cache. Where a kind can't be in a situation, or is refused, the reason stands
there.
"""


class Cell(NamedTuple):
    """One kind of cache in one situation."""

    kind: str
    situation: str
    page_tokens: int
    sampling: str

    @property
    def quick(self) -> bool:
        return self.page_tokens < 64 and self.sampling == "greedy"


def cells() -> list[Cell]:
    """All that are proven. Of pages of 64, which take longer, the first request is greedy."""
    small = [
        Cell(name, situation, kind.small, sampling)
        for name, kind in KINDS.items()
        for situation in SITUATIONS
        for sampling in SAMPLING
    ]
    return small + [
        Cell(name, situation, 64, "greedy") for name in KINDS for situation in SITUATIONS
    ]


def prove(cell: Cell) -> str:
    """Bring it about and compare every answer. Returns the table's entry."""
    stage = Stage(cell.kind, cell.page_tokens, cell.sampling)
    try:
        runs, shown = SITUATIONS[cell.situation](stage)
    except Impossible as reason:
        return f"– ({reason})"
    compared = 0
    for run in runs:
        for name, asked in run.asked.items():
            expected, got = stage.solo(asked), run.answers[name]
            assert len(got) == len(expected) or name in run.aborted, f"{name} is cut short"
            assert got == expected[: len(got)], f"{name} has another answer than alone"
            compared += len(got)
    return f"{compared}: {shown}"


def refusal(name: str) -> str:
    """Why a kind is refused when the engine starts."""
    kind = REFUSED[name]
    specs = ComposedModel(kind.layers(64)).layer_specs()
    try:
        cache_groups(specs, EngineConfig(**kind.config(64)))
    except RequestError as error:
        return str(error)
    raise AssertionError(f"{name} isn't refused")


def table(entries: dict[Cell, str]) -> str:
    """The whole file. entries: of each cell, those that differ in sampling only being the same."""
    lines = [HEAD]
    for title, small in (
        ("Pages of 4 tokens; of 8 where keys take 4 bits", True),
        ("Pages of 64", False),
    ):
        lines += [f"\n## {title}\n", "| | " + " | ".join(SITUATIONS) + " |"]
        lines.append("| --- |" + " --- |" * len(SITUATIONS))
        for name, kind in KINDS.items():
            size = kind.small if small else 64
            row = [entries[Cell(name, situation, size, "greedy")] for situation in SITUATIONS]
            lines.append(f"| {name} | " + " | ".join(row) + " |")
    lines.append("\n## Refused\n")
    lines += [f"- {name}: {refusal(name)}" for name in REFUSED]
    return "\n".join(lines) + "\n"


def committed() -> dict[tuple[str, str, bool], str]:
    """The entries of the committed table by kind, situation, and whether pages are small."""
    found, sections = {}, TABLE.read_text("utf-8").split("\n## ")
    for small, section in ((True, sections[1]), (False, sections[2])):
        rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
        for name, *row in rows[2:]:
            names = rows[0]
            found |= {(name, at, small): text for at, text in zip(names, row, strict=True)}
    return found


if __name__ == "__main__":
    text = table({cell: prove(cell) for cell in cells()})
    if "--write" in sys.argv[1:]:
        TABLE.write_text(text, "utf-8")
    print(text)
