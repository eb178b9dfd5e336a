"""Options of the commands that make text. Ranges are checked in one place: SamplingParams."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Annotated, Any

import typer

from mlxserve.cli import terminal
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


def check_system(system: str | None, *, raw: bool) -> str | None:
    """--system as text. Raises RequestError, also where --raw leaves no place for it."""
    if system is None:
        return None
    if raw:
        raise RequestError("--system needs the chat template that --raw leaves out; drop one")
    return terminal.check_text("--system", system)


def takes_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all the options above; it gets their values, checked, as `sampling`: a dict.

    So that each is written once, and no command can leave one out.
    """

    @wraps(command)
    def run(**values: Any) -> None:
        sampling = {name: values.pop(name) for name in _SAMPLING}
        command(sampling=_checked(sampling), **values)

    run.__signature__ = signature(command, "sampling", _SAMPLING)  # type: ignore[attr-defined]
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
