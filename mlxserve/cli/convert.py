"""`mlxserve convert`: make a model smaller, or another tool's model one for MLX."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlxserve.cli import options, terminal

if TYPE_CHECKING:
    from mlxserve_convert import Conversion  # pyright: ignore[reportMissingImports]

EPILOG = """\b
  mlxserve convert --from OWNER/NAME --to name-4bit --q-bits 4
  mlxserve convert --from OWNER/NAME --to name-mixed --mixed mixed_4_6 --report
  mlxserve convert --from ./model --to model-mxfp4 --q-mode mxfp4 --mixed embeddings_8
  mlxserve convert --from model.gguf --to model-8bit --q-bits 8 --upload-repo ME/model-8bit
"""
# Options by the names of the library's parameters, which its errors begin with.
FLAGS = {
    "bits": "--q-bits",
    "group_size": "--q-group-size",
    "mode": "--q-mode",
    "dtype": "--dtype",
    "dequantize": "--dequantize",
    "report": "--report",
    "upload_repo": "--upload-repo",
    "private": "--private",
}

_quantise = partial(typer.Option, rich_help_panel="Quantisation")
_quantise_n = partial(_quantise, parser=options.whole, metavar="N")
_upload = partial(typer.Option, rich_help_panel="Upload")

Source = Annotated[
    str, typer.Option("--from", metavar="MODEL", help="A directory, .gguf file or Hub name.")
]
Target = Annotated[str, typer.Option("--to", metavar="DIR", help="The directory to make.")]
Bits = Annotated[int | None, _quantise_n("--q-bits", help="Bits per weight: 2, 3, 4, 5, 6 or 8.")]
GroupSize = Annotated[
    int | None,
    _quantise_n("--q-group-size", help="Weights that share a scale: 32, 64, 128. [default: 64]"),
]
Mode = Annotated[
    str | None,
    _quantise("--q-mode", metavar="MODE", help="affine (default), mxfp4, mxfp8 or nvfp4."),
]
Mixed = Annotated[
    str | None,
    _quantise(
        "--mixed",
        metavar="RECIPE",
        help="Bits by rule: mixed_4_6, embeddings_8, ..., or a .toml file of your own.",
    ),
]
Dtype = Annotated[
    str | None,
    _quantise(
        "--dtype",
        metavar="TYPE",
        help="float16, bfloat16 or float32: of scales and of what isn't quantised.",
    ),
]
Dequantize = Annotated[
    bool, _quantise("--dequantize", help="Unpack a model that is quantised already.")
]
NoQuality = Annotated[
    bool, typer.Option("--no-quality", help="Don't compare the result with its source on a text.")
]
Report = Annotated[
    bool, typer.Option("--report", help="Write report.md into DIR, with plots (matplotlib).")
]
UploadRepo = Annotated[
    str | None,
    _upload("--upload-repo", metavar="OWNER/NAME", help="A new repo of the Hub to upload to."),
]
Private = Annotated[bool, _upload("--private", help="The repo is for its owner's eyes only.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask before a download.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no summary.")]


def convert(
    source: Source,
    to: Target,
    q_bits: Bits = None,
    q_group_size: GroupSize = None,
    q_mode: Mode = None,
    mixed: Mixed = None,
    dtype: Dtype = None,
    dequantize: Dequantize = False,
    no_quality: NoQuality = False,
    report: Report = False,
    upload_repo: UploadRepo = None,
    private: Private = False,
    yes: Yes = False,
    quiet: Quiet = False,
) -> None:
    """Write a model as MLX loads it, quantised if --q-bits, --q-mode or --mixed says so.

    Everything is checked before work starts. The files grow beside DIR, which appears when all is
    done; the same command goes on after an interruption. What is written is compared with its
    source on a short text, where both fit in memory. Prints the directory.
    """
    terminal.end_on_broken_pipe()
    for name, text in (("--from", source), ("--to", to), ("--upload-repo", upload_repo or "")):
        terminal.check_text(name, text)
    from mlxserve_convert import convert as run  # pyright: ignore[reportMissingImports]

    with options.named(FLAGS), terminal.Progress(quiet=quiet) as progress:
        made = run(
            source,
            to,
            bits=q_bits,
            group_size=q_group_size,
            mode=q_mode,
            recipe=mixed,
            dtype=dtype,
            dequantize=dequantize,
            quality=not no_quality,
            report=report,
            upload_repo=upload_repo,
            private=private,
            on_progress=None if quiet else progress,
            locate=partial(_locate, yes=yes, quiet=quiet),
        )
    if not quiet:
        _summarise(made)
    print(made.path)


def _summarise(made: "Conversion") -> None:
    from mlxserve_convert.quality import facts  # pyright: ignore[reportMissingImports]

    from mlxserve.report import count_bytes

    files = "1 file" if made.shards == 1 else f"{made.shards} files"
    size = f"{count_bytes(made.weight_bytes)} in {files}"
    rows = [("bits per weight", f"{made.bits_per_weight:.2f}"), ("size", size)]
    rows += facts(made.quality)
    if made.url is not None:
        rows.append(("uploaded to", made.url))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        terminal.note(f"{name:{width}}  {value}")


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
