"""What the program says about itself, and that saying it needs no MLX."""

import shlex
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version

import pytest

from mlxserve.types import SamplingParams

IN_PYTHON_ONLY = {"logprobs", "top_logprobs", "n", "best_of", "grammar"}
HEAVY = (
    *("mlx", "numpy", "jinja2", "tokenizers", "torch", "transformers", "rich", "prompt_toolkit"),
    *("uvicorn", "starlette", "msgspec", "llguidance"),
)


def test_help_lists_the_commands(cli):
    done = cli("--help")
    assert done.code == 0
    assert done.stderr == ""
    commands = ("generate", "chat", "serve", "eval", "plan", "pull", "ls", "rm", "doctor", "cache")
    for command in commands:
        assert f"\n  {command} " in done.stdout
    assert "mlxserve generate --prompt" in done.stdout


def test_no_command_shows_the_help(here):
    done = here()
    assert done.code == 0
    assert "Commands:" in done.stdout + done.stderr


def test_version(cli):
    assert cli("--version") == (0, f"mlxserve {version('mlxserve')}\n", "")


def test_unknown_command_suggests_one(here):
    done = here("genrate")
    assert done.code == 2
    assert done.stdout == ""
    assert "'genrate'" in done.stderr
    assert "generate" in done.stderr


def test_generate_help_teaches(here):
    done = here("generate", "--help")
    assert done.code == 0
    names = {field.name for field in fields(SamplingParams)} - IN_PYTHON_ONLY
    for name in names | {"model", "prompt", "system", "raw", "quiet"}:
        assert (
            f"--{name.removesuffix('s') if name == 'stop_token_ids' else name}".replace("_", "-")
            in done.stdout
        )
    assert "[default: smollm2-135m]" in done.stdout
    assert "How the next token is chosen:" in done.stdout
    assert "When to stop:" in done.stdout
    assert "Examples:" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_chat_help_shows_examples(here):
    assert "mlxserve chat --system 'Answer in one sentence.'" in here("chat", "--help").stdout


@pytest.mark.parametrize("command", ["chat", "eval", "serve"])
def test_help_fits_the_screen(here, command):
    done = here(command, "--help")
    assert done.code == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "[default: smollm2-135m]" in " ".join(done.stdout.split())


def test_chat_takes_every_option_of_sampling(here):
    shown = here("chat", "--help").stdout
    for option in ("--temperature", "--seed", "--logit-bias", "--max-tokens", "--stop-token-id"):
        assert option in shown


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "eval", "cache build"])
def test_commands_that_load_a_model_take_every_option_of_its_cache(here, command):
    shown = here(*command.split(), "--help").stdout
    assert "Cache and memory:" in shown
    for option in ("kv-bits BITS", "max-kv-size N", "keep N", "max-batched-tokens N"):
        assert f"  --{option}" in shown
    for option in ("memory GIB", "trace FILE"):
        assert f"  --{option}" in shown
    assert "  --deterministic" in shown
    assert ("--prompt-cache" in shown) == (command in ("generate", "chat", "serve"))
    assert ("--no-prefix-cache" in shown) == (command in ("chat", "serve"))
    assert max(map(len, shown.splitlines())) <= 80


def test_plan_help_groups_its_numbers(here):
    shown = here("plan", "--help").stdout
    for heading in ("Cache and memory:", "Speed:", "Requests:", "Speculation:", "Cost:"):
        assert heading in shown
    assert "mlxserve plan OWNER/NAME --context 8192" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.full
@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["generate", "--help"],
        ["chat", "--help"],
        ["serve", "--help"],
        ["plan", "--help"],
        ["cache", "--help"],
    ],
)
def test_help_imports_nothing_heavy(cli, args):
    done = cli.python(f"""
import sys
sys.argv = ["mlxserve", *{args!r}]
from mlxserve.cli import main
try:
    main()
finally:
    loaded = sorted(name for name in {HEAVY!r} if name in sys.modules)
    print(loaded, file=sys.stderr)
""")
    assert done.code == 0
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", "-n", "abc", "-p", "x"], ["'abc' isn't a whole number", "mlxserve generate"]),
        (["generate"], ["missing option '--prompt'"]),
        (["nope"], ["no such command 'nope'", "`mlxserve --help` explains"]),
        (["pull"], ["missing argument 'MODEL'"]),
        (["cache"], ["missing command", "`mlxserve cache --help` explains"]),
        (["cache", "nope"], ["no such command 'nope'", "`mlxserve cache --help` explains"]),
        (["cache", "build", "--out", "c"], ["missing option '--prompt-file'"]),
        (["cache", "verify"], ["missing argument 'FILE'"]),
    ],
)
def test_a_command_line_that_makes_no_sense_gets_one_line(here, args, words):
    done = here(*args)
    assert done.code == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in words)


@pytest.mark.full
@pytest.mark.parametrize(("closed", "code"), [("<&-", 0), ("2>&-", 0), (">&-", 0)])
def test_closed_streams_are_no_error(closed, code):
    command = f"{shlex.quote(sys.executable)} -m mlxserve ls --paths {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert done.returncode == code
    assert "error" not in done.stderr
