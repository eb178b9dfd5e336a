"""What a packed cache costs in quality: perplexity, and a needle in 4,000 tokens.

    python -m benchmarks.kv_quality [--model smollm2-135m] [--text FILE] [--tokens 8000]

Every form of the cache reads the same windows of the same text, in one run; the figures are ratios
to the cache that isn't packed. A needle is a made-up fact somewhere in the text; the figure is how
many tokens of the fact are the likeliest ones when it is asked for at the end. Without --text it
reads the topics of Python's own help, which every Python has.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import mlxserve

FORMS: tuple[Any, ...] = (16, 8, "8/4", 4)  # beside the one that isn't packed
WINDOW = 2000
NEEDLE_TOKENS = 4000
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
NEEDLE = "\nThe secret number of {city} is {number}.\n"
QUESTION = "\nThe secret number of {city} is"
FACTS = (("Lisbon", 48213), ("Tampere", 90567), ("Cuzco", 31742), ("Busan", 75806), ("Graz", 62490))


def perplexity(llm: mlxserve.LLM, ids: list[int]) -> float:
    losses = [
        -found.logprob
        for at in range(0, len(ids), WINDOW)
        for found in llm.prompt_logprobs(ids[at : at + WINDOW])
        if found is not None
    ]
    return math.exp(math.fsum(losses) / len(losses))


def needles(llm: mlxserve.LLM, ids: list[int]) -> tuple[float, float]:
    """The share of the facts' tokens that are the likeliest, and their mean log-probability."""
    encode = llm.tokenizer.encode
    hits, logprobs = [], []
    for depth, (city, number) in zip(DEPTHS, FACTS, strict=True):
        at = int(depth * NEEDLE_TOKENS)
        hay = [*ids[:at], *_middle(llm, NEEDLE, city, number), *ids[at:NEEDLE_TOKENS]]
        question = _middle(llm, QUESTION, city, number)
        answer = encode(f"{QUESTION} {number}".format(city=city))[-_digits(llm, city, number) :]
        found = llm.prompt_logprobs([*hay, *question, *answer], top=1)[-len(answer) :]
        hits += [entry.top[0][0] == entry.token_id for entry in found if entry is not None]
        logprobs += [entry.logprob for entry in found if entry is not None]
    return sum(hits) / len(hits), math.fsum(logprobs) / len(logprobs)


def _middle(llm: mlxserve.LLM, text: str, city: str, number: int) -> list[int]:
    """Ids of a text inside another: without the token that begins a text."""
    ids = llm.tokenizer.encode(text.format(city=city, number=number))
    return ids[len(llm.tokenizer.encode("")) :]


def _digits(llm: mlxserve.LLM, city: str, number: int) -> int:
    asked = len(llm.tokenizer.encode(QUESTION.format(city=city)))
    return len(llm.tokenizer.encode(f"{QUESTION} {number}".format(city=city))) - asked


def measure(model: str, kv_bits: Any, text: str, tokens: int) -> dict[str, float]:
    with mlxserve.load(model, kv_bits=kv_bits, max_batch=1) as llm:
        ids = llm.tokenizer.encode(text)
        if len(ids) < max(tokens, NEEDLE_TOKENS):
            raise SystemExit(
                f"the text has {len(ids)} tokens; give one of {max(tokens, NEEDLE_TOKENS)}"
            )
        share, logprob = needles(llm, ids)
        return {
            "perplexity": perplexity(llm, ids[:tokens]),
            "needle_share": share,
            "needle_logprob": logprob,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    text = args.text.read_text() if args.text else "\n".join(topics.values())
    plain = measure(args.model, None, text, args.tokens)
    results = {"plain": plain}
    print(f"{'':6}{'perplexity':>12}{'':>10}{'needle':>8}{'log-probability':>17}")
    for form in (None, *FORMS):
        figures = plain if form is None else measure(args.model, form, text, args.tokens)
        results[str(form or "plain")] = figures
        more = figures["perplexity"] / plain["perplexity"] - 1
        print(
            f"{form or 'plain'!s:6}{figures['perplexity']:12.4f}{more:+10.3%}"
            f"{figures['needle_share']:8.0%}{figures['needle_logprob']:17.3f}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
