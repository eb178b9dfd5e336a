"""Grammars over tokenizers of every kind: random walks through what is allowed, and refusals."""

import json
import random
import re

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken

from mlxserve.errors import RequestError
from mlxserve.grammar import Grammar
from mlxserve.text import matcher as matcher_module
from mlxserve.text.matcher import Grammars
from mlxserve.text.tokenizer import Tokenizer
from tests.text import training

PADDING = 37  # of the model's vocabulary, beyond the tokenizer's
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n", 'é"']}, "maxItems": 3},
        "size": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"const": 1.5}]},
    },
    "required": ["name", "age", "tags", "size"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "kids": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/node"}}
            },
            "required": ["kids"],
            "additionalProperties": False,
        }
    },
}


# The others can't spell everything.
@pytest.fixture(scope="module", params=[kind for kind in training.KINDS if kind != "unigram"])
def tokenizer(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer.from_directory(training.save(training.KINDS[request.param](), path))


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, tokenizer.vocab_size + PADDING)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer.from_directory(training.save(training.byte_level(), path))


def allowed(matcher):
    bits = np.frombuffer(matcher.inner.compute_bitmask(), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()


def walk(grammars, grammar, seed, limit=2000):
    """A text by drawing among the allowed tokens until an end is drawn."""
    rng, ids, tokenizer = random.Random(seed), [5, 6], grammars._tokenizer
    matcher = grammars.matcher(grammar, ids)
    data = b""
    for _ in range(limit):
        choices = allowed(matcher)
        assert matcher.failure is None
        assert max(choices) < tokenizer.vocab_size, "padding is allowed"
        token = rng.choice(choices)
        if token in tokenizer.eos_ids:
            return data.decode()
        assert token not in tokenizer.special_ids
        data += tokenizer.token_bytes(token)
        ids.append(token)
        matcher.follow(ids)
    raise AssertionError("it doesn't end")


@pytest.mark.parametrize("schema", [PERSON, TREE], ids=["person", "tree"])
def test_every_walk_satisfies_the_schema(grammars, schema):
    for seed in range(10):
        text = walk(grammars, Grammar.json_schema(schema), seed)
        jsonschema.validate(json.loads(text), schema)


def test_every_walk_is_a_json_object(grammars):
    grammar = Grammar.json_schema({"type": "object", "maxProperties": 1})
    assert isinstance(json.loads(walk(grammars, grammar, 3)), dict)


@pytest.mark.parametrize("pattern", [r"(the|a) [a-c]{2,5}s?", r"\d{2}/\d{2}", "^t.e$", "x\ny|e"])
def test_every_walk_matches_the_regex(grammars, pattern):
    for seed in range(10):
        assert re.fullmatch(pattern, walk(grammars, Grammar.regex(pattern), seed))


def test_digits_and_words_are_ascii(byte_level):
    grammars = Grammars(byte_level, byte_level.vocab_size)
    matcher = grammars.matcher(Grammar.regex(r"\d\w"), [5])
    assert {byte_level.token_bytes(token) for token in allowed(matcher)} <= {
        bytes([digit]) + rest
        for digit in b"0123456789"
        for rest in [b"", *(bytes([byte]) for byte in range(128))]
    }


def test_every_choice_can_be_made_and_no_other(byte_level):
    texts = ["yes", "yesterday", 'a "b" \\ / \n', "東京 😀", "\x7f\x00", "</s>"]
    grammars = Grammars(byte_level, byte_level.vocab_size)
    found = {walk(grammars, Grammar.choice(texts), seed) for seed in range(80)}
    assert found == set(texts)


def test_a_context_free_grammar(byte_level):
    grammars = Grammars(byte_level, byte_level.vocab_size)
    grammar = Grammar.lark('start: "(" start ")" | N\nN: /[0-9]/')
    for seed in range(10):
        text = walk(grammars, grammar, seed)
        assert re.fullmatch(r"\(*[0-9]\)*", text)
        assert text.count("(") == text.count(")")


def test_spaces_in_json_are_bounded(byte_level):
    """A model that loves spaces must come to an end."""
    grammars = Grammars(byte_level, byte_level.vocab_size)
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    matcher, ids, spaces = grammars.matcher(Grammar.json_schema(schema), [5]), [5], 0
    while not set(choices := allowed(matcher)) & byte_level.eos_ids:
        blank = [token for token in choices if not byte_level.token_bytes(token).strip()]
        spaces += bool(blank)
        ids.append((blank or choices)[0])
        matcher.follow(ids)
        assert len(ids) < 400
    assert spaces > 20


def test_the_end_is_all_that_follows_a_complete_answer(byte_level):
    grammars = Grammars(byte_level, byte_level.vocab_size)
    matcher = grammars.matcher(Grammar.regex("ab"), [5])
    ids = [5, *byte_level.encode("a"), *byte_level.encode("b")]
    matcher.follow(ids)
    assert set(allowed(matcher)) == byte_level.eos_ids


def test_answers_to_one_grammar_do_not_touch_each_other(byte_level):
    grammars, grammar = Grammars(byte_level, byte_level.vocab_size), Grammar.regex("a(b|c)")
    one, two = grammars.matcher(grammar, [5]), grammars.matcher(grammar, [5])
    start = allowed(two)
    one.follow([5, *byte_level.encode("a")])
    assert allowed(two) == start != allowed(one)


REFUSED = {
    "keyword": (Grammar.json_schema({"type": "object", "not": {}}), '"not"'),
    "format": (Grammar.json_schema({"type": "string", "format": "iban"}), "iban"),
    "pattern": (Grammar.json_schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
    "reference": (Grammar.json_schema({"$ref": "#/$defs/a"}), "/$defs/a"),
    "endless": (Grammar.json_schema({"$ref": "#"}), "for ever"),
    "no instance": (Grammar.json_schema({"enum": []}), "Unsatisfiable"),
    "overlapping": (
        Grammar.json_schema({"oneOf": [{"type": "number"}, {"type": "integer"}]}),
        "use anyOf",
    ),
    "unclosed": (Grammar.regex("(ab"), "unclosed group"),
    "back reference": (Grammar.regex(r"(a)\1"), "backreferences"),
    "no text": (Grammar.regex("[a&&b]"), "no token of this model continues it"),
    "too large": (Grammar.regex("|".join(f"word{i}[{i}-z]" for i in range(9000))), ""),
    "unknown rule": (Grammar.lark("start: other"), "other"),
    "no rule": (Grammar.lark("nothing"), "Expected token"),
    "unknown token": (Grammar.lark("start: <nothing>"), "<nothing>"),
    "deep": (Grammar.lark("start: " + "(" * 9999 + '"a"' + ")" * 9999), "too deeply nested"),
    "deep regex": (Grammar.regex("(" * 9999 + "a" + ")" * 9999), ""),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_t_be_compiled_is_refused_by_name(byte_level, case):
    grammar, words = REFUSED[case]
    with pytest.raises(RequestError) as caught:
        Grammars(byte_level, byte_level.vocab_size).matcher(grammar, [5])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_what_the_tokens_can_t_spell_is_refused(tmp_path):
    tokenizer = Tokenizer.from_directory(training.save(training.unigram(), tmp_path))
    grammars, words = Grammars(tokenizer, tokenizer.vocab_size), "no token of this model continues"
    with pytest.raises(RequestError, match=words):
        grammars.matcher(Grammar.regex("𝄞"), [5])
    matcher = grammars.matcher(Grammar.regex("the𝄞"), [5])
    ids = [5]
    while matcher.failure is None:  # what isn't seen at once is seen where it comes
        ids.append(allowed(matcher)[0])
        matcher.follow(ids)
        assert len(ids) < 6
    assert words in str(matcher.failure)


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    path = training.save(training.byte_level(), tmp_path, eos_token=None)
    tokenizer = Tokenizer.from_directory(path)
    with pytest.raises(RequestError, match="no end token"):
        Grammars(tokenizer, tokenizer.vocab_size).matcher(Grammar.regex("a"), [5])


def test_an_end_that_is_no_special_token_is_drawn_only_at_the_end(tmp_path):
    backend = training.byte_level()
    backend.add_tokens([AddedToken("END", special=False)])
    path = training.save(backend, tmp_path)
    training.write_json(path / "config.json", {"eos_token_id": [2, backend.token_to_id("END")]})
    tokenizer = Tokenizer.from_directory(path)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    matcher = grammars.matcher(Grammar.regex("[A-Z]{3}"), [5])
    assert not set(allowed(matcher)) & tokenizer.eos_ids
    matcher.follow([5, *tokenizer.encode("N") * 3])
    assert set(allowed(matcher)) == tokenizer.eos_ids


def thinking_tokenizer(path):
    backend = training.byte_level()
    backend.add_tokens([AddedToken(tag, special=False) for tag in ("<think>", "</think>")])
    return Tokenizer.from_directory(training.save(backend, path))


def accepts(grammars, grammar, prompt, text):
    """Whether a text is allowed, token by token, and may end."""
    tokenizer = grammars._tokenizer
    ids = tokenizer.encode(prompt)
    matcher = grammars.matcher(grammar, ids)
    for token in tokenizer.encode(text):
        if token not in allowed(matcher):
            return False
        ids.append(token)
        matcher.follow(ids)
    return bool(set(allowed(matcher)) & tokenizer.eos_ids)


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        # The template opened it.
        ("ask <think>\n", 'so "x" {</think>\n\n[1]', True),
        ("ask <think>\n", "[1]", False),
        ("ask <think>\n", "so</think>\n\nsure: [1]", False),
        ("ask <think>\n", "so</think></think>[1]", False),
        # The model may open it.
        ("ask", "<think>so</think>[1]", True),
        ("ask", "<think>\nso\n</think>\n\n[1]", True),
        ("ask", "[1]", True),
        ("ask", "so</think>[1]", False),
        # The template closed it.
        ("ask <think>\n\n</think>\n\n", "[1]", True),
        ("ask <think>\n\n</think>\n\n", "<think>so</think>[1]", False),
    ],
)
def test_thinking_comes_before_the_answer(tmp_path, prompt, text, expected):
    tokenizer = thinking_tokenizer(tmp_path)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    schema = Grammar.json_schema({"type": "array", "items": {"const": 1}, "minItems": 1})
    assert accepts(grammars, schema, prompt, text) is expected
    assert accepts(grammars, Grammar.regex(r"\[1\]"), prompt, text) is expected
    assert accepts(grammars, Grammar.choice(["[1]", "[2]"]), prompt, text) is expected
    assert accepts(grammars, Grammar.lark('start: "[" "1" "]"'), prompt, text) is expected


def test_an_answer_can_t_end_while_it_thinks(tmp_path):
    tokenizer = thinking_tokenizer(tmp_path)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    ids = tokenizer.encode("ask <think>\n")
    matcher = grammars.matcher(Grammar.regex("a"), ids)
    for _ in range(3):
        assert not set(allowed(matcher)) & tokenizer.special_ids
        ids += tokenizer.encode("hm")
        matcher.follow(ids)


def test_other_models_do_not_think(byte_level):
    grammars = Grammars(byte_level, byte_level.vocab_size)
    assert not accepts(grammars, Grammar.regex("a"), "ask", "<think>so</think>a")
    assert accepts(grammars, Grammar.regex("a"), "ask <think>", "so</think>a")


def test_a_grammar_whose_limits_were_used_up_is_compiled_afresh(byte_level, monkeypatch):
    """One answer in many states must not spoil those of later requests."""
    from llguidance import LLParserLimits

    monkeypatch.setattr(
        matcher_module, "LIMITS", LLParserLimits(max_lexer_states=300, verbose_errors=False)
    )
    grammars, grammar = Grammars(byte_level, byte_level.vocab_size), Grammar.regex(r"[a-z]{1,1000}")
    ids = [5]
    matcher = grammars.matcher(grammar, ids)
    while matcher.failure is None:
        ids += byte_level.encode("a")
        matcher.follow(ids)
        matcher.inner.compute_bitmask()
        assert len(ids) < 1000
    assert "too large" in str(matcher.failure)
    fresh = grammars.matcher(grammar, [5])
    assert set(allowed(fresh)) & set(byte_level.encode("a"))
    assert fresh.failure is None
