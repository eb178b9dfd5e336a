"""`mlxserve cache`: prompts whose computation is kept in a file."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxserve.cli import options, terminal
from mlxserve.config import DEFAULT_MODEL
from mlxserve.errors import DamagedError, RequestError
from mlxserve.report import count_bytes

if TYPE_CHECKING:
    from mlxserve.cache.file import SavedCache

HELP = "Keep the computation of a long prompt in a file."
EPILOG = """\b
Example:
  mlxserve cache build --prompt-file book.txt --out book.st
  mlxserve cache inspect book.st
  cat book.txt question.txt | mlxserve generate --prompt-cache book.st -p -
"""

_File = Annotated[str, typer.Argument(metavar="FILE", help="What `cache build` made.")]


@options.takes_engine
def build(
    prompt_file: Annotated[
        str, typer.Option("--prompt-file", metavar="FILE", help="The prompt, as UTF-8.")
    ],
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="The file to make.")],
    model: options.Model = DEFAULT_MODEL,
    system: options.System = None,
    raw: options.Raw = False,
    quiet: options.Quiet = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Compute a prompt, and keep what the model made of it in a file.

    Where the model has a chat template, the prompt is one message to it. Prompts that begin with
    the same tokens start from the file. It serves the same model with the same --kv-bits and
    --max-kv-size, on a machine with the same kernels.
    """
    terminal.end_on_broken_pipe()
    from mlxserve.cli import models

    system = options.check_system(system, raw=raw)
    model = terminal.check_text("--model", model)
    models.follow_if_told(model, engine)
    name = terminal.check_text("--prompt-file", prompt_file)
    text = terminal.read_text("--prompt-file", name)
    # A message from a file should read like the same words after `generate --prompt`.
    text = text if raw else text.removesuffix("\n")
    if not text:
        raise RequestError(f"{name} is empty; give --prompt-file some text")
    path = Path(terminal.check_text("--out", out))

    from mlxserve.cache import file

    file.check_target(path)
    with models.load(model, engine, quiet=quiet) as llm:
        llm.save_cache(path, models.as_prompt(llm, model, text, system, raw=raw))
    if not quiet:
        saved = file.read(path)
        size = count_bytes(saved.layout.size_bytes)
        terminal.note(f"{path}: {saved.header.tokens:,} tokens, {size}")


def inspect(
    path: _File,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts: one JSON object.")] = False,
) -> None:
    """Show what a cache file holds and what it was made with.

    Pages aren't read; `cache verify` checks them.
    """
    terminal.end_on_broken_pipe()
    saved = _read(path)
    if as_json:
        print(json.dumps(_described(saved)))
        return
    header = saved.header
    for name, value in header.fingerprint.items():
        print(f"{name}: {terminal.harmless(value)}")
    used = header.tokens % header.page_tokens or header.page_tokens
    print(f"tokens: {header.tokens:,}, the last page holds {used} of {header.page_tokens}")
    print(f"size: {count_bytes(saved.layout.size_bytes)}")
    for line in _group_lines(saved):
        print(line)


def _group_lines(saved: "SavedCache") -> list[str]:
    from mlxserve.cache.file import layer_names, ranges

    lines: list[str] = []
    for group in saved.header.groups:
        what = "states" if group.pages is None else f"pages {ranges(group.pages)}"
        lines.append(f"{layer_names(group.layers)}: {what}")
        lines += [f"  {name}: {x.dtype} {list(x.shape)}" for name, x in group.parts.items()]
    return lines


def _described(saved: "SavedCache") -> dict[str, Any]:
    from dataclasses import asdict

    return {"path": str(saved.path), "bytes": saved.layout.size_bytes, **asdict(saved.header)}


def verify(path: _File) -> None:
    """Check every byte of a cache file.

    Names each page that has changed since it was written. Exit code 1 if there is any.
    """
    terminal.end_on_broken_pipe()
    from mlxserve.cache import file

    try:
        saved = _read(path)
    except DamagedError as error:
        print(error)
        raise typer.Exit(1) from None
    found = file.damage(saved)
    for name in found:
        print(f"{saved.path}: {name} isn't as it was written")
    if found:
        terminal.note(f"the file is damaged; {file.REBUILD}")
        raise typer.Exit(1)
    size = count_bytes(saved.layout.size_bytes)
    print(f"{saved.path}: sound, {saved.header.tokens:,} tokens, {size}")


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A cache file.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another.")],
) -> None:
    """Show how two cache files differ.

    That is in what they were made with, tokens, pages and size. Says nothing where they don't. Exit
    code 1 if they do.
    """
    terminal.end_on_broken_pipe()
    from mlxserve.cache import file

    lines = file.diff(_read(first), _read(second))
    for line in lines:
        print(line)
    raise typer.Exit(1 if lines else 0)


def _read(path: str) -> "SavedCache":
    from mlxserve.cache import file

    return file.read(Path(terminal.check_text("FILE", path)))
