"""`mlxserve launch`: one model over several processes."""

import argparse
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from mlxserve.cli import options, terminal
from mlxserve.config import ServerConfig
from mlxserve.errors import RequestError

EPILOG = """\b
Examples:
  mlxserve launch -n 2 -- serve --port 8000
  mlxserve launch -n 2 -- generate --prompt 'Why is the sky blue?'
"""
COMMANDS = ("serve", "generate", "cache build")
STEADY_S = 300  # after so long a next failure counts as the first
REFUSED = 2  # the exit code of a command that can't be done


def _one_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def launch(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND...", help=f"{_one_of(COMMANDS)}, with options."),
    ],
    n: Annotated[
        int,
        typer.Option("-n", parser=options.whole, metavar="N", help="Processes on this machine."),
    ] = 2,
) -> None:
    """Compute one model with several processes, each with its part of every layer.

    For models that one process has no memory for, and for machines whose memory is slow. A server
    whose processes have failed is started anew; until it is back, requests are told 503.
    """
    from mlxserve.distributed.launch import launch_here

    name = " ".join(command[: 2 if command[0] == "cache" else 1])
    if name not in COMMANDS:
        raise RequestError(f"launch runs {_one_of(COMMANDS)}, not {name}; write it after --")
    if name != "serve" or {"--help", "-h"} & {*command}:
        raise typer.Exit(launch_here(n, command).code)
    raise typer.Exit(_serve(n, command))


def _serve(n: int, command: Sequence[str]) -> int:
    """Keep the server's address, and the server running. Returns the exit code."""
    from mlxserve.distributed.launch import launch_here, waits
    from mlxserve.server import run
    from mlxserve.server.standby import Standby

    with run.bind(_address(command[1:])) as at:
        at.listen(run.BACKLOG)
        standby, pauses = Standby(at), waits()
        standby.start()
        while True:
            begin_s = time.monotonic()
            ended = launch_here(n, command, at=at, on_ready=standby.stop)
            if ended.told or not ended.ready or ended.code in (0, REFUSED):
                return ended.code
            if time.monotonic() - begin_s > STEADY_S:
                pauses = waits()
            standby.start()
            wait_s = next(pauses)
            terminal.note(f"the processes ended with {ended.code}; starting anew in {wait_s:g} s")
            time.sleep(wait_s)


def _address(args: Sequence[str]) -> ServerConfig:
    """Where `serve` with these arguments listens; it checks them all itself."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    known = ServerConfig(names=("model",))
    parser.add_argument("--host", default=known.host)
    parser.add_argument("--port", type=options.whole, default=known.port)
    try:
        found, _ = parser.parse_known_args(args)
    except SystemExit:
        raise RequestError("--host and --port need a value; see `mlxserve serve --help`") from None
    except typer.BadParameter as error:
        raise RequestError(f"--port: {error.message}; see `mlxserve serve --help`") from None
    return ServerConfig(names=("model",), host=found.host, port=found.port)
