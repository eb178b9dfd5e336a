"""What a parser tells of a model's output, piece by piece."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's text, never empty.

    reason: why this text, which began like a tool call, isn't one; None for ordinary text.
    unfinished: it is markup that the output ended in: what cut the output off cut a call.
    """

    text: str
    reason: str | None = None
    unfinished: bool = False


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning that comes before an answer, never empty.

    unfinished: the output ended in it, and it begins like the tag that closes the reasoning.
    """

    text: str
    unfinished: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete tool call.

    index: 0 for the answer's first call, then counting up.
    arguments: a JSON object, whole: a call is told of once it is certain to be one. Clients of
        OpenAI's API add up pieces of arguments, and one piece is as good as many.
    id: the model's own, where its format has one.
    """

    index: int
    name: str
    arguments: str
    id: str | None = None


Delta = Content | Reasoning | ToolCall
