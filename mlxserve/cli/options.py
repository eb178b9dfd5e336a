"""Options that several commands share. Ranges are checked by SamplingParams and EngineConfig."""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from mlxserve.cli import terminal
from mlxserve.config import EngineConfig
from mlxserve.engine import estimates
from mlxserve.errors import RequestError
from mlxserve.types import SamplingParams


def whole(text: str) -> int:
    """A whole number. typer's own message for a wrong one doesn't say what the value was."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} isn't a whole number") from None


def number(text: str) -> float:
    """A number, and for a wrong one a message that says what the value was."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} isn't a number") from None


_length = partial(typer.Option, rich_help_panel="When to stop")
_choice = partial(typer.Option, rich_help_panel="How the next token is chosen")
_length_n = partial(_length, parser=whole, metavar="N")
_choice_n = partial(_choice, parser=whole, metavar="N")
_choice_x = partial(_choice, parser=number, metavar="X")
_cache = partial(typer.Option, rich_help_panel="Cache and memory")
_cache_n = partial(_cache, parser=whole, metavar="N")

Prompt = Annotated[
    str, typer.Option("--prompt", "-p", metavar="TEXT", help="What to answer; - reads stdin.")
]
_MODEL = "OWNER/NAME, a name or a path."
Model = Annotated[str, typer.Option("--model", "-m", metavar="MODEL", help=_MODEL)]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)]
System = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="Instructions before the prompt.")
]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the prompt as is: no chat template.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on stderr but errors.")]

MaxTokens = Annotated[int, _length_n("--max-tokens", "-n", help="New tokens at the most.")]
MinTokens = Annotated[int, _length_n("--min-tokens", help="No end before this many new tokens.")]
Stop = Annotated[
    list[str] | None,
    _length("--stop", metavar="TEXT", help="End before this text. Repeatable."),
]
StopTokenIds = Annotated[
    list[int] | None,
    _length("--stop-token-id", parser=whole, metavar="ID", help="End at this token. Repeatable."),
]
IgnoreEos = Annotated[bool, _length("--ignore-eos", help="Go on past the model's own end.")]

Temperature = Annotated[
    float,
    _choice_x("--temperature", "--temp", "-t", help="0: the likeliest token; more: more varied."),
]
TopK = Annotated[int, _choice_n("--top-k", help="Keep the N likeliest; 0 keeps all.")]
TopP = Annotated[float, _choice_x("--top-p", help="Keep the likeliest that sum to X; 1 keeps all.")]
MinP = Annotated[float, _choice_x("--min-p", help="Keep X times the best or more; 0 keeps all.")]
Seed = Annotated[int | None, _choice_n("--seed", help="The same seed gives the same answer.")]
RepetitionPenalty = Annotated[
    float, _choice_x("--repetition-penalty", help="Above 1, tokens seen before are less likely.")
]
PresencePenalty = Annotated[
    float, _choice_x("--presence-penalty", help="Taken off the logit of each token seen.")
]
FrequencyPenalty = Annotated[
    float, _choice_x("--frequency-penalty", help="The same, for each time it was seen.")
]
LogitBias = Annotated[
    list[str] | None,
    _choice("--logit-bias", metavar="ID=VALUE", help="Added to a token's logit. Repeatable."),
]

KVBits = Annotated[
    str | None,
    _cache("--kv-bits", metavar="BITS", help="16, 8, 4 or KEYS/VALUES. [default: as computed]"),
]
MaxKVSize = Annotated[
    int | None, _cache_n("--max-kv-size", help="Tokens that full attention keeps at most.")
]
Keep = Annotated[
    int | None, _cache_n("--keep", help="Of these, the first N; the others are the last.")
]
MaxBatchedTokens = Annotated[
    int | None, _cache_n("--max-batched-tokens", help="Of a step; longer prompts are cut to it.")
]
Memory = Annotated[
    float | None,
    _cache("--memory", parser=number, metavar="GIB", help="In all. [default: what is free here]"),
]
TraceFile = Annotated[
    str | None, _cache("--trace", metavar="FILE", help="Times of steps, for ui.perfetto.dev.")
]
PromptCache = Annotated[
    str | None, _cache("--prompt-cache", metavar="FILE", help="Start from what `cache build` made.")
]
NoPrefixCache = Annotated[
    bool, _cache("--no-prefix-cache", help="Compute each prompt from its first token.")
]

Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="The same answer, whatever else is in its batch.")
]

_DEFAULTS = SamplingParams()
_SAMPLING: dict[str, tuple[Any, Any]] = {
    "temperature": (Temperature, _DEFAULTS.temperature),
    "top_k": (TopK, _DEFAULTS.top_k),
    "top_p": (TopP, _DEFAULTS.top_p),
    "min_p": (MinP, _DEFAULTS.min_p),
    "seed": (Seed, None),
    "repetition_penalty": (RepetitionPenalty, _DEFAULTS.repetition_penalty),
    "presence_penalty": (PresencePenalty, _DEFAULTS.presence_penalty),
    "frequency_penalty": (FrequencyPenalty, _DEFAULTS.frequency_penalty),
    "logit_bias": (LogitBias, None),
    "max_tokens": (MaxTokens, _DEFAULTS.max_tokens),
    "min_tokens": (MinTokens, _DEFAULTS.min_tokens),
    "stop": (Stop, None),
    "stop_token_ids": (StopTokenIds, None),
    "ignore_eos": (IgnoreEos, False),
}
_ENGINE: dict[str, tuple[Any, Any]] = {
    "kv_bits": (KVBits, None),
    "max_kv_size": (MaxKVSize, None),
    "keep": (Keep, None),
    "max_batched_tokens": (MaxBatchedTokens, None),
    "memory": (Memory, None),
    "trace": (TraceFile, None),
    "deterministic": (Deterministic, False),
}


def check_system(system: str | None, *, raw: bool) -> str | None:
    """--system as text. Raises RequestError, also where --raw leaves no place for it."""
    if system is None:
        return None
    if raw:
        raise RequestError("--system needs the chat template that --raw leaves out; drop one")
    return terminal.check_text("--system", system)


def takes_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of sampling; it gets their values, checked, as `sampling`: a dict.

    So that each is written once, and no command can leave one out.
    """
    return _takes(command, "sampling", _SAMPLING, _checked)


def takes_engine(command: Callable[..., None]) -> Callable[..., None]:
    """The same with the options of cache and memory: as `engine`, for `mlxserve.load`.

    For commands that run one request at a time.
    """
    return _takes(command, "engine", _ENGINE, _checked_engine)


def _takes(
    command: Callable[..., None],
    as_name: str,
    table: Mapping[str, tuple[Any, Any]],
    check: Callable[[dict[str, Any]], dict[str, Any]],
) -> Callable[..., None]:
    @wraps(command)
    def run(**values: Any) -> None:
        checked = check({name: values.pop(name) for name in table})
        command(**{as_name: checked}, **values)

    run.__signature__ = signature(command, as_name, table)  # type: ignore[attr-defined]
    return run


def signature(
    command: Callable[..., None], instead_of: str, table: Mapping[str, tuple[Any, Any]]
) -> inspect.Signature:
    """A command's signature with one parameter replaced by the options of a table.

    table: annotation and default of each, by name.
    """
    own = [p for p in inspect.signature(command).parameters.values() if p.name != instead_of]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)
        for name, (option, default) in table.items()
    ]
    return inspect.Signature([*own, *shared])


def _checked(sampling: dict[str, Any]) -> dict[str, Any]:
    """Raises RequestError for a wrong value: now, and not after the model has loaded."""
    sampling["logit_bias"] = _parse_logit_bias(sampling["logit_bias"] or [])
    sampling["stop"] = tuple(terminal.check_text("--stop", text) for text in sampling["stop"] or ())
    sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"] or ())
    SamplingParams(**sampling)
    return sampling


def _checked_engine(values: dict[str, Any]) -> dict[str, Any]:
    """What was given, by the names of EngineConfig. Raises RequestError."""
    given = {name: value for name, value in values.items() if not (value is None or value is False)}
    if "memory" in given:
        estimates.check_above_zero("--memory", given["memory"])
        given["memory_limit_bytes"] = int(given.pop("memory") * 2**30)
    if "trace" in given:
        given["trace"] = _target(given["trace"])
    engine = {"max_batch": 1, **given}
    EngineConfig(**engine)
    return engine


def _target(trace: str) -> Path:
    path = Path(terminal.check_text("--trace", trace))
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise RequestError(
            f"--trace is {trace!r}, and no file can be made there; name one in a folder that can "
            "be written to"
        )
    return path


@contextmanager
def named(flags: Mapping[str, str]) -> Iterator[None]:
    """Have errors that begin with a parameter's name begin with its option instead.

    flags: the options by the parameters' names.
    """
    try:
        yield
    except RequestError as e:
        message, name = str(e), e.param or ""
        if name not in flags or not message.startswith(f"{name} "):
            raise
        raise RequestError(flags[name] + message.removeprefix(name), param=name) from e


def saved_prompt(file: str | None, *, prefix_cache: bool = True) -> Path | None:
    """--prompt-cache as a path, once the file is found to be sound.

    Raises RequestError where there is no prefix cache to put it into, ModelError for other files.
    """
    if file is None:
        return None
    if not prefix_cache:
        raise RequestError("--prompt-cache needs what --no-prefix-cache turns off; drop one")
    from mlxserve.cache import file as cache_file

    return cache_file.read(Path(terminal.check_text("--prompt-cache", file))).path


def _parse_logit_bias(pairs: list[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            biases[int(token)] = float(value)
        except ValueError:
            raise RequestError(
                f"--logit-bias is {pair!r}; write ID=VALUE, for example 42=-5.5"
            ) from None
    return biases
