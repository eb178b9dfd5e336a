"""`mlxserve serve`: the model behind HTTP, in OpenAI's and Anthropic's dialects."""

import logging
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mlxserve import config
from mlxserve.cli import options, terminal
from mlxserve.config import (
    DEFAULT_MODEL,
    MAX_BODY_BYTES,
    MAX_WAIT_S,
    EngineConfig,
    Policy,
    ServerConfig,
)
from mlxserve.errors import RequestError
from mlxserve.report import count_bytes
from mlxserve.types import SamplingParams

if TYPE_CHECKING:
    from mlxserve.llm import LLM

EPILOG = """\b
Examples:
  mlxserve serve
  mlxserve serve --port 8000 --kv-bits 8 --max-batch 16
  MLXSERVE_API_KEYS=long-key-1,long-key-2 mlxserve serve --host 0.0.0.0
  curl localhost:8080/v1/chat/completions \\
    -d '{"messages": [{"role": "user", "content": "Hello"}]}'
"""

TOOL_FORMATS_HELP = (
    "How the model writes tool calls: deepseek, gemma, glm, harmony, hermes, llama3_json, mistral, "
    "pythonic, qwen3_coder or tool_code. [default: as its chat template shows]"
)
REASONING_HELP = (
    "How it writes reasoning: gemma, harmony, mistral or think. [default: as its template shows]"
)

_network = partial(typer.Option, rich_help_panel="Network")
_network_n = partial(_network, parser=options.whole, metavar="N")
_network_s = partial(_network, parser=options.number, metavar="SECONDS")
_access = partial(typer.Option, rich_help_panel="Who may ask, and how much")
_access_n = partial(_access, parser=options.whole, metavar="N")
_schedule = partial(typer.Option, rich_help_panel="Scheduling")
_schedule_n = partial(_schedule, parser=options.whole, metavar="N")
_schedule_x = partial(_schedule, parser=options.number)
_absent = partial(typer.Option, rich_help_panel="For requests that leave these out")
_absent_n = partial(_absent, parser=options.whole, metavar="N")
_absent_x = partial(_absent, parser=options.number, metavar="X")

Texts = list[str] | None


@options.takes_engine
def serve(
    model: options.ModelArgument = DEFAULT_MODEL,
    quiet: options.Quiet = False,
    prompt_cache: options.PromptCache = None,
    no_prefix_cache: options.NoPrefixCache = False,
    host: Annotated[
        str, _network("--host", metavar="ADDRESS", help="0.0.0.0 is for other machines too.")
    ] = "127.0.0.1",
    port: Annotated[int, _network_n("--port", help="0 takes one that is free.")] = 8080,
    served_name: Annotated[
        Texts,
        _network("--served-name", metavar="NAME", help="What requests call the model. Repeatable."),
    ] = None,
    allowed_host: Annotated[
        Texts,
        _network(
            "--allowed-host",
            metavar="NAME",
            help="Answer requests to this host name, * for any. Repeatable.",
        ),
    ] = None,
    cors_origin: Annotated[
        Texts,
        _network(
            "--cors-origin",
            metavar="URL",
            help="Let web pages from here ask, * from anywhere. Repeatable.",
        ),
    ] = None,
    max_body_mb: Annotated[int, _network_n("--max-body-mb", help="MiB of one request.")] = 4,
    max_connections: Annotated[
        int, _network_n("--max-connections", help="Open at once; one more is told 503.")
    ] = 2048,
    grace: Annotated[
        float, _network_s("--grace", help="Running answers may go on so long after SIGTERM.")
    ] = 30.0,
    strict: Annotated[
        bool, _network("--strict", help="Refuse unknown fields; else a header names them.")
    ] = False,
    api_key: Annotated[
        Texts,
        _access(
            "--api-key",
            metavar="KEY",
            help="Refuse requests without a key; each is a tenant. Repeatable. Others can see a "
            "command line: rather set MLXSERVE_API_KEYS to KEY,KEY.",
        ),
    ] = None,
    api_key_file: Annotated[
        str | None,
        _access("--api-key-file", metavar="FILE", help="One key a line; # begins a comment."),
    ] = None,
    requests_per_minute: Annotated[
        int | None, _access_n("--requests-per-minute", help="Of each tenant.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        _access_n(
            "--tokens-per-minute", help="Of each tenant: prompts, and what answers may take."
        ),
    ] = None,
    max_batch: Annotated[int, _schedule_n("--max-batch", help="Requests computed together.")] = 32,
    max_queue: Annotated[
        int, _schedule_n("--max-queue", help="More than so many waiting are refused.")
    ] = 1024,
    policy: Annotated[
        Policy, _schedule("--policy", help="Who starts next: the first, or the most cached.")
    ] = "fcfs",
    target_itl_ms: Annotated[
        float | None,
        _schedule_x("--target-itl-ms", metavar="MS", help="Cut prompts smaller, to keep steps so."),
    ] = None,
    temperature: Annotated[float | None, _absent_x("--temperature", "--temp", "-t")] = None,
    top_p: Annotated[float | None, _absent_x("--top-p")] = None,
    top_k: Annotated[int | None, _absent_n("--top-k")] = None,
    min_p: Annotated[float | None, _absent_x("--min-p")] = None,
    repetition_penalty: Annotated[float | None, _absent_x("--repetition-penalty")] = None,
    max_tokens: Annotated[int | None, _absent_n("--max-tokens", "-n")] = None,
    tool_format: Annotated[
        str | None, typer.Option("--tool-format", metavar="NAME", help=TOOL_FORMATS_HELP)
    ] = None,
    reasoning_format: Annotated[
        str | None, typer.Option("--reasoning-format", metavar="NAME", help=REASONING_HELP)
    ] = None,
    log_format: Annotated[
        Literal["text", "json"], typer.Option("--log-format", help="Of the line for each request.")
    ] = "text",
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Put the token ids of its prompt into it.")
    ] = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Serve a model over HTTP, as OpenAI and Anthropic do.

    It listens to this machine only, unless --host says otherwise. SIGTERM and Ctrl-C let running
    answers end. Exit codes: 0 stopped as asked, 1 the engine failed.
    """
    name = terminal.check_text("MODEL", model)
    engine |= {"prefix_cache": not no_prefix_cache, "max_batch": max_batch, "max_queue": max_queue}
    engine |= {"policy": policy, "target_itl_ms": target_itl_ms}
    EngineConfig(**engine)
    from mlxserve.cli import models

    models.follow_if_told(name, engine)  # what follows is rank 0's alone, files too
    _check_options(served_name, max_body_mb, grace, tool_format, reasoning_format)
    saved = options.saved_prompt(prompt_cache, prefix_cache=not no_prefix_cache)
    given = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "max_tokens": max_tokens,
    }
    sampling = {field: value for field, value in given.items() if value is not None}
    SamplingParams(**sampling)
    settings = ServerConfig(
        names=tuple(
            terminal.check_text("--served-name", given)
            for given in served_name or [Path(name).name if Path(name).exists() else name]
        ),
        sampling=sampling,
        host=terminal.check_text("--host", host),
        port=port,
        allowed_hosts=tuple(allowed_host or ()),
        cors_origins=tuple(cors_origin or ()),
        api_keys=_keys(api_key or [], api_key_file),
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        strict=strict,
        max_body_bytes=max_body_mb << 20,
        max_connections=max_connections,
        grace_s=grace,
        tool_format=tool_format,
        reasoning_format=reasoning_format,
        log_format=log_format,
        log_prompts=log_prompts,
    )
    raise typer.Exit(_serve(name, engine, settings, saved, quiet=quiet))


def _serve(
    name: str, engine: dict[str, Any], settings: ServerConfig, saved: Path | None, *, quiet: bool
) -> int:
    from mlxserve.server import run
    from mlxserve.server.tenants import tenant_names

    level = logging.WARNING if quiet else logging.INFO
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for noisy in ("uvicorn", "asyncio"):  # they warn of clients that hang up, or send rubbish
        logging.getLogger(noisy).setLevel(logging.ERROR)
    from mlxserve.cli import models

    with run.bind(settings) as at, models.load(name, engine, quiet=quiet) as llm:
        if saved is not None:
            for tenant in tenant_names(settings.api_keys):  # none shares with another
                llm.load_cache(saved, tenant=tenant)

        def on_ready(url: str) -> None:
            if not quiet:
                terminal.note(_facts(llm, settings, engine))
                if not (settings.local or settings.api_keys):
                    terminal.note("other machines may ask without a key; --api-key asks for one")
                terminal.note(f"{settings.names[0]} at {url}/v1; Ctrl-C ends the server")

        return run.serve(llm, settings, at, on_ready)


def _facts(llm: "LLM", settings: ServerConfig, engine: dict[str, Any]) -> str:
    """What was found out of the model while it was loaded."""
    from mlxserve.memory import device_limit_bytes
    from mlxserve.server.formats import Formats

    formats = Formats.of(llm.tokenizer, settings.tool_format, settings.reasoning_format)
    held = count_bytes(llm.stats().peak_memory_bytes)
    most = count_bytes(engine.get("memory_limit_bytes") or device_limit_bytes())
    return (
        f"context {llm.context_tokens:,} tokens; memory {held}, at most {most}; "
        f"tool calls: {formats.tools or 'not known, see --tool-format'}; "
        f"reasoning: {formats.reasoning or 'none'}"
    )


def _check_options(
    names: Texts, max_body_mb: int, grace: float, tools: str | None, reasoning: str | None
) -> None:
    """Those whose values ServerConfig knows by other names, or not at all. Raises RequestError."""
    from mlxserve.text.parsers import make_parser

    if names and not all(names):
        raise RequestError("--served-name is ''; give a name")
    most_mb = MAX_BODY_BYTES >> 20
    if not 1 <= max_body_mb <= most_mb:
        raise RequestError(f"--max-body-mb is {max_body_mb}; it must be from 1 to {most_mb}")
    if not 0 < grace <= MAX_WAIT_S:
        raise RequestError(f"--grace is {grace:g}; it must be above 0 and at most {MAX_WAIT_S}")
    make_parser(tools, reasoning)


def _keys(given: list[str], file: str | None) -> tuple[str, ...]:
    """From the options and the environment. Raises RequestError."""
    keys = [*given, *config.api_keys()]
    if file is not None:
        lines = terminal.read_text("--api-key-file", file).splitlines()
        found = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
        if not found:
            raise RequestError(f"--api-key-file {file} has no key; write one on each line")
        keys += found
    return tuple(dict.fromkeys(keys))
