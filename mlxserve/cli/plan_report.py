"""What `mlxserve plan` prints: the figures and a table, or one JSON object."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from mlxserve.cache.spec import KVBits, token_bytes
from mlxserve.cli import plan_figures, plan_hosts, plan_links
from mlxserve.cli.plan_figures import MEMORY, Figure, Setting, bits_name
from mlxserve.cli.plan_hosts import HOSTS
from mlxserve.cli.plan_links import LINKS
from mlxserve.distributed.cost import Link
from mlxserve.engine import estimates
from mlxserve.report import count_binary as size

PACKED = (KVBits(8, 8), KVBits(8, 4), KVBits(4, 4))


def show(
    at: Setting,
    asked: Mapping[str, Any],
    hosts: Sequence[int] = (),
    links: Sequence[Link] = (),
    *,
    explain: bool,
    as_json: bool,
) -> None:
    """Print the plan: sections of figures and a table, or one JSON object.

    hosts: bytes of memory of each, where several share the model. links: that may connect them.
    """
    if hosts:
        shares = plan_hosts.ways(at, hosts)
        rows = plan_links.rows(at, shares, links, asked)
        found = plan_hosts.sections(at, shares, asked)
        if rows:
            found[LINKS] = [figure for row in rows for figure in row.figures]
        tables = {HOSTS: plan_hosts.table(shares), LINKS: plan_links.table(at, rows)}
        plain: dict[str, Any] = {"by_host": plan_hosts.plain(shares)}
        if rows:
            plain["by_link"] = {link.name: asdict(link) for link in links}
        notes = {LINKS: plan_links.notes(links)}
    else:
        rows = _choices(at)
        found = plan_figures.sections(at, asked)
        tables = {MEMORY: _table(at, rows)}
        plain = {"by_kv_bits": [row._asdict() for row in rows]}
        longest = "longest = most tokens with users * cache of a user <= room for the cache"
        most = "most users = floor(room for the cache / cache of a user)"
        notes = {MEMORY: (longest, most)}
    if as_json:
        print(json.dumps(_plain(at, found, explain=explain) | plain))
        return
    model = at.model
    print(
        f"{model.name}: {model.kind}, {model.parameters:,} parameters, context up to "
        f"{model.context_tokens:,} tokens"
    )
    for title, figures in found.items():
        print(f"\n{title}")
        if explain or title != LINKS:  # the table has these figures
            _show(figures, explain=explain)
        if title in tables:
            _show_table(tables[title])
            if explain:
                print(*(f"    {note}\n" for note in notes.get(title, ())), sep="", end="")


def _show(figures: list[Figure], *, explain: bool) -> None:
    width = max(len(figure.label) for figure in figures)
    for figure in figures:
        print(f"  {figure.label:{width}}  {figure.text}")
        if explain:
            print(f"    = {figure.formula}")
            if figure.numbers:
                print(f"    = {figure.numbers}")


def _plain(at: Setting, found: Mapping[str, list[Figure]], *, explain: bool) -> dict[str, Any]:
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


def _table(at: Setting, rows: list[_Row]) -> list[tuple[str, ...]]:
    users = f"{at.users:,} user{'s' if at.users > 1 else ''}"
    context = f"MOST USERS, {at.context_tokens:,}"
    return [
        ("CACHE BITS", "PER TOKEN", "CACHE", "FITS", f"LONGEST, {users}", context),
        *(
            (
                row.kv_bits,
                size(row.token_bytes),
                size(row.load_bytes),
                "yes" if row.fits else "NO",
                f"{row.longest_context_tokens:,}",
                f"{row.most_users:,}",
            )
            for row in rows
        ),
    ]


def _show_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for cells in rows:
        print("  " + "  ".join(map(str.rjust, cells, widths)))
