"""`mlxserve pull`: fetch a model now rather than at its first use."""

from typing import Annotated

import typer

from mlxserve.cli import terminal
from mlxserve.errors import ModelError
from mlxserve.sources.catalog import CATALOG

EPILOG = """\b
Models of the Hugging Face Hub:
  mlxserve pull OWNER/NAME              the model's safetensors
  mlxserve pull OWNER/NAME:Q4_K_M       one of several GGUF files, or
  mlxserve pull OWNER/NAME/FILE.gguf    by its whole name
  mlxserve pull OWNER/NAME@REVISION     a branch, a tag or a commit
"""


def pull(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help=f"OWNER/NAME of the Hub, or: {', '.join(CATALOG)}."),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask before a download.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check one that is already here, byte by byte.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Fetch a model and print where it lies.

    Says first what a model of the Hub takes and whether it fits this machine, and asks. Nothing is
    fetched twice: for a model that is already here, only its path is printed. An interrupted pull
    goes on where it was.
    """
    terminal.end_on_broken_pipe()
    from mlxserve.sources import hub, resolve
    from mlxserve.sources.hub_names import parse
    from mlxserve.sources.pull import installed
    from mlxserve.sources.pull import pull as fetch

    name = terminal.check_text("MODEL", model)
    ref = None if name in CATALOG else parse(name)
    if ref is None:
        if name not in CATALOG and resolve.local_path(name) is not None:
            raise ModelError(f"{name} is a path, and already here; give a name to pull")
        new = name not in {here.name for here in installed()}
        with terminal.Progress(quiet=quiet) as progress:
            path = fetch(name, progress, verify=verify)
        if new and not quiet:
            terminal.note(f"{name} comes under: {CATALOG[name].license}")
    else:
        from mlxserve.cli import models

        here, new = (None, hub.look_up(ref)) if verify else resolve.locate(ref)
        path = here if new is None else models.download(new, yes=yes, quiet=quiet, verify=verify)
    print(path)
