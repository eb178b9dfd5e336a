"""`mlxserve ls`: the models on this machine."""

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from mlxserve.cli import terminal
from mlxserve.config import DEFAULT_MODEL
from mlxserve.report import count_bytes


class _Row(NamedTuple):
    name: str
    size: str
    kind: str
    path: Path


def ls(
    paths: Annotated[
        bool, typer.Option("--paths", help="For scripts: NAME<tab>PATH, and no heading.")
    ] = False,
) -> None:
    """List the models that are here: name, size, type and place on disk.

    Those of the Hub lie in Hugging Face's cache, also when another program downloaded them. Models
    of a type that can't be run are left out.
    """
    terminal.end_on_broken_pipe()
    rows = _rows()
    if paths:
        for row in rows:
            print(f"{row.name}\t{row.path}")
        return
    if not rows:
        terminal.note(f"no models yet; fetch one with: mlxserve pull {DEFAULT_MODEL}")
        return
    rows = [("NAME", "SIZE", "TYPE", "PATH"), *rows]
    names, kinds = (max(len(row[i]) for row in rows) for i in (0, 2))
    for name, size, kind, path in rows:
        print(f"{name:{names}}  {size:>8}  {kind:{kinds}}  {path}")


def _rows() -> list[_Row]:
    """The catalog's models, in its order, then the Hub's."""
    from mlxserve.sources import hub_local, pull

    size = count_bytes
    rows = [_Row(m.name, size(m.size_bytes), "gguf", m.path) for m in pull.installed()]
    for model in hub_local.installed():
        from mlxserve.models.registry import MODULES  # late: most of a second without a cache

        if model.kind == "gguf" or model.kind in MODULES:
            rows.append(_Row(model.name, size(model.size_bytes), model.kind, model.path))
    return rows
