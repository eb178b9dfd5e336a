"""What grammars cost a step, as shares of it, on a real model.

    python -m benchmarks.grammar [--model smollm2-135m] [--rows 16] [--rounds 10] [--json FILE]

Three engines take turns, a few steps each: no row with a grammar, every row, and every other row.
Figures are medians over all steps, so that other load on the machine falls on all alike.

share: time in which masks are made and rows with grammars are drawn, of a step; it passes while the
device runs the model. slower: how much longer a step takes for it. mixed: the same where half of
the rows have a grammar.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.cache import Bench, Run, request
from mlxserve.grammar import Grammar
from mlxserve.text.matcher import Grammars
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.types import Request, SamplingParams

PROMPT = 64
STEPS = 12  # of each engine in a round
# Long enough that no answer ends before the benchmark does.
PEOPLE = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "email": {"type": "string", "format": "email"},
            "kind": {"enum": ["guest", "member", "admin"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        },
        "required": ["name", "age", "email", "kind", "tags"],
        "additionalProperties": False,
    },
}


class Rows:
    """An engine with some rows under way, each `every`-th of them with a grammar; 0: none."""

    def __init__(self, bench: Bench, grammars: Grammars, rows: int, every: int, new: int) -> None:
        self.core = bench.core(max_batch=rows, max_batched_tokens=max(128, rows))
        self.run = Run(self.core)
        self.step_s: list[float] = []
        self.mask_s: list[float] = []
        grammar = Grammar.json_schema(PEOPLE)
        requests, matchers = [], {}
        for i in range(rows):
            name, ids = f"r{i}", bench.ids(PROMPT)
            if every and i % every == 0:
                matchers[name] = grammars.matcher(grammar, ids)
                params = SamplingParams(max_tokens=new, grammar=grammar)
                requests.append(
                    Request(
                        id=name, prompt_ids=tuple(ids), params=params, stop_ids=grammars.end_ids
                    )
                )
            else:
                requests.append(request(name, ids, new))
        constrain = self.core.runner.constrain

        def timed(step: Any) -> None:
            start = time.perf_counter()
            constrain(step)
            self.mask_s.append(time.perf_counter() - start)

        self.core.runner.constrain = timed  # type: ignore[method-assign]
        self.run.add(*requests, matchers=matchers)
        self.run.until(lambda: all(len(at) > 2 for at in self.run.at_s.values()))
        self.mask_s.clear()

    def turn(self) -> None:
        """A few steps, and the time of each but the first."""
        self.run.step()
        for _ in range(STEPS):
            start = time.perf_counter()
            self.run.step()
            self.step_s.append(time.perf_counter() - start)
        self.core.settle()


def measure(model: str, rows: int, rounds: int) -> dict[str, float]:
    """The figures, by name."""
    bench = Bench(model, rounds)
    checkpoint = bench.checkpoint
    tokenizer = (
        Tokenizer.from_directory(checkpoint.path)
        if checkpoint.gguf_metadata is None
        else Tokenizer.from_gguf(checkpoint.gguf_metadata)
    )
    grammars = Grammars(tokenizer, bench.model.vocab_size)
    start = time.perf_counter()
    grammars.matcher(Grammar.json_schema(PEOPLE), [])
    first_s = time.perf_counter() - start
    start = time.perf_counter()
    grammars.matcher(Grammar.json_schema(PEOPLE | {"title": "other"}), [])
    compile_s = time.perf_counter() - start
    new = 4 * STEPS * (rounds + 2)
    plain, every, half = (Rows(bench, grammars, rows, n, new) for n in (0, 1, 2))
    for _ in range(rounds):
        for each in (plain, every, half):
            each.turn()
    step = {name: statistics.median(r.step_s) for name, r in (("plain", plain), ("all", every))}
    return {
        "first_ms": first_s * 1e3,
        "compile_ms": compile_s * 1e3,
        "step_ms": step["plain"] * 1e3,
        "mask_ms": statistics.median(every.mask_s) * 1e3,
        "share": statistics.median(every.mask_s) / step["all"],
        "slower": step["all"] / step["plain"],
        "mixed_share": statistics.median(half.mask_s) / statistics.median(half.step_s),
        "mixed_slower": statistics.median(half.step_s) / step["plain"],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    figures = measure(args.model, max(1, args.rows), max(1, args.rounds))
    for name, value in figures.items():
        print(f"{name}: {value:.4g}")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
