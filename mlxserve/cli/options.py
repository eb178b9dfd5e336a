"""Options of the commands that make text. Ranges are checked in one place: SamplingParams."""

from functools import partial
from typing import Annotated

import typer


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} isn't a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} isn't a number") from None


_length = partial(typer.Option, rich_help_panel="When to stop")
_choice = partial(typer.Option, rich_help_panel="How the next token is chosen")
# typer's own messages for a wrong number don't say what the value was.
_length_n = partial(_length, parser=_whole, metavar="N")
_choice_n = partial(_choice, parser=_whole, metavar="N")
_choice_x = partial(_choice, parser=_number, metavar="X")

Prompt = Annotated[
    str, typer.Option("--prompt", "-p", metavar="TEXT", help="What to answer; - reads stdin.")
]
Model = Annotated[
    str, typer.Option("--model", "-m", metavar="MODEL", help="A name `pull` knows, or a path.")
]
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
    _length("--stop-token-id", parser=_whole, metavar="ID", help="End at this token. Repeatable."),
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
