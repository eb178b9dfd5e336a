"""What `mlxserve plan` prints: the figures and a table, or one JSON object."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from mlxserve.cache.spec import KVBits, token_bytes
from mlxserve.cli.plan_figures import MEMORY, Figure, Setting, bits_name, sections
from mlxserve.engine import estimates
from mlxserve.report import count_binary as size

PACKED = (KVBits(8, 8), KVBits(8, 4), KVBits(4, 4))


def show(at: Setting, asked: Mapping[str, Any], *, explain: bool, as_json: bool) -> None:
    """Print the plan: sections of figures and a table, or one JSON object."""
    found = sections(at, asked)
    rows = _choices(at)
    if as_json:
        print(json.dumps(_plain(at, found, rows, explain=explain)))
        return
    model = at.model
    print(
        f"{model.name}: {model.kind}, {model.parameters:,} parameters, context up to "
        f"{model.context_tokens:,} tokens"
    )
    for title, figures in found.items():
        print(f"\n{title}")
        width = max(len(figure.label) for figure in figures)
        for figure in figures:
            print(f"  {figure.label:{width}}  {figure.text}")
            if explain:
                print(f"    = {figure.formula}")
                if figure.numbers:
                    print(f"    = {figure.numbers}")
        if title == MEMORY:
            _show_table(at, rows)
            if explain:
                print(
                    "    longest = most tokens with users * cache of a user <= room for the cache"
                )
                print("    most users = floor(room for the cache / cache of a user)")


def _plain(
    at: Setting, found: Mapping[str, list[Figure]], rows: list["_Row"], *, explain: bool
) -> dict[str, Any]:
    out: dict[str, Any] = {
        "model": at.model.name,
        "model_type": at.model.kind,
        "parameters": at.model.parameters,
        "model_context_tokens": at.model.context_tokens,
        "context_tokens": at.context_tokens,
        "users": at.users,
        "kv_bits": bits_name(at.bits, at.itemsize),
        "layers": [
            {"count": count, "kind": type(spec).__name__, **asdict(spec)}
            for spec, count in Counter(at.model.specs).items()
        ],
    }
    for title, figures in found.items():
        out[title.lower().replace(" ", "_")] = {f.name: f.value for f in figures}
    out["by_kv_bits"] = [row._asdict() for row in rows]
    if explain:
        out["formulas"] = {
            f.name: " = ".join(filter(None, (f.formula, f.numbers)))
            for figures in found.values()
            for f in figures
        }
    return out


class _Row(NamedTuple):
    """A row of the table: the load and what would fit, with these bits."""

    kv_bits: str
    token_bytes: float
    load_bytes: int
    fits: bool
    longest_context_tokens: int
    most_users: int


def _choices(at: Setting) -> list[_Row]:
    """The setting's bits first, then those that it could have instead."""
    others = [KVBits(), *PACKED] if any(spec.packs for spec in at.model.specs) else []
    rows = []
    for bits in [at.bits, *(bits for bits in others if bits != at.bits)]:
        load = at.users * at.sequence_bytes(bits)
        longest = estimates.longest_context(
            at.model.specs,
            at.users,
            at.room_bytes,
            at.itemsize,
            bits,
            limit_tokens=at.model.context_tokens,
        )
        rows.append(
            _Row(
                bits_name(bits, at.itemsize),
                token_bytes(at.model.specs, at.itemsize, bits),
                load,
                load <= at.room_bytes,
                longest,
                estimates.most_users(at.room_bytes, at.sequence_bytes(bits)),
            )
        )
    return rows


def _show_table(at: Setting, rows: list[_Row]) -> None:
    users = f"{at.users:,} user{'s' if at.users > 1 else ''}"
    table = [
        (
            "CACHE BITS",
            "PER TOKEN",
            "CACHE",
            "FITS",
            f"LONGEST, {users}",
            f"MOST USERS, {at.context_tokens:,}",
        )
    ]
    table += [
        (
            row.kv_bits,
            size(row.token_bytes),
            size(row.load_bytes),
            "yes" if row.fits else "NO",
            f"{row.longest_context_tokens:,}",
            f"{row.most_users:,}",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print()
    for cells in table:
        print("  " + "  ".join(map(str.rjust, cells, widths)))
