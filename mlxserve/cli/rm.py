"""`mlxserve rm`: remove a model from this machine."""

from typing import Annotated

import typer

from mlxserve.cli import terminal
from mlxserve.report import count_bytes


def rm(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name that `mlxserve ls` lists.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
) -> None:
    """Remove a model that was pulled. Says how much that frees, and asks.

    OWNER/NAME removes all of the repo from Hugging Face's cache, which other programs share; with
    @REVISION, :QUANT or /FILE.gguf only that.
    """
    terminal.end_on_broken_pipe()
    from mlxserve.cli import models
    from mlxserve.sources.removal import removal

    name = terminal.check_text("MODEL", model)
    found = removal(name)
    freed = count_bytes(found.size_bytes)
    if not yes:
        models.confirm(f"Remove {name} and free {freed}?", f"{name}: add --yes to remove it")
    found.run()
    terminal.note(f"removed {name}, {freed}")
