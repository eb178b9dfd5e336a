"""`mlxserve launch`: one model over several processes, on one machine or on several."""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxserve.cli import options, terminal
from mlxserve.config import ServerConfig
from mlxserve.errors import RequestError

if TYPE_CHECKING:
    from mlxserve.distributed.launch import Group

EPILOG = """\b
Examples:
  mlxserve launch -n 2 -- serve --port 8000
  mlxserve launch --hosts mac1,mac2 --check -- serve OWNER/NAME
  mlxserve launch --hosts mac1,mac2 -- serve OWNER/NAME
  mlxserve launch --hostfile hosts.json -- generate --prompt 'Why is the sky blue?'
"""
COMMANDS = ("serve", "generate", "cache build")
PROCESSES = 2  # where nothing is said
STEADY_S = 300  # after so long a next failure counts as the first
REFUSED = 2  # the exit code of a command that can't be done
_COLOURS = {"ok": typer.colors.GREEN, "note": typer.colors.YELLOW, "wrong": typer.colors.RED}

_where = partial(typer.Option, rich_help_panel="Where")
_how = partial(typer.Option, rich_help_panel="How")
_how_n = partial(_how, parser=options.whole, metavar="N")


def _one_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def launch(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND...", help=f"{_one_of(COMMANDS)}, with options."),
    ] = None,
    n: Annotated[
        int | None,
        _where(
            "-n",
            parser=options.whole,
            metavar="N",
            help=f"Processes on this machine. [default: {PROCESSES}]",
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        _where("--hosts", metavar="A,B", help="Machines as ssh calls them, this one first."),
    ] = None,
    hostfile: Annotated[
        str | None,
        _where("--hostfile", metavar="FILE", help="Of mlx.distributed_config, this one first."),
    ] = None,
    python: Annotated[
        str | None,
        _where("--python", metavar="PATH", help="Of the others. [default: as here]"),
    ] = None,
    backend: Annotated[
        str, _how("--backend", metavar="NAME", help="jaccl (RDMA over Thunderbolt), ring or auto.")
    ] = "auto",
    tensor: Annotated[
        int | None, _how_n("--tensor", help="Processes that share each layer. [default: all]")
    ] = None,
    pipeline: Annotated[
        int | None, _how_n("--pipeline", help="Groups of layers, one after the other.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Say what is wrong with these hosts, and end.")
    ] = False,
) -> None:
    """Compute one model with several processes, each with its part.

    For models that one process has no memory for, and for machines whose memory is slow. A server
    whose processes have failed is started anew; until it is back, requests are told 503. The other
    machines need mlxserve of the same version, the model, and ssh without a password. --check ends
    with 0 if all is well, and with 1 if something has to be put right.
    """
    command = _known(command or [], check)
    group, why = _group(n, hosts, hostfile, python, backend, tensor, pipeline)
    if check:
        raise typer.Exit(_check(group, why, command))
    from mlxserve.distributed.check import why_apart
    from mlxserve.distributed.launch import launch as run

    if backend == "auto" and group.backend == "jaccl" and (why := why_apart(group)):
        group = replace(group, backend="ring")
    if why:
        terminal.note(f"over the ring: {why}")
    if command[0] != "serve":
        raise typer.Exit(run(group, command).code)
    raise typer.Exit(_serve(group, command))


def _known(command: list[str], check: bool) -> list[str]:
    """The command, if it is one; --check needs none. Shows help where that is asked for."""
    if not command and not check:
        raise RequestError(f"launch needs {_one_of(COMMANDS)}; write it after --")
    if command and (name := _name(command)) not in COMMANDS:
        raise RequestError(f"launch runs {_one_of(COMMANDS)}, not {name}; write it after --")
    if {"--help", "-h"} & {*command}:
        _context(command)
    return command


def _name(command: Sequence[str]) -> str:
    return " ".join(command[: 2 if command[0] == "cache" else 1])


def _group(
    n: int | None,
    names: str | None,
    hostfile: str | None,
    python: str | None,
    backend: str,
    tensor: int | None,
    pipeline: int | None,
) -> tuple["Group", str]:
    """What the options say, checked; and why it isn't JACCL. Raises RequestError."""
    import mlx.core as mx

    from mlxserve.distributed import backends, hosts
    from mlxserve.distributed.launch import Group

    given = {"-n": n, "--hosts": names, "--hostfile": hostfile}
    where = [option for option, value in given.items() if value is not None]
    if len(where) > 1:
        raise RequestError(f"{' and '.join(where)} both say where; give one of them")
    if hostfile is not None:
        roster = hosts.read(hostfile)
    elif names is not None:
        roster = hosts.named(names)
    else:
        roster = hosts.here(PROCESSES if n is None else n)
    if python is not None and not roster.apart:
        raise RequestError("--python is for other machines; name them with --hosts or --hostfile")
    tensor = _tensor(len(roster.hosts), tensor, pipeline)
    chosen, why = backends.choose(backend, roster, mx.distributed.is_available)
    python = python or sys.executable
    return Group(roster=roster, backend=chosen, tensor=tensor, python=python), why


def _tensor(count: int, tensor: int | None, pipeline: int | None) -> int:
    """How many processes share each layer. Raises RequestError where it doesn't come out even."""
    for option, value in (("--tensor", tensor), ("--pipeline", pipeline)):
        if value is not None and (value < 1 or count % value):
            raise RequestError(
                f"{option} is {value}, which doesn't divide {count} processes; choose "
                f"{', '.join(str(i) for i in range(1, count + 1) if count % i == 0)}"
            )
    if tensor is None:
        return count // (pipeline or 1)
    if pipeline is not None and tensor * pipeline != count:
        raise RequestError(
            f"--tensor {tensor} times --pipeline {pipeline} is {tensor * pipeline}, and there are "
            f"{count} processes; leave one of the two out"
        )
    return tensor


def _check(group: "Group", why: str, command: Sequence[str]) -> int:
    """Print what is found of each host. Returns the exit code."""
    from mlxserve.distributed.check import findings

    if not group.roster.apart:
        raise RequestError("--check looks at machines; name them with --hosts or --hostfile")
    wrong, width = 0, 2 * max(len(host.name) for host in group.roster.hosts) + 3  # of "a - b"
    for finding in findings(group, why, _model(command)):
        mark = typer.style(f"{finding.state:5}", fg=_COLOURS[finding.state])
        typer.echo(f"{mark}  {finding.where:{width}}  {finding.topic:8}  {finding.text}")
        if finding.fix:
            typer.echo(f"{'':{17 + width}}fix: {finding.fix}")
        wrong += finding.state == "wrong"
    return 1 if wrong else 0


def _model(command: Sequence[str]) -> str:
    """The model of a command, "" where there is none."""
    return _context(command).params["model"] if command else ""


def _context(command: Sequence[str]) -> Any:
    """A command as typer understands it; where it asks for help, that is shown, and all ends."""
    from mlxserve.cli.app import app

    name = _name(command)
    known: Any = typer.main.get_command(app)
    helps = known.context_settings["help_option_names"]
    words = name.split()
    for word in words:
        known = known.commands[word]
    args = [*command[len(words) :]]
    return known.make_context(f"mlxserve {name}", args, help_option_names=helps)


def _serve(group: "Group", command: Sequence[str]) -> int:
    """Keep the server's address, and the server running. Returns the exit code."""
    from mlxserve.distributed.launch import launch as run_group
    from mlxserve.distributed.launch import waits
    from mlxserve.distributed.ssh import UnreachableError
    from mlxserve.server import run
    from mlxserve.server.standby import Standby

    with run.bind(_address(command[1:])) as at:
        at.listen(run.BACKLOG)
        standby, pauses, has_served = Standby(at), waits(), False
        standby.start()
        while True:
            begin_s = time.monotonic()
            try:
                ended = run_group(group, command, at=at, on_ready=standby.stop)
            except UnreachableError as error:  # it may be starting, too
                if not has_served:
                    raise
                terminal.note(str(error))
            else:
                has_served |= ended.ready
                if ended.told or not has_served or ended.code in (0, REFUSED):
                    return ended.code
                terminal.note(f"the processes ended with {ended.code}")
            if time.monotonic() - begin_s > STEADY_S:
                pauses = waits()
            standby.start()
            wait_s = next(pauses)
            terminal.note(f"starting anew in {wait_s:g} s")
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
