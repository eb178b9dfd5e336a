"""`convert`: everything is checked first, then written beside the target, then given its name."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlxserve.errors import MlxserveError, ModelError, RequestError
from mlxserve.report import count_bytes, show
from mlxserve.sources.checkpoint import open_checkpoint
from mlxserve.sources.directory import INDEX
from mlxserve.sources.resolve import hub_ref, resolve
from mlxserve.types import OnProgress

from .card import model_card
from .companions import Files, companions, size_of, write
from .opening import open_source
from .plan import DTYPES, Plan, make_plan
from .recipe import Options, plain_recipe, read_recipe
from .shards import index, lay_out
from .source import Source
from .stream import convert_items
from .workspace import Workspace

SPARE_BYTES = 1 << 20  # of directories and file system blocks


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion made. weight_bytes: of all tensors; shards: files that hold them."""

    path: Path
    parameters: int
    weight_bytes: int
    bits_per_weight: float
    shards: int


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
    locate: from `source` to its path; None downloads what isn't here, without a question.

    Weights are rounded to the nearest: bit for bit as `mx.quantize` does, and `mlx_lm.convert`.
    Memory is bounded by some pieces of 4 MiB. Raises RequestError and ModelError, each before
    anything is written, but for numbers that turn out not to be finite and a disk that fails.
    """
    options = Options(bits, group_size, mode)
    quantise = recipe is not None or options != Options()
    how = None
    if quantise:
        how = plain_recipe(options) if recipe is None else read_recipe(recipe, options)
    if dtype is not None and dtype not in DTYPES:
        raise RequestError(f"dtype is {show(dtype)}; use one of {', '.join(DTYPES)}")
    target = _target(to)
    path = resolve(source, on_progress) if locate is None else locate(source)
    found = open_source(path)
    _check_places(found.path, target)
    _check_packed(found, dequantize=dequantize, quantise=quantise)
    plan = make_plan(found, how, None if dtype is None else DTYPES[dtype])
    files = companions(found, plan.config)
    ref = hub_ref(str(source))
    repo = None if ref is None else ref.repo
    files["README.md"] = model_card(plan, path, repo, found.packed).encode()
    shards, places = lay_out(plan.shards())
    files[INDEX] = index(places, plan.parameters).encode()
    workspace = Workspace(target)
    _check_room(workspace, sum(s.size for s in shards) + size_of(files))
    state = {"source": found.fingerprint, "recipe": plan.digest()}
    with workspace, _kept_for_later(workspace):
        workspace.prepare(state, shards, places)
        _write_weights(plan, workspace, on_progress)
        _finish(workspace, files)
    return Conversion(target, plan.parameters, plan.weight_bytes, plan.bits_per_weight, len(shards))


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
        raise RequestError(f"{source.path} isn't quantised; leave dequantize out")
    if source.packed and not dequantize and (source.schemes or not quantise):
        raise RequestError(
            f"{source.path} is quantised already ({source.packed}); take the model it was made of, "
            "or add dequantize to unpack it first"
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


def _finish(workspace: Workspace, files: Files) -> None:
    """The small files, a last look at the whole, and its name."""
    write(files, workspace.path)
    open_checkpoint(workspace.path)
    workspace.publish()


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
