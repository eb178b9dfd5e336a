"""What the commands that take a model share: nothing large is downloaded before somebody agreed."""

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mlxserve import config
from mlxserve.cli import terminal
from mlxserve.errors import ModelError, RequestError
from mlxserve.report import count_bytes
from mlxserve.sources import resolve
from mlxserve.sources.hub_names import HubModel

if TYPE_CHECKING:
    from mlxserve.llm import LLM


def ready(model: str, *, quiet: bool = False) -> str:
    """What to give to `mlxserve.load` for this model, so that it downloads nothing of the Hub.

    For a Hub model that is not here, asks at a terminal and downloads it; elsewhere it raises
    ModelError, with the command that does. One that is here in an older version stays at it.
    """
    ref = resolve.hub_ref(model)
    if ref is None:
        return model
    here, new = resolve.locate(ref)
    if new is not None and here is not None and new.missing_bytes():
        size = count_bytes(new.missing_bytes())
        terminal.note(f"there is a newer {ref}; `mlxserve pull {ref}` downloads it ({size})")
        return str(here)
    if new is not None:
        here = download(new, quiet=quiet, instead=f"it isn't here; `mlxserve pull {ref} --yes` ")
    return str(here)


def load(
    model: str, engine: dict[str, Any], *, quiet: bool = False, saved: Path | None = None
) -> "LLM":
    """The model of a command's one user; see `ready`.

    engine: of EngineConfig. saved: a prompt cache to start from, which was found to be sound.
    """
    import mlxserve

    found = ready(model, quiet=quiet)
    with terminal.Progress(quiet=quiet) as progress:
        llm = mlxserve.load(found, on_progress=progress, **engine)
    if saved is not None:
        llm.load_cache(saved)
    return llm


def follow_if_told(model: str, engine: dict[str, Any]) -> None:
    """In a process that `launch` started beside the first: compute for that one, and end."""
    placement = config.placement()
    if placement is None or placement.rank == 0:
        return
    from mlxserve.checks import from_names
    from mlxserve.distributed.follower import follow
    from mlxserve.opening import open_model

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    options = dict(engine)
    q6_k = options.pop("gguf_q6_k", "8bit")
    settings = from_names(config.EngineConfig, "engine option", options)
    follow(placement, lambda: open_model(ready(model), settings, gguf_q6_k=q6_k))
    raise typer.Exit


def download(
    new: HubModel,
    *,
    yes: bool = False,
    quiet: bool = False,
    verify: bool = False,
    instead: str = "add --yes, which ",
) -> Path:
    """Say what the download takes and what the model needs, ask unless `yes`, and download.

    instead: what to do where there is no terminal to ask at. Raises ModelError, also for a model
    that this version can't run; and typer.Exit after a no.
    """
    from mlxserve.sources.hub_fetch import fetch

    if new.missing():
        if not (yes and quiet):
            for line in describe(new):
                terminal.note(line)
        if not yes:
            confirm(
                f"Download {count_bytes(new.missing_bytes())}?",
                f"{new.ref}: {instead}downloads it",
            )
    with terminal.Progress(quiet=quiet) as progress:
        return fetch(new, progress, verify=verify)


def confirm(question: str, instead: str) -> None:
    """Go on only after a yes: ends the program with 1 otherwise, ModelError without a terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ModelError(f"there is no terminal to ask at; {instead}")
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort:  # Ctrl-C or Ctrl-D
        raise KeyboardInterrupt from None
    if not agreed:
        terminal.note("nothing was done")
        raise typer.Exit(1)


def as_prompt(
    llm: "LLM", model: str, text: str, system: str | None, *, raw: bool
) -> str | list[dict[str, str]]:
    """The text as one message where the model has a chat template, after `system`; else as it is.

    Raises RequestError where `system` has no place.
    """
    if raw or llm.tokenizer.chat_template is None:
        if system is not None:
            raise RequestError(f"{model} has no chat template, so --system can't be used")
        return text
    roles = [("user", text)] if system is None else [("system", system), ("user", text)]
    return [{"role": role, "content": content} for role, content in roles]


def describe(new: HubModel) -> list[str]:
    """The lines before the question: what is downloaded, and how it will run here."""
    from mlxserve import device
    from mlxserve.engine import footprint
    from mlxserve.kernels import matmul
    from mlxserve.memory import device_limit_bytes
    from mlxserve.sources.hub_fetch import free_bytes, read_config

    size = count_bytes
    config, elements = read_config(new)
    metal, limit = device.has_metal(), device_limit_bytes()
    weights = footprint.loaded_bytes(
        config, new.weight_bytes, form=matmul.form(), elements=elements
    )
    need = footprint.footprint(config, weights, limit, metal=metal)
    kept = new.size_bytes - new.missing_bytes()
    lines = [
        f"{new.ref} at commit {new.commit[:12]}, {config['model_type']}",
        f"  download  {size(new.missing_bytes())} in {len(new.missing())} files"
        + (f"; {size(kept)} are here" if kept else ""),
        f"  disk      {size(free_bytes(new))} free in {new.cache.root}",
        f"  memory    {size(need.weight_bytes + need.cache_bytes)}: {size(need.weight_bytes)} for "
        f"weights, {size(need.cache_bytes)} for {need.context_tokens:,} tokens of context",
    ]
    if need.fits:
        verdict = f"yes, with room for {need.room_tokens:,} tokens at the most"
    elif need.room_tokens:
        verdict = f"barely: room for {need.room_tokens:,} tokens only; take a smaller quantisation"
    else:
        verdict = "NO: it won't run on this machine; take a smaller model or quantisation"
    lines.append(f"  fits      {verdict} (models may use {size(limit)})")
    name = device.name() if metal else ""
    bandwidth, origin = footprint.memory_bandwidth(name)
    lines.append(
        f"  speed     at most {_round(bandwidth / weights)} tokens/s, with {bandwidth / 1e9:.0f} "
        f"GB/s of memory bandwidth ({origin})"
    )
    return lines


def _round(rate: float) -> str:
    """A rate for people: `9.4`, `12,300`."""
    return f"{rate:.1f}" if rate < 100 else f"{rate:,.0f}"
