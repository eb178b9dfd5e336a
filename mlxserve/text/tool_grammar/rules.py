"""A grammar that is being put together, for one model's tokens."""

from collections.abc import Iterable, Sequence

from mlxserve.grammar import Grammar
from mlxserve.text import lark
from mlxserve.text.tokenizer import Tokenizer


class Rules:
    """Rules and terminals, under names, and expressions that depend on what a model's tokens are.

    named: rules by name; what they mention must be there before `grammar` is called.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.named: dict[str, str] = {}
        self._tokenizer = tokenizer
        self._names: dict[str, str] = {}

    def rule(self, form: str) -> str:
        """A name for an expression, so that it can be mentioned several times."""
        name = self._names.setdefault(form, f"part_{len(self._names)}")
        self.named[name] = form
        return name

    def terminal(self, form: str) -> str:
        """A name for an expression that is read as one piece, and may have & and ~ in it."""
        name = self._names.setdefault(form, f"TEXT_{len(self._names)}")
        self.named[name] = form
        return name

    def first_known(self, marks: Iterable[str | None]) -> str | None:
        """The first mark that is a token, or else the last."""
        *marks, last = marks
        return next((mark for mark in marks if mark and len(self._ids(mark)) == 1), last)

    def mark(self, text: str) -> str:
        """A mark, which the model may know as a token of its own that no text spells."""
        token = self._special(text)
        return lark.literal(text) if token is None else f"<[{token}]>"

    def up_to(self, mark: str, form: str = lark.ANY_TEXT, before: str = "") -> str:
        """Text of a form up to a mark, which isn't in it. before: what stands before the mark."""
        text = f"({form} & {lark.without([mark])})"
        if before:
            text = f"{text} {lark.literal(before)}"
        if self._special(mark) is None:  # one terminal: nothing else shows where the text ends
            return self.terminal(f"{text} {lark.literal(mark)}")
        return f"{self.terminal(text)} {self.mark(mark)}"

    def listed(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Items in order with a separator between them; whether each must be there.

        Empty text where none must.
        """
        between, rest, starts = lark.literal(separator), "", []
        for item, required in reversed(items):
            starts.append(f"{item} {rest}")
            after = f"{between} {item}"
            rest = self.rule(f"{after if required else f'({after})?'} {rest}")
        first = next((i for i, (_, required) in enumerate(items) if required), None)
        if first is None:
            return f"{lark.one_of(starts)}?" if starts else ""
        return lark.one_of(starts[-first - 1 :])

    def grammar(self, start: str) -> Grammar:
        """All of it, and what an answer is."""
        rules = [f"{name}: {form}" for name, form in self.named.items()]
        return Grammar.lark("\n".join([f"start: {start}", *rules]))

    def _special(self, mark: str) -> int | None:
        ids = self._ids(mark)
        return ids[0] if len(ids) == 1 and ids[0] in self._tokenizer.special_ids else None

    def _ids(self, mark: str) -> list[int]:
        return self._tokenizer.encode(mark, add_special_tokens=False)
