"""`mlxserve launch`: one model over several processes."""

from typing import Annotated

import typer

from mlxserve.cli import options
from mlxserve.errors import RequestError

EPILOG = """\b
Examples:
  mlxserve launch -n 2 -- serve --port 8000
  mlxserve launch -n 2 -- generate --prompt 'Why is the sky blue?'
"""
COMMANDS = ("serve", "generate")


def launch(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="serve or generate, with options.")
    ],
    n: Annotated[
        int,
        typer.Option("-n", parser=options.whole, metavar="N", help="Processes on this machine."),
    ] = 2,
) -> None:
    """Compute one model with several processes, each with its part of every layer.

    For models that one process has no memory for, and for machines whose memory is slow.
    """
    from mlxserve.distributed.launch import launch_here

    if command[0] not in COMMANDS:
        raise RequestError(
            f"launch runs {' or '.join(COMMANDS)}, not {command[0]}; write it after --"
        )
    raise typer.Exit(launch_here(n, command))
