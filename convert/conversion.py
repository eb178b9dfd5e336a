"""`convert`: everything is checked first, then written and measured beside the target, then given
its name, and uploaded if that was asked for."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mlxserve.errors import MlxserveError, ModelError, RequestError
from mlxserve.report import count_bytes, show
from mlxserve.sources.checkpoint import open_checkpoint
from mlxserve.sources.directory import INDEX
from mlxserve.sources.resolve import hub_ref, resolve
from mlxserve.types import OnProgress

from . import report as reports
from .card import Origin, model_card
from .companions import companions, size_of, write
from .opening import open_source
from .plan import DTYPES, Plan, make_plan
from .quality import Quality, measure, summarise
from .recipe import Options, Recipe, plain_recipe, read_recipe
from .shards import index, lay_out
from .source import Source
from .stream import convert_items
from .upload import check_upload
from .workspace import Squares, Workspace

SPARE_BYTES = 1 << 20  # of the card, the report, directories and file system blocks
SKIPPED = "it was left out"


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion made.

    weight_bytes: of all tensors; shards: files that hold them. quality: what it cost. url: of the
    repo that it was uploaded to, None if it wasn't.
    """

    path: Path
    parameters: int
    weight_bytes: int
    bits_per_weight: float
    shards: int
    quality: Quality
    url: str | None


def convert(
    source: str | Path,
    to: str | Path,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str | None = None,
    recipe: str | Path | None = None,
    dtype: str | None = None,
    dequantize: bool = False,
    quality: bool = True,
    report: bool = False,
    upload_repo: str | None = None,
    private: bool = False,
    on_progress: OnProgress | None = None,
    locate: Callable[[str | Path], Path] | None = None,
) -> Conversion:
    """Write the model `source` to the directory `to`, quantised if any of bits to recipe is given.

    source: a directory, a .gguf file, or what `mlxserve.load` takes: a name of the Hub or of the
        catalogue, which is downloaded.
    to: doesn't exist yet, or is empty. It gets its name at the end; until then the files grow in a
        directory beside it, where the same call goes on after an interruption.
    bits, group_size, mode: affine with 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128 (4 and
        64 where not given), "mxfp4", "mxfp8" or "nvfp4".
    recipe: a shipped one by name, or the path of a TOML file: bits by rule; see `recipe`.
    dtype: "float16", "bfloat16" or "float32" for scales and for what isn't quantised; None keeps
        what the model has.
    dequantize: unpack a source that is quantised already.
    quality: compare the result with its source on a held-out text, where both fit in memory. The
        error of each matrix is measured in any case.
    report: write report.md, with plots, into the directory; needs matplotlib.
    upload_repo: a model repo of the Hub, "owner/name", to create and upload to; private: for its
        owner's eyes only. Token and rights are checked first. Where the upload fails, the directory
        stays, and the error says how to go on.
    locate: from `source` to its path; None downloads what isn't here, without a question.

    Weights are rounded to the nearest: bit for bit as `mx.quantize` does, and `mlx_lm.convert`.
    That takes some pieces of 4 MiB of memory; the comparison takes what both models do. Raises
    RequestError and ModelError, each before anything is written, but for numbers that turn out not
    to be finite, a disk that fails, and an upload that does.
    """
    how = _recipe(Options(bits, group_size, mode), recipe)
    _check_options(dtype, report=report)
    target = _target(to)
    upload = check_upload(upload_repo, private=private)
    path = resolve(source, on_progress) if locate is None else locate(source)
    found = _open(path, target, dequantize=dequantize, quantise=how is not None)
    plan = make_plan(found, how, None if dtype is None else DTYPES[dtype])
    ref = hub_ref(str(source))
    origin = Origin(path, None if ref is None else ref.repo, found.packed)
    where = upload_repo or "PATH"
    made = _make(found, plan, origin, target, where, on_progress, quality=quality, report=report)
    return made if upload is None else replace(made, url=upload.run(target, on_progress))


def _make(
    source: Source,
    plan: Plan,
    origin: Origin,
    target: Path,
    where: str,
    on_progress: OnProgress | None,
    *,
    quality: bool,
    report: bool,
) -> Conversion:
    """Write everything, measure what it cost, and give it its name. where: see `model_card`."""
    files = companions(source, plan.config)
    shards, places = lay_out(plan.shards())
    files[INDEX] = index(places, plan.parameters).encode()
    workspace = Workspace(target)
    _check_room(workspace, sum(s.size for s in shards) + size_of(files))
    state = {"source": source.fingerprint, "recipe": plan.digest()}
    with workspace, _kept_for_later(workspace):
        workspace.prepare(state, shards, places)
        _write_weights(plan, workspace, on_progress)
        write(files, workspace.path)
        open_checkpoint(workspace.path)  # a last look at the whole
        compared = (None, SKIPPED)
        if quality:
            compared = measure(source.path, workspace.path, on_progress)
        cost = summarise(_squares(plan, workspace), *compared)
        _describe(workspace.path, origin, plan, cost, where, report=report)
        workspace.publish()
    return Conversion(
        path=target,
        parameters=plan.parameters,
        weight_bytes=plan.weight_bytes,
        bits_per_weight=plan.bits_per_weight,
        shards=len(shards),
        quality=cost,
        url=None,
    )


def _check_options(dtype: str | None, *, report: bool) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise RequestError(f"dtype is {show(dtype)}; use one of {', '.join(DTYPES)}", param="dtype")
    if report:
        reports.check()


def _recipe(options: Options, recipe: str | Path | None) -> Recipe | None:
    """How to quantise; None if nothing asks for it. Raises RequestError."""
    if recipe is not None:
        return read_recipe(recipe, options)
    return None if options == Options() else plain_recipe(options)


def _target(to: str | Path) -> Path:
    """The target's absolute path. Raises RequestError if something is there."""
    try:
        path = Path(to).expanduser().resolve()
        taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except (OSError, RuntimeError, ValueError) as e:
        raise RequestError(f"{show(str(to))}: {e}; give another directory") from None
    if taken:
        raise RequestError(f"{path} exists already; delete it, or give another directory")
    return path


def _open(path: Path, target: Path, *, dequantize: bool, quantise: bool) -> Source:
    """The model to convert. Raises RequestError and ModelError for one that can't be."""
    source = open_source(path)
    _check_places(path, target)
    _check_packed(source, dequantize=dequantize, quantise=quantise)
    return source


def _check_places(source: Path, target: Path) -> None:
    real = source.resolve()
    if target == real or (real.is_dir() and target.is_relative_to(real)):
        raise RequestError(
            f"{target} is inside the source {source}; give a directory outside of it"
        )
    parent = next(p for p in target.parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise RequestError(f"{parent} can't be written to; give another directory")


def _check_packed(source: Source, *, dequantize: bool, quantise: bool) -> None:
    """A GGUF file's numbers may be quantised anew; they are unpacked in any case."""
    if dequantize and not source.packed:
        raise RequestError(
            f"dequantize is set, and {source.path} isn't quantised; leave it out",
            param="dequantize",
        )
    if source.packed and not dequantize and (source.schemes or not quantise):
        raise RequestError(
            f"dequantize is not set, and {source.path} is quantised already ({source.packed}); set "
            "it to unpack the model first, or take the one it was made of",
            param="dequantize",
        )


def _check_room(workspace: Workspace, needed: int) -> None:
    parent = next(p for p in workspace.path.parents if p.exists())
    free = shutil.disk_usage(parent).free + workspace.held_bytes()
    if free < needed + SPARE_BYTES:
        raise ModelError(
            f"no room for the converted model: it takes {count_bytes(needed)}, and {parent} has "
            f"{count_bytes(free)} free; delete something, or give another directory"
        )


def _write_weights(plan: Plan, workspace: Workspace, on_progress: OnProgress | None) -> None:
    total, done = plan.read_bytes, 0
    todo = []
    for item in plan.items:
        if all(part.name in workspace.done for part in item.parts):
            done += item.tensor.read_bytes
        else:
            todo.append(item)

    def report(n: int) -> None:
        nonlocal done
        done += n
        if on_progress is not None:
            on_progress("convert", done, total)

    report(0)
    convert_items(todo, workspace, report)


def _describe(
    folder: Path, origin: Origin, plan: Plan, cost: Quality, where: str, *, report: bool
) -> None:
    """Write the model card, and the report if one is wanted. where: see `model_card`."""
    card = model_card(plan, origin, cost, where, report=report)
    write({"README.md": card.encode()}, folder)
    if report:
        reports.write_report(folder, origin, plan, cost)


def _squares(plan: Plan, workspace: Workspace) -> dict[str, Squares]:
    """What is known of the quantised matrices, in the model's order."""
    names = (item.parts[0].name for item in plan.items if item.scheme is not None)
    return {name: workspace.squares[name] for name in names}


@contextmanager
def _kept_for_later(workspace: Workspace) -> Iterator[None]:
    """Interrupted work stays for the next time; what can't be finished is deleted."""
    try:
        yield
    except MlxserveError:
        workspace.discard()
        raise
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full" if full else f"{e.strerror or e}"
        if not workspace.done:
            workspace.discard()
            raise ModelError(f"{workspace.target}: {what}; nothing was written") from e
        raise ModelError(
            f"{workspace.target}: {what}; mend that and run the same again, which goes on with "
            f"{workspace.path}, or delete that"
        ) from e
