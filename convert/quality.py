"""What a conversion cost: the error of each matrix, and how far apart model and source are."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlxserve.errors import MlxserveError
from mlxserve.types import OnProgress

from .workspace import Squares

if TYPE_CHECKING:
    from mlxserve.comparison import Comparison

TEXTS = Path(__file__).parent / "texts"
HELD_OUT = TEXTS / "held_out.txt"
WORST = 3  # matrices that are named
ENGINE = {"max_batch": 1, "prefix_cache": False}


@dataclass(frozen=True, slots=True)
class Quality:
    """What a conversion cost.

    errors: by the name of each quantised matrix, in the model's order, the root mean square of what
    rounding changed, relative to that of the matrix. error: the same over all of them, 0 if there
    are none. comparison: with the source, on the held-out text that comes with the package; None
    where it wasn't made, and then not_compared says why.
    """

    errors: Mapping[str, float]
    error: float
    comparison: "Comparison | None"
    not_compared: str

    def worst(self, most: int = WORST) -> list[tuple[str, float]]:
        """The matrices with the largest errors, the largest first."""
        return sorted(self.errors.items(), key=lambda pair: -pair[1])[:most]


def summarise(
    squares: Mapping[str, Squares], comparison: "Comparison | None", not_compared: str
) -> Quality:
    """squares: by the names of weights."""
    whole = Squares(*map(sum, zip(*squares.values(), strict=True))) if squares else Squares(0, 0)
    errors = {name.removesuffix(".weight"): _relative(each) for name, each in squares.items()}
    return Quality(errors, _relative(whole), comparison, not_compared)


def measure(
    source: Path, made: Path, on_progress: OnProgress | None = None
) -> "tuple[Comparison | None, str]":
    """Compare a model with its source on the held-out text; or None, and why that can't be done.

    Both are in memory at once.
    """
    # Imported late: a conversion alone needs no engine.
    from mlxserve.comparison import check_room, compare
    from mlxserve.llm import LLM

    try:
        check_room([source, made])
        with (
            LLM(source, on_progress=on_progress, **ENGINE) as reference,
            LLM(made, on_progress=on_progress, **ENGINE) as model,
        ):
            text = HELD_OUT.read_text(encoding="utf-8")
            return compare(reference, model, text, on_progress=on_progress), ""
    except MlxserveError as e:  # hours of work aren't lost to it
        return None, str(e)


def _relative(squares: Squares) -> float:
    return math.sqrt(squares.error / squares.whole) if squares.whole else 0.0


def facts(quality: Quality) -> list[tuple[str, str]]:
    """Names and values, for people: of the card, the report and the terminal."""
    rows = []
    if quality.errors:
        named = ", ".join(f"{name} {error:.1%}" for name, error in quality.worst())
        rows += [("error of weights", f"{quality.error:.1%}"), ("largest errors", named)]
    if (found := quality.comparison) is None:
        return [*rows, ("beside the source", f"not measured: {quality.not_compared}")]
    return [
        *rows,
        ("perplexity", f"{found.perplexity:.3f}, the source's {found.reference_perplexity:.3f}"),
        (
            "KL divergence",
            f"mean {found.mean_divergence:.4f}, 95th percentile {found.p95_divergence:.4f} nats",
        ),
        ("same likeliest token", f"{found.agreement:.1%} of {found.tokens:,} tokens"),
    ]
