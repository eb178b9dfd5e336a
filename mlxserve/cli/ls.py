"""`mlxserve ls`: the models on this machine."""

from typing import Annotated

import typer

from mlxserve.cli import terminal
from mlxserve.config import DEFAULT_MODEL


def ls(
    paths: Annotated[
        bool, typer.Option("--paths", help="For scripts: NAME<tab>PATH, and no heading.")
    ] = False,
) -> None:
    """List the models that were pulled: name, size and place on disk."""
    terminal.end_on_broken_pipe()
    from mlxserve.sources.pull import installed

    models = installed()
    if paths:
        for model in models:
            print(f"{model.name}\t{model.path}")
        return
    if not models:
        terminal.note(f"no models yet; fetch one with: mlxserve pull {DEFAULT_MODEL}")
        return
    width = max(len("NAME"), *(len(model.name) for model in models))
    print(f"{'NAME':{width}}  {'SIZE':>8}  PATH")
    for model in models:
        size = terminal.count_bytes(model.size_bytes)
        print(f"{model.name:{width}}  {size:>8}  {model.path}")
