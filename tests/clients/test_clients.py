"""What people use to talk to such servers, beside the clients that `make test` has.

Each script here is run in the clients' own environment, which `make test-clients` sets up, and
prints as JSON what it was told.
"""

import json
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest

import mlxserve
from tests.clients.asking import BIG, CHAT, SCHEMA
from tests.support.serving import TIMEOUT_S, serving

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv" / "clients" / "bin" / "python"
SET_UP = "`make test-clients` installs it"
KEY = "a-secret-key"
# What the clients themselves say of a status, and of the parameter at fault.
OPENAI_ERRORS = {
    "bad value": ("BadRequestError", 400, "top_p is 7.0", "top_p", None),
    "wrong type": ("BadRequestError", 400, "it must be a whole number", "seed", None),
    "wrong key": ("AuthenticationError", 401, "key isn't known", None, "invalid_api_key"),
    "no such model": ("NotFoundError", 404, "served here; this is", "model", "model_not_found"),
    "no such path": ("NotFoundError", 404, "/v1/embeddings is nothing here", None, None),
    "too big": (None, 413, "larger than 50000 bytes", None, None),
    "too long": ("BadRequestError", 400, "can take", "messages", "context_length_exceeded"),
    "too many": ("RateLimitError", 429, "over 1 requests", None, "rate_limit_exceeded"),
    "streamed": ("BadRequestError", 400, "top_p is 7.0", "top_p", None),
}
LITELLM_ERRORS = {
    "bad value": ("BadRequestError", "top_p is 7.0"),
    "too long": ("ContextWindowExceededError", "model can take 2047"),
    "wrong key": ("AuthenticationError", "key isn't known"),
    "no such model": ("NotFoundError", "served here; this is"),
    "too big": ("BadRequestError", "larger than 50000 bytes"),
    "too many": ("RateLimitError", "over 1 requests"),
}
LLM_ERRORS = {
    "bad value": "max_tokens is 0",
    "wrong key": "key isn't known",
    "no such model": "served here; this is",
    "too big": "larger than 50000 bytes",
}


@pytest.fixture(scope="module")
def llm(tiny_model_dir):
    with mlxserve.load(tiny_model_dir) as model:
        yield model


@pytest.fixture(scope="module")
def expected(llm):
    """The answer that all of them must be told, by the Python API."""
    return llm.generate(CHAT, max_tokens=24)


@pytest.fixture
def run(llm):
    """Run a client's script against a server, and one that takes one request a minute."""

    def run(*command):
        with (
            serving(llm, api_keys=(KEY,), max_body_bytes=len(BIG) // 2) as server,
            serving(llm, api_keys=(KEY,), requests_per_minute=1) as limited,
        ):
            done = subprocess.run(
                [*command, server.url, KEY, limited.url],
                capture_output=True,
                text=True,
                timeout=5 * TIMEOUT_S,
                check=False,
            )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def python():
    if not PYTHON.exists():
        pytest.skip(f"the Python clients are not here; {SET_UP}")
    return PYTHON


@pytest.fixture
def node():
    if (found := shutil.which("node")) is None:
        pytest.skip("node is not here; the npm client runs in it")
    if not (HERE / "node_modules" / "openai").exists():
        pytest.skip(f"the npm client is not here; {SET_UP}")
    return found


def check_answers(told, expected):
    for how in ("whole", "streamed"):
        assert told[how] == {
            "text": expected.text,
            "finish_reason": expected.finish_reason,
            "completion_tokens": len(expected.token_ids),
        }
    for how in ("tool", "streamed tool"):
        assert (told[how]["finish_reason"], told[how]["name"]) == ("tool_calls", "clock")
        jsonschema.validate(json.loads(told[how]["arguments"]), SCHEMA)


def check_beyond(llm, told):
    """What OpenAI's dialect has beside answers and tools."""
    jsonschema.validate(json.loads(told["form"]), SCHEMA)
    likely = llm.generate(CHAT, max_tokens=5, top_logprobs=2).logprobs
    assert [one["logprob"] for one in told["logprobs"]] == pytest.approx(
        [one.logprob for one in likely]
    )
    for one, found in zip(told["logprobs"], likely, strict=True):
        assert one["top"] == pytest.approx([logprob for _, logprob in found.top])
    several = llm.generate(CHAT, max_tokens=24, n=3, temperature=1.0, seed=5)
    assert told["several"] == [one.text for one in several]


def check_openai_errors(told, too_big):
    assert set(told) == set(OPENAI_ERRORS)
    for name, (kind, status, words, param, code) in OPENAI_ERRORS.items():
        error = told[name]
        assert (error["class"], error["status"]) == (kind or too_big, status), name
        assert words in error["message"]
        assert (error["param"], error["code"]) == (param, code), name


def test_openai_for_python_of_the_second_version(llm, run, python, expected):
    told = run(python, HERE / "openai_python.py")
    assert told["version"].startswith("2.")
    check_answers(told, expected)
    check_beyond(llm, told)
    check_openai_errors(told["errors"], "APIStatusError")


def test_openai_for_node(llm, run, node, expected):
    told = run(node, HERE / "openai_node.mjs")
    check_answers(told, expected)
    check_beyond(llm, told)
    check_openai_errors(told["errors"], "APIError")


def test_litellm_in_both_dialects(llm, run, python, expected):
    told = run(python, HERE / "litellm_both.py")
    check_beyond(llm, told)
    for dialect in ("openai", "anthropic"):
        check_answers(told[dialect], expected)
        errors = told[dialect]["errors"]
        assert set(errors) == set(LITELLM_ERRORS)
        for name, (kind, words) in LITELLM_ERRORS.items():
            assert errors[name]["class"] == kind, (dialect, name)
            assert words in errors[name]["message"]


def test_the_llm_command(run, python, expected):
    told = run(python, HERE / "llm_command.py")
    for how in ("whole", "streamed"):
        assert told[how] == [expected.text + "\n", ""]
    assert told["with tools"][0] not in ("", told["whole"][0])  # it was told of them
    jsonschema.validate(json.loads(told["form"][0]), SCHEMA)
    assert set(told["errors"]) == set(LLM_ERRORS)
    for name, words in LLM_ERRORS.items():
        out, complaint = told["errors"][name]
        assert out == ""
        assert words in complaint
