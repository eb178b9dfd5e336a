"""Requests with grammars, through the whole engine, on models of random weights."""

import json
import queue
import re

import jsonschema
import numpy as np
import pytest

import mlxserve
from mlxserve import Grammar, RequestError
from mlxserve.config import EngineConfig
from mlxserve.engine.core import Core
from mlxserve.engine.engine import Engine
from mlxserve.models.load import load_model
from mlxserve.text.matcher import Grammars
from mlxserve.types import Request, SamplingParams
from tests.support.model_dir import END_ID, write_model_dir
from tests.support.tiny import tiny_llama
from tests.text import training

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n", 'é"']}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "maximum": 99, "minimum": -99}, "y": {"const": None}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
WILD = {"temperature": 1.5, "max_tokens": 1500}
PADDED = 300  # the vocabulary of the model; its tokenizer has 260


@pytest.fixture(scope="module")
def tiny():
    return tiny_llama(vocab_size=PADDED, max_position_embeddings=2048, eos_token_id=END_ID)


@pytest.fixture(scope="module")
def llm(tiny, tmp_path_factory):
    """Byte tokens, and a vocabulary that is padded beyond them."""
    with mlxserve.load(write_model_dir(tmp_path_factory.mktemp("model"), tiny)) as llm:
        yield llm


def model_of(kind, path):
    """A model with a trained tokenizer, which has tokens of many characters."""
    backend = training.KINDS[kind]()
    size = backend.get_vocab_size() + 21
    write_model_dir(path, tiny_llama(vocab_size=size, max_position_embeddings=2048, eos_token_id=2))
    training.save(backend, path, chat_template="{{ messages[0].content }}")
    return mlxserve.load(path)


def valid(answer, schema):
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text), schema)
    return True


@pytest.mark.full
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_plain"])
def test_every_answer_satisfies_its_schema(kind, tmp_path):
    grammar = Grammar.json_schema(PERSON)
    with model_of(kind, tmp_path) as llm:
        answers = mlxserve.generate(llm, "the boats", grammar=grammar, n=6, seed=1, **WILD)
        assert all(valid(answer, PERSON) for answer in answers)
        assert len({answer.text for answer in answers}) > 1
        chat = [{"role": "user", "content": "the boats"}]
        spaced = mlxserve.generate(llm, chat, grammar=Grammar.regex(" [a-z]{2}"), max_tokens=9)
        assert re.fullmatch(" [a-z]{2}", spaced.text)


def test_greedy_answers_and_streams_keep_to_it_too(llm):
    grammar = Grammar.json_schema(PERSON)
    answer = mlxserve.generate(llm, "Hello", grammar=grammar, max_tokens=1500)
    assert valid(answer, PERSON)
    assert answer.token_ids[-1] == END_ID
    pieces = list(mlxserve.stream(llm, "Hello", grammar=grammar, max_tokens=1500))
    assert "".join(piece.text for piece in pieces) == answer.text


@pytest.mark.parametrize("seed", range(4))
def test_regex_choice_lark_and_any_object(llm, seed):
    how = {"seed": seed, **WILD}
    found = mlxserve.generate(llm, "Hello", grammar=Grammar.regex(r"\d{3}-[a-f]+z"), **how)
    assert re.fullmatch("[0-9]{3}-[a-f]+z", found.text)
    choice = Grammar.choice(["yes", "no", "perhaps"])
    assert mlxserve.generate(llm, "Hello", grammar=choice, **how).text in choice.value
    lark = Grammar.lark('start: N ("+" N){1,3}\nN: /[0-9]{1,3}/')
    assert re.fullmatch(
        r"\d+(\+\d+){1,3}", mlxserve.generate(llm, "Hello", grammar=lark, **how).text
    )
    anything = mlxserve.generate(llm, "Hello", grammar=Grammar.json_object(), **how)
    assert anything.finish_reason == "length" or isinstance(json.loads(anything.text), dict)


def test_the_end_of_an_answer_disturbs_nothing(llm):
    """The step that was built before its end was known has no row left that needs a mask."""
    prompt = "Who is it that comes here at night? " * 6
    for cached in (False, True):
        answer = mlxserve.generate(llm, prompt, grammar=Grammar.regex("[a-z]{3}"))
        assert answer.finish_reason == "stop"
        assert (answer.usage.cached_tokens > 0) is cached


def test_tokens_that_only_pad_the_vocabulary_are_never_drawn(llm):
    loved = dict.fromkeys(range(260, PADDED), 1e6)
    answer = mlxserve.generate(llm, "Hello", grammar=Grammar.regex("[a-z]{5}"), logit_bias=loved)
    assert re.fullmatch("[a-z]{5}", answer.text)
    assert max(answer.token_ids) <= END_ID


def test_a_bias_and_filters_choose_among_what_is_allowed(llm):
    """Where all that is likely is forbidden, what is left is drawn as it stands."""
    hated = dict.fromkeys(range(256), -1e9)
    for how in ({}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1e-4, "top_p": 0.1}):
        answer = mlxserve.generate(
            llm, "Hello", grammar=Grammar.regex("[xy]{5}"), logit_bias=hated, seed=1, **how
        )
        assert re.fullmatch("[xy]{5}", answer.text)


def test_an_answer_cut_off_by_max_tokens_says_so(llm):
    answer = mlxserve.generate(llm, "Hello", grammar=Grammar.regex("[a-z]{50}"), max_tokens=7)
    assert answer.finish_reason == "length"
    assert re.fullmatch("[a-z]{7}", answer.text)


def test_a_stop_string_ends_it_before(llm):
    grammar = Grammar.regex("[a-z]{3};[a-z]{3};")
    answer = mlxserve.generate(llm, "Hello", grammar=grammar, stop=[";"])
    assert re.fullmatch("[a-z]{3}", answer.text)
    assert answer.finish_reason == "stop"


def test_logprobs_are_the_model_s_own(llm):
    """Those of a reading of the same text, which knows of no grammar."""
    ids = llm.tokenizer.encode("Hello")
    answer = mlxserve.generate(llm, ids, grammar=Grammar.regex("[q-z]{8}"), top_logprobs=3)
    read = llm.prompt_logprobs([*ids, *answer.token_ids], 3)[len(ids) :]
    assert [found.token_id for found in answer.logprobs] == list(answer.token_ids)
    for got, expected in zip(answer.logprobs, read, strict=True):
        assert got.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert [token for token, _ in got.top] == [token for token, _ in expected.top]


def rows():
    """Requests of all kinds: id -> (prompt, parameters)."""
    drawn = {"temperature": 1.2, "max_tokens": 60}
    return {
        "plain": ("One", {"max_tokens": 60}),
        "drawn": ("Two", {"seed": 5, **drawn}),
        "told": ("Three", {"max_tokens": 60, "top_logprobs": 2, "repetition_penalty": 1.2}),
        "person": ("Four", {"grammar": Grammar.json_schema(PERSON), "seed": 6, **drawn}),
        "greedy": ("Five", {"grammar": Grammar.json_schema(POINT), "max_tokens": 60}),
        "regex": (
            "Six",
            {"grammar": Grammar.regex("[a-m]{40,50}"), "seed": 7, "top_logprobs": 2, **drawn},
        ),
        "penalty": (
            "Seven",
            {"grammar": Grammar.regex("[a-m]{4,50}"), "frequency_penalty": 1.0, "max_tokens": 60},
        ),
        "choice": ("Eight", {"grammar": Grammar.choice(["ab", "abc"]), "seed": 8, **drawn}),
    }


def asked(llm, name):
    text, params = rows()[name]
    sampling = SamplingParams(**params)
    stop_ids = frozenset([END_ID])
    return Request(
        id=name, prompt_ids=tuple(llm.tokenizer.encode(text)), params=sampling, stop_ids=stop_ids
    )


def run(llm, names):
    """Tokens and logprobs by request, all submitted together."""
    requests, out = [asked(llm, name) for name in names], queue.SimpleQueue()
    got, left = {name: [] for name in names}, len(names)
    llm._engine.submit(requests, out)
    while left:
        delivery = out.get(timeout=120)
        assert delivery.error is None
        if delivery.token_id is not None:
            got[delivery.request_id].append((delivery.token_id, delivery.logprob))
        left -= delivery.last
    return got


def test_a_row_has_the_same_tokens_alone_and_in_any_batch(llm):
    names = list(rows())
    alone = {name: run(llm, [name])[name] for name in names}
    assert run(llm, names) == alone
    free = [name for name in names if "grammar" not in rows()[name][1]]
    assert run(llm, free) == {name: alone[name] for name in free}
    rng = np.random.default_rng(0)
    for _ in range(4):
        some = rng.permutation(names)[: rng.integers(2, len(names))].tolist()
        assert run(llm, some) == {name: alone[name] for name in some}


def drive(core, grammars, requests, until=lambda: False):
    """Run a core by hand; its deliveries by request."""
    out, got = queue.SimpleQueue(), {request.id: [] for request in requests}
    matchers = {
        request.id: grammars.matcher(request.params.grammar, request.prompt_ids)
        for request in requests
        if request.params.grammar is not None
    }
    core.admit(requests, out, 0.0, matchers)
    while core.busy and not until():
        core.advance()
        core.check_integrity()
        while not out.empty():
            delivery = out.get()
            got[delivery.request_id].append(delivery)
    return got


def token_ids(deliveries):
    return [delivery.token_id for delivery in deliveries if delivery.token_id is not None]


def test_a_preempted_answer_goes_on_in_its_grammar(tiny, llm):
    """A cache too small for all: some start over, and no token changes."""
    grammars = Grammars(llm.tokenizer, PADDED)
    grammar = Grammar.regex("([a-f]{3}[0-9]){40}")
    requests = [
        Request(
            id=f"r{i}",
            prompt_ids=tuple(range(i, i + 100)),
            params=SamplingParams(
                grammar=grammar if i % 2 else None, max_tokens=150, temperature=1.0, seed=i
            ),
            stop_ids=frozenset([END_ID]),
        )
        for i in range(4)
    ]
    runs = []
    for pages in (None, 8):
        model = load_model(tiny.config, dict(tiny.weights))
        core = Core(model, EngineConfig(max_batch=4), pool_pages=pages)
        runs.append({k: token_ids(v) for k, v in drive(core, grammars, requests).items()})
    assert core.stats.preemptions > 0
    assert runs[0] == runs[1]
    for name in ("r1", "r3"):
        assert re.fullmatch("([a-f]{3}[0-9]){37}[a-f]{2}", llm.tokenizer.decode(runs[1][name]))


def test_an_aborted_answer_ends_and_the_others_go_on(tiny, llm):
    grammars = Grammars(llm.tokenizer, PADDED)
    core = Core(load_model(tiny.config, dict(tiny.weights)), EngineConfig(max_batch=8))
    names = ["plain", "regex", "penalty"]
    got = drive(core, grammars, [asked(llm, name) for name in names], lambda: core.stats.steps > 4)
    core.abort(["regex"])
    out = core.open["plain"][1]
    while core.busy:
        core.advance()
    while not out.empty():
        delivery = out.get()
        got[delivery.request_id].append(delivery)
    assert got["regex"][-1].finish_reason == "cancelled"
    for name in ("plain", "penalty"):
        assert token_ids(got[name]) == [token for token, _ in run(llm, [name])[name]]


@pytest.mark.full
def test_an_answer_that_can_t_go_on_fails_alone(tmp_path):
    """The tokens have no way to spell what must come: it is an error, and others don't notice."""
    with model_of("unigram", tmp_path) as llm:
        ids, out = tuple(llm.tokenizer.encode("the boats")), queue.SimpleQueue()
        stuck = SamplingParams(grammar=Grammar.regex("the (𝄞|𝄢)"))
        others = {
            "plain": SamplingParams(max_tokens=30),
            "regex": SamplingParams(grammar=Grammar.regex("[a-e]{20}"), max_tokens=30),
        }
        ends = llm.tokenizer.eos_ids

        def together(params):
            requests = [
                Request(id=name, prompt_ids=ids, params=p, stop_ids=ends if p.grammar else set())
                for name, p in params.items()
            ]
            llm._engine.submit(requests, out)
            got, errors = {name: [] for name in params}, {}
            while any(name not in errors for name in params):
                delivery = out.get(timeout=60)
                got[delivery.request_id].append(delivery.token_id)
                if delivery.last:
                    errors[delivery.request_id] = delivery.error
            return got, errors

        expected, _ = together(others)
        got, errors = together({"stuck": stuck, **others})
        assert isinstance(errors.pop("stuck"), RequestError)
        assert errors == {"plain": None, "regex": None}
        assert {name: got[name] for name in others} == expected
        with pytest.raises(RequestError, match="no token of this model continues it"):
            mlxserve.generate(llm, "the", grammar=stuck.grammar)


def test_what_can_t_be_compiled_is_refused_before_anything_runs(llm):
    steps = llm.stats().steps
    bad = Grammar.json_schema({"type": "object", "not": {}})
    with pytest.raises(RequestError, match="not"):
        mlxserve.generate(llm, ["One", "Two"], grammar=bad)
    with pytest.raises(RequestError, match="not"):
        mlxserve.stream(llm, "One", grammar=bad)
    assert llm.stats().steps == steps


def test_an_engine_refuses_what_a_grammar_would_lack(tiny, llm):
    request = Request(id="r", prompt_ids=(1,), params=SamplingParams(grammar=Grammar.regex("a")))
    with pytest.raises(RequestError, match=f"stop_ids lacks {END_ID}"):
        llm._engine.check([request])
    bare = Engine(lambda: load_model(tiny.config, dict(tiny.weights)), EngineConfig())
    with pytest.raises(RequestError, match="no tokenizer"):
        bare.check([request])
    bare.close()


@pytest.mark.full
def test_many_threads_may_ask_at_once(llm):
    """The first to ask compiles; all get answers of their own."""
    from concurrent.futures import ThreadPoolExecutor

    def ask(seed):
        grammar = Grammar.json_schema(POINT if seed % 2 else PERSON)
        return mlxserve.generate(llm, "Hello", grammar=grammar, seed=seed, **WILD)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    for seed, answer in enumerate(answers):
        assert valid(answer, POINT if seed % 2 else PERSON)
        assert answer.token_ids == ask(seed).token_ids


@pytest.mark.real
def test_a_real_model_and_its_49_152_tokens(smollm2_gguf):
    """Hot enough that it would ramble."""
    chat = [{"role": "user", "content": "Describe a person as JSON."}]
    how = {"seed": 3, "temperature": 1.5, "max_tokens": 200}
    with mlxserve.load(smollm2_gguf) as llm:
        answers = mlxserve.generate(llm, chat, grammar=Grammar.json_schema(PERSON), n=4, **how)
        assert all(valid(answer, PERSON) for answer in answers)
        phone = mlxserve.generate(llm, chat, grammar=Grammar.regex(r"\+\d{2} \d{3} \d{4}"), **how)
        assert re.fullmatch(r"\+[0-9]{2} [0-9]{3} [0-9]{4}", phone.text)
        choice = mlxserve.generate(llm, chat, grammar=Grammar.choice(["x", "xy"]), **how)
        assert choice.text in ("x", "xy")
