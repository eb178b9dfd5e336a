"""`mlxserve bench`: what this machine reaches of what it could."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxserve.cli import terminal
from mlxserve.errors import RequestError
from mlxserve.files import replace

if TYPE_CHECKING:
    from mlxserve.kernels.bench import Figures

HELP = "Measure how fast this machine is."
EPILOG = """\b
Examples:
  mlxserve bench kernels
  mlxserve bench kernels --op attention --seconds 1
"""

HEAD = ("OP", "SIZE", "BY", "us", "MLX us", "x", "GB/s", "OF MEMORY", "GFLOP/s", "OF PEAK")


def kernels(
    op: Annotated[
        str | None, typer.Option("--op", metavar="OP", help="Only this one, such as matmul.")
    ] = None,
    seconds: Annotated[
        float,
        typer.Option("--seconds", min=0.0, help="For each of the two measurements of a size."),
    ] = 0.2,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there, too.")
    ] = None,
) -> None:
    """Time every op at the sizes of a 1B model, beside MLX's own path and the machine's limits.

    GB/s and GFLOP/s count what an op must move and compute at least. BY says which kernel is used
    here; nothing stands under MLX where that is MLX's own.
    """
    from mlxserve import device
    from mlxserve.engine import footprint
    from mlxserve.kernels import bench

    terminal.end_on_broken_pipe()
    chosen = [case for case in bench.cases() if op in (None, case.op)]
    if not chosen:
        known = ", ".join(dict.fromkeys(case.op for case in bench.cases()))
        raise RequestError(f"--op is {op!r}; the ops measured here are {known}")
    bandwidth, origin = footprint.memory_bandwidth(device.name())
    peak = bench.peak_flops_per_s()
    typer.echo(
        f"{device.name()}: memory {bandwidth / 1e9:.0f} GB/s ({origin}), dense matmul "
        f"{peak / 1e9:.0f} GFLOP/s (measured)"
    )
    rows, told = [], []
    for case in chosen:
        terminal.note(f"measuring {case.op}, {case.size}")
        found = bench.measure(case, seconds)
        rows.append(_row(found, bandwidth, peak))
        told.append(_told(found))
    for line in terminal.columns([HEAD, *rows]):
        typer.echo(line)
    if json_file is not None:
        limits = {"device": device.name(), "bytes_per_s": bandwidth, "flops_per_s": peak}
        replace(json_file, json.dumps({**limits, "ops": told}, indent=1).encode())


def _row(found: Figures, bandwidth: float, peak: float) -> tuple[str, ...]:
    case, own = found.case, found.own_s
    return (
        case.op,
        case.size,
        found.implementation,
        f"{found.seconds * 1e6:.4g}",
        "" if own is None else f"{own * 1e6:.4g}",
        "" if own is None else f"{own / found.seconds:.3g}",
        f"{found.bytes_per_s / 1e9:.3g}",
        f"{100 * found.bytes_per_s / bandwidth:.0f}%" if case.from_memory else "",
        f"{found.flops_per_s / 1e9:.3g}" if case.flops else "",
        f"{100 * found.flops_per_s / peak:.0f}%" if case.flops else "",
    )


def _told(found: Figures) -> dict[str, Any]:
    """For programs."""
    case = found.case
    return {
        "op": case.op,
        "size": case.size,
        "implementation": found.implementation,
        "seconds": found.seconds,
        "mlx_seconds": found.own_s,
        "bytes": case.moved,
        "flops": case.flops,
    }
