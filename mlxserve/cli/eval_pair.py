"""`mlxserve eval A B`: how far apart two models are."""

import json
import math
from pathlib import Path
from typing import Any

from mlxserve.cli import models, options, terminal
from mlxserve.comparison import Comparison, check_room, check_vocabularies, compare
from mlxserve.config import EngineConfig
from mlxserve.llm import LLM, tokenizer_of
from mlxserve.sources.checkpoint import open_checkpoint
from mlxserve.sources.resolve import resolve

FLAGS = {"context": "--context", "stride": "--stride"}


def evaluate_pair(
    names: tuple[str, str],
    text: str,
    engine: dict[str, Any],
    *,
    context: int | None,
    stride: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Load both models, have them read the text, and print what was found.

    names: the reference and the other, as the user calls them. Raises RequestError where they share
    no vocabulary, and CapacityError where they don't fit in memory together.
    """
    engine = {**engine, "prefix_cache": False}
    with terminal.Progress(quiet=quiet) as progress:
        paths = [_locate(name, progress, quiet=quiet) for name in names]
        check_room(paths, context=context, config=EngineConfig(**engine))
        check_vocabularies(*(tokenizer_of(open_checkpoint(path)) for path in paths))
        with (
            options.named(FLAGS),
            LLM(paths[0], on_progress=progress, **engine) as reference,
            LLM(paths[1], on_progress=progress, **engine) as model,
        ):
            found = compare(
                reference, model, text, context=context, stride=stride, on_progress=progress
            )
    show(found, as_json=as_json)


def _locate(name: str, progress: terminal.Progress, *, quiet: bool) -> Path:
    return resolve(models.ready(name, quiet=quiet), progress)


def show(found: Comparison, *, as_json: bool) -> None:
    """Print the results: one `name: value` per line, or one JSON object."""
    numbers = {
        "perplexity_a": found.reference_perplexity,
        "perplexity_b": found.perplexity,
        "kl_mean": found.mean_divergence,
        "kl_p95": found.p95_divergence,
        "top1_agreement": found.agreement,
    }
    counts = {"tokens": found.tokens, "context": found.context, "stride": found.stride}
    if as_json:
        plain = {name: x if math.isfinite(x) else None for name, x in numbers.items()}
        print(json.dumps({**plain, **counts}))
        return
    for name, x in numbers.items():
        print(f"{name}: {x:.4f}")
    for name, n in counts.items():
        print(f"{name}: {n}")
