"""`mlxserve doctor`: what this machine is, what will run on it, and what to put right."""

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Literal, NamedTuple

import typer

from mlxserve import config
from mlxserve.cli import terminal
from mlxserve.errors import RequestError
from mlxserve.report import count_bytes

_COLOURS = {"ok": typer.colors.GREEN, "note": typer.colors.YELLOW, "wrong": typer.colors.RED}
_MIN_FREE_BYTES = 1_000_000_000


class Finding(NamedTuple):
    """One line of the report. fix: what to do about it; "wrong" is what makes the exit code 1."""

    topic: str
    text: str
    state: Literal["ok", "note", "wrong"] = "ok"
    fix: str = ""


def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="With --kernels: this model's layers.")
    ] = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Check every kernel now, and time those for Metal.")
    ] = False,
) -> None:
    """Say what this machine is and whether mlxserve can work here.

    The exit code is 0 if it can, and 1 if something has to be put right first, or, with --kernels,
    if a kernel fails its check.
    """
    terminal.end_on_broken_pipe()
    if kernels:
        from mlxserve.cli.kernel_table import show_kernels

        raise typer.Exit(0 if show_kernels(model) else 1)
    if model is not None:
        raise RequestError(f"MODEL is {model!r} without --kernels; add that, or leave MODEL out")
    wrong = 0
    for finding in _examine():
        mark = typer.style(f"{finding.state:5}", fg=_COLOURS[finding.state])
        typer.echo(f"{mark}  {finding.topic:10}  {finding.text}")
        if finding.fix:
            typer.echo(f"{'':19}fix: {finding.fix}")
        wrong += finding.state == "wrong"
    raise typer.Exit(1 if wrong else 0)


def _examine() -> Iterator[Finding]:
    checks: list[Callable[[], Iterator[Finding]]] = [_system, _mlx, _disk]
    for check in checks:
        try:
            yield from check()
        except Exception as error:  # a broken check is a finding, and the others still matter
            topic = check.__name__.removeprefix("_")
            yield Finding(
                topic, f"{type(error).__name__}: {error}", "wrong", "report this as a bug"
            )


def _system() -> Iterator[Finding]:
    from importlib import metadata

    name, machine = platform.system(), platform.machine()
    if name == "Darwin":
        release = platform.mac_ver()[0]
        yield Finding("system", f"macOS {release}, {machine}")
        if machine != "arm64":
            fix = "install a Python built for arm64; this one is for Intel or runs under Rosetta"
            yield Finding("system", f"MLX needs Apple silicon, not {machine}", "wrong", fix)
        elif int(release.split(".")[0]) < 14:
            yield Finding("system", "MLX needs macOS 14", "wrong", "update macOS")
    else:
        yield Finding("system", f"{name} {platform.release()}, {machine}, {os.cpu_count()} cores")
    yield Finding("python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("mlxserve", metadata.version("mlxserve"))


def _mlx() -> Iterator[Finding]:
    from importlib import metadata

    again = "install mlxserve again"
    pinned = _pinned_mlx()
    if pinned:
        again = f"pip install --force-reinstall '{pinned}'"
    try:
        from mlxserve import device
    except ImportError as error:
        yield Finding("mlx", f"can't be imported: {error}", "wrong", again)
        return
    version = metadata.version("mlx")
    if pinned and version != pinned.rpartition("==")[2]:
        yield Finding("mlx", f"{version}, and mlxserve is built for {pinned}", "wrong", again)
    else:
        yield Finding("mlx", version)

    name = device.name()
    if device.has_metal():
        yield Finding("device", f"{name}, GPU through Metal")
    elif platform.system() == "Darwin":
        fix = "use a native macOS session; virtual machines often have no Metal"
        yield Finding("device", f"{name}, CPU only: Metal isn't available", "wrong", fix)
    else:
        yield Finding("device", f"{name}, CPU (Metal is only on Macs)")
    yield from _memory()
    yield from _ops()


def _pinned_mlx() -> str | None:
    """The requirement `mlx[...]==x.y.z` of this package for this system."""
    from importlib import metadata

    for requirement in metadata.requires("mlxserve") or ():
        match = re.match(r"(mlx(?:\[\w+\])?==[\w.]+);.*'(\w+)'", requirement.replace('"', "'"))
        if match and match[2] == sys.platform:
            return match[1]
    return None


def _memory() -> Iterator[Finding]:
    from mlxserve.memory import device_limit_bytes

    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = count_bytes(device_limit_bytes())
    yield Finding("memory", f"{count_bytes(total)}, of which models may use {limit} now")


def _ops() -> Iterator[Finding]:
    from mlxserve.kernels import native, registry

    found = native.load()
    if found.fix:
        yield Finding("kernels", f"slow: {found.reason}", "note", found.fix)
    for choice in registry.report():
        yield Finding("op", f"{choice.op}: {choice.implementation} ({choice.reason})")


def _disk() -> Iterator[Finding]:
    home = config.home()
    existing = home
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    text = f"{home}, {count_bytes(free)} free"
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        fix = "set MLXSERVE_HOME to a directory that you can write to"
        yield Finding("models", f"{home} can't be written to", "wrong", fix)
    elif free < _MIN_FREE_BYTES:
        yield Finding("models", text, "note", "free some space, or set MLXSERVE_HOME elsewhere")
    else:
        yield Finding("models", text)
