"""`mlxserve pull`: fetch a model now rather than at its first use."""

from typing import Annotated

import typer

from mlxserve.cli import terminal
from mlxserve.sources.catalog import CATALOG


def pull(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=f"The model's name: {', '.join(CATALOG)}.")
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Check one that is already here, byte by byte.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Fetch a model and print where it lies.

    Nothing is fetched twice: for a model that is already here, only its path is printed.
    """
    terminal.end_on_broken_pipe()
    from mlxserve.sources.pull import pull as fetch

    with terminal.Progress(quiet=quiet) as progress:
        path = fetch(terminal.check_text("MODEL", model), progress, verify=verify)
    print(path)
