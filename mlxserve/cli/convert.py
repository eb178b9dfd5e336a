"""`mlxserve convert`: make a model smaller, or another tool's model one for MLX."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mlxserve.cli import options, terminal

EPILOG = """\b
  mlxserve convert --from OWNER/NAME --to name-4bit --q-bits 4
  mlxserve convert --from OWNER/NAME --to name-mixed --mixed mixed_4_6
  mlxserve convert --from ./model --to model-mxfp4 --q-mode mxfp4 --mixed embeddings_8
  mlxserve convert --from model.gguf --to model-8bit --q-bits 8
"""
_number = partial(typer.Option, parser=options.whole, metavar="N")


def convert(
    source: Annotated[
        str, typer.Option("--from", metavar="MODEL", help="A directory, .gguf file or Hub name.")
    ],
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="The directory to make.")],
    q_bits: Annotated[
        int | None, _number("--q-bits", help="Bits per weight: 2, 3, 4, 5, 6 or 8.")
    ] = None,
    q_group_size: Annotated[
        int | None,
        _number("--q-group-size", help="Weights that share a scale: 32, 64 or 128. [default: 64]"),
    ] = None,
    q_mode: Annotated[
        str | None,
        typer.Option("--q-mode", metavar="MODE", help="affine (default), mxfp4, mxfp8 or nvfp4."),
    ] = None,
    mixed: Annotated[
        str | None,
        typer.Option(
            "--mixed",
            metavar="RECIPE",
            help="Bits by rule: mixed_4_6, embeddings_8, ..., or a .toml file of your own.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="TYPE",
            help="float16, bfloat16 or float32: of scales and of what isn't quantised.",
        ),
    ] = None,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="Unpack a model that is quantised already.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask before a download.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Write a model as MLX loads it, quantised if --q-bits, --q-mode or --mixed says so.

    Everything is checked before work starts. The files grow beside DIR, which appears when all is
    done; the same command goes on after an interruption. Prints the directory.
    """
    terminal.end_on_broken_pipe()
    for name, text in (("--from", source), ("--to", to)):
        terminal.check_text(name, text)
    from mlxserve_convert import convert as run  # pyright: ignore[reportMissingImports]

    from mlxserve.report import count_bytes

    with terminal.Progress(quiet=quiet) as progress:
        made = run(
            source,
            to,
            bits=q_bits,
            group_size=q_group_size,
            mode=q_mode,
            recipe=mixed,
            dtype=dtype,
            dequantize=dequantize,
            on_progress=progress,
            locate=partial(_locate, yes=yes, quiet=quiet),
        )
    if not quiet:
        files = "1 file" if made.shards == 1 else f"{made.shards} files"
        terminal.note(
            f"{made.bits_per_weight:.2f} bits per weight, {count_bytes(made.weight_bytes)} in "
            f"{files}"
        )
    print(made.path)


def _locate(source: str | Path, *, yes: bool, quiet: bool) -> Path:
    """Where the source lies; a model of the Hub is described and asked about, as `pull` does."""
    from mlxserve.cli import models
    from mlxserve.sources import resolve

    ref = resolve.hub_ref(str(source))
    if ref is None:
        with terminal.Progress(quiet=quiet) as progress:
            return resolve.resolve(source, progress)
    found = resolve.locate(ref)
    return found[0] if found[1] is None else models.download(found[1], yes=yes, quiet=quiet)
