"""Grammars for one model's tokens, compiled by the llguidance library.

A grammar is compiled on the caller's thread; the engine then asks a copy of it, token by token,
which tokens may come next.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from mlxserve.errors import RequestError
from mlxserve.grammar import Grammar
from mlxserve.text import lark
from mlxserve.text.schema import check_ends
from mlxserve.text.thinking import CLOSE, OPEN, opens_thinking
from mlxserve.text.tokenizer import Tokenizer

MAX_COMPILED = 16  # grammars kept for the next request
TAIL_TOKENS = 16  # of a prompt, to see whether the answer begins inside its thinking
# In llguidance's units: a mask may find out so much that it takes milliseconds, and what has been
# found out, in states of up to 2 kB, is kept for the next answers.
LIMITS = LLParserLimits(
    initial_lexer_fuel=100_000,
    step_lexer_fuel=20_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)
# Between two parts of JSON, so that an answer can't go on with spaces for ever.
SPACES = r"[ \n\r\t]{1,40}"
JSON_OPTIONS = {
    "whitespace_pattern": SPACES,
    "lenient": False,
    "coerce_one_of": False,
}

# Where only one text can follow, each of its tokens is drawn like any other: to cut it as the
# tokenizer would, masks would have to call it, from other threads.
_HEAD = '%llguidance {"no_forcing": true}\n'
_THOUGHT = r"""
thought[lazy]: /(.|\n)*<\/think>/
gap: /[ \n]{0,4}/
"""
_FORMS = {
    "answer": _HEAD + "start: @answer",
    "thinking": _HEAD + "start: thought gap @answer" + _THOUGHT,
    "may think": _HEAD + 'start: ("<think>" thought gap)? @answer' + _THOUGHT,
}


class Matcher:
    """How far one answer has come in its grammar. Used by one thread at a time.

    read: tokens of prompt and answer that it has seen.
    """

    def __init__(self, inner: LLMatcher, prompt_tokens: int) -> None:
        self.inner = inner
        self.read = prompt_tokens

    def follow(self, ids: Sequence[int]) -> None:
        """Take in what is new. ids: of prompt and answer, so far."""
        self.inner.consume_tokens(list(ids[self.read :]))
        self.read = len(ids)

    @property
    def failure(self) -> RequestError | None:
        """Why the answer can't go on, once a mask was asked for."""
        if not self.inner.is_error():
            return None
        return RequestError(f"the grammar can't go on: {_reason(self.inner)}")


class Grammars:
    """Compiles grammars for one model. Any thread; what was compiled is kept for the next request.

    vocab_size: of the model, which may be padded beyond the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokens: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[Grammar, str], LLMatcher] = OrderedDict()
        self.end_ids = frozenset(token for token in tokenizer.eos_ids if token < vocab_size)

    def matcher(self, grammar: Grammar, prompt_ids: Sequence[int]) -> Matcher:
        """A matcher for an answer to this prompt. Raises RequestError that says what is wrong."""
        key = grammar, self._form(prompt_ids)
        with self._lock:
            compiled = self._compiled.get(key)
        # Copies share what they find out, and its limits: where one used them up, start afresh.
        if compiled is None or not _begins(compiled.deep_copy()):
            compiled = self._compile(*key)
        with self._lock:
            self._compiled[key] = compiled
            self._compiled.move_to_end(key)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return Matcher(compiled.deep_copy(), len(prompt_ids))

    def _form(self, prompt_ids: Sequence[int]) -> str:
        """Whether thinking comes before the answer."""
        tail = [id_ for id_ in prompt_ids[-TAIL_TOKENS:] if id_ < self._tokenizer.vocab_size]
        text = self._tokenizer.decode(tail).rstrip()
        if opens_thinking(text):
            return "thinking"
        # A template may say that thinking is over before it begins.
        return "may think" if self._thinks and not text.endswith(CLOSE) else "answer"

    @property
    def _thinks(self) -> bool:
        """Whether the model was taught the tags of thinking: they are tokens, and text."""
        tags = [self._tokenizer.encode(tag, add_special_tokens=False) for tag in (OPEN, CLOSE)]
        return all(len(ids) == 1 and ids[0] not in self._tokenizer.special_ids for ids in tags)

    def _compile(self, grammar: Grammar, form: str) -> LLMatcher:
        if not self.end_ids:
            raise RequestError(
                "this model's tokenizer names no end token, and a grammar needs one to end with"
            )
        if grammar.kind == "json_schema":
            check_ends("the JSON schema", json.loads(str(grammar.value)))
        parts = [{"lark_grammar": _FORMS[form]}, {"name": "answer", **_source(grammar)}]
        text = json.dumps({"grammars": parts})
        compiled = LLMatcher(self._ll_tokenizer(), text, log_level=0, limits=LIMITS)
        if not _begins(compiled):
            raise RequestError(f"the {_NAMES[grammar.kind]} can't be used: {_reason(compiled)}")
        return compiled

    def _ll_tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._tokens is None:
                vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self.end_ids)
                self._tokens = LLTokenizer(
                    TokenizerWrapper(vocabulary), eos_token=sorted(self.end_ids)
                )
            return self._tokens


class _Vocabulary:
    """A tokenizer as llguidance wants to see it."""

    def __init__(self, tokenizer: Tokenizer, size: int, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(end_ids)
        self.bos_token_id = tokenizer.bos_id
        spelled = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        # What has no bytes, be it padding or a gap, is never allowed.
        self.tokens = spelled + [b""] * (size - len(spelled))
        # No text of an answer is spelled with these.
        self.special_token_ids = sorted(tokenizer.special_ids | end_ids)

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(), add_special_tokens=False)


_NAMES = {
    "json_schema": "JSON schema",
    "json_object": "JSON schema",
    "regex": "regex",
    "choice": "choice",
    "lark": "Lark grammar",
}


def _source(grammar: Grammar) -> dict[str, Any]:
    """A grammar in llguidance's terms."""
    match grammar.kind:
        case "json_schema":
            return {"json_schema": json.loads(str(grammar.value)) | {"x-guidance": JSON_OPTIONS}}
        case "json_object":
            return {"json_schema": {"type": "object", "x-guidance": JSON_OPTIONS}}
        case "regex":
            return {"lark_grammar": f"start: {lark.regex(str(grammar.value))}"}
        case "choice":
            texts = lark.one_of(map(lark.literal, grammar.value))
            return {"lark_grammar": f"start: TEXT\nTEXT: {texts}"}
        case "lark":
            return {"lark_grammar": grammar.value}


def check_schema(grammar: Grammar, *, enforced: bool) -> None:
    """Whether a JSON schema can be one of a tool's, before it is part of a grammar.

    enforced: whether answers will keep to it, so that what can't be enforced is refused, too. Where
    models are only told of a schema, it may have more than llguidance knows. Raises RequestError.
    """
    source = json.loads(str(grammar.value))
    check_ends("the JSON schema", source)
    options = JSON_OPTIONS | ({} if enforced else {"lenient": True, "coerce_one_of": True})
    schema = {"json_schema": {"type": "object"} | source | {"x-guidance": options}}
    error = LLMatcher.validate_grammar(json.dumps({"grammars": [schema]}), limits=LIMITS)
    if error and (enforced or not any(sign in error for sign in _BEYOND)):
        raise RequestError(f"the JSON schema can't be used: {_told(error)}")


def _begins(matcher: LLMatcher) -> bool:
    """Whether an answer can begin; its first mask shows what building it doesn't."""
    matcher.compute_bitmask()
    return not matcher.is_error()


def _reason(matcher: LLMatcher) -> str:
    return _told(matcher.get_error())


def _told(error: str) -> str:
    """What llguidance says, in one line, and what to do."""
    said = [line.strip() for line in error.splitlines()]
    for sign, reason in _REASONS.items():
        if sign in said[0]:
            return reason
    # It also draws a picture of the place, and of its own state.
    text = " ".join(line for line in said if not re.match(r"\^+$|\d+ \||<", line))
    return f"{text[:300]}; write it otherwise"


_BEYOND = ("regex parse error", "Resource '", "too large", "too big", "too many")
"""In errors of schemas that needn't be wrong: they have look-around, or refer to others."""

_REASONS = {
    "NoExtension": "no token of this model continues it; allow other characters",
    "too big": "it is too large; use fewer or shorter parts",
    "too many": "it is too large; use fewer or shorter parts",
    "coerce_one_of": "oneOf has branches that may hold at once; use anyOf",
}
