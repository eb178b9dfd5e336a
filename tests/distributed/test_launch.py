"""`mlxserve launch`: a model over several processes, asked over HTTP by eight at once."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from tests.distributed.asking import PROGRAM, at_once, complete, environment, ranks_of, serving
from tests.support.model_dir import write_model_dir
from tests.support.processes import TIMEOUT_S
from tests.support.serving import wait_until
from tests.support.tiny import tiny_gemma3, tiny_llama, tiny_qwen3

pytestmark = pytest.mark.full

LAUNCH = [*PROGRAM, "launch", "-n"]
SIZES = {"vocab_size": 260, "max_position_embeddings": 2048, "eos_token_id": 256}
MODELS = {"llama": tiny_llama, "qwen3": tiny_qwen3, "gemma3": tiny_gemma3}
CLOSE = 1e-4  # of log-probabilities


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    return environment(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Their directories, by name."""
    made = {}
    for name, tiny in MODELS.items():
        path = tmp_path_factory.mktemp(name)
        made[name] = write_model_dir(path, tiny(**SIZES))
    return made


def body(client):
    """What a client asks: prompts of unequal lengths, three of which begin alike."""
    text = ("All begins so. " * 9 if client < 3 else "") + "abcdefgh"[client] * (7 * client + 1)
    asked = {"prompt": text, "max_tokens": 12 + client, "logprobs": 1, "ignore_eos": True}
    drawn = {"temperature": 0.8, "seed": 5} if client == 4 else {"temperature": 0}
    return asked | drawn


def ask(url, client):
    answer = complete(url, body(client))
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def ask_all(url):
    return at_once(lambda client: ask(url, client))


def check(model, env, close, stages=1):
    """Two ranks against one process; and each client alone as in the batch, to the last bit."""
    with serving(model, ranks=0, env=env) as alone:
        expected = ask_all(alone.url)
    with serving(model, ranks=2, stages=stages, env=env) as server:
        got = ask_all(server.url)
        for (text, logprobs), (right, theirs) in zip(got, expected, strict=True):
            assert text == right
            assert logprobs == pytest.approx(theirs, abs=close)
        for client in (2, 7):  # their prompts are in the cache by now
            assert ask(server.url, client) == got[client]
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        assert not [line for line in server.lines if "is lost" in line]


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_one_process(models, env, name):
    check(models[name], env, CLOSE)


@pytest.mark.real
@pytest.mark.parametrize(("weights", "stages"), [
    ("smollm2_gguf", 1),
    ("smollm2_gguf", 2),
    pytest.param("gemma3_gguf", 1, marks=pytest.mark.slow),
    pytest.param("gemma3_gguf", 2, marks=pytest.mark.slow),
])  # fmt: skip
def test_real_weights(env, weights, stages, request):
    """Quantised ones: activations are rounded to 16 bits, here and there to another number."""
    check(request.getfixturevalue(weights), env, 2e-2, stages=stages)


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux, for /proc")
@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux, for /proc")
@pytest.mark.parametrize("stages", [1, 2])
def test_when_the_launcher_is_killed_its_ranks_end(models, env, stages):
    """They would compute for nobody, and spin."""
    with serving(models["llama"], ranks=2, stages=stages, env=env) as server:
        processes = ranks_of(server.process)
        assert set(processes) == {0, 1}
        server.signal(signal.SIGKILL)
        wait_until(lambda: not any(path.exists() for path in processes.values()), "all have ended")


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux, for /proc")
@pytest.mark.parametrize(("number", "rank", "idle", "within_s", "stages"), [
    (signal.SIGKILL, 1, False, 10, 1),
    (signal.SIGKILL, 1, True, 10, 1),
    (signal.SIGKILL, 0, False, 10, 1),
    (signal.SIGKILL, 1, False, 10, 2),
    pytest.param(signal.SIGSTOP, 1, False, 24, 1, marks=pytest.mark.slow),
    pytest.param(signal.SIGSTOP, 1, False, 24, 2, marks=pytest.mark.slow),
], ids=["killed", "killed while idle", "rank 0 killed", "a stage killed", "stopped",
        "a stage stopped"])  # fmt: skip
def test_when_one_rank_is_gone_all_end_and_new_ones_begin(
    models, env, number, rank, idle, within_s, stages
):
    """Within five seconds, or eight more where one is silent, and twice that on a busy machine.
    Requests are told when to try again meanwhile, and the address is never given up."""
    with serving(models["llama"], ranks=2, stages=stages, env=env) as server:
        processes = ranks_of(server.process)
        assert set(processes) == {0, 1}
        with contextlib.ExitStack() as stack:
            if not idle:
                answer = stack.enter_context(server.stream(max_tokens=1900))
                lines = answer.iter_lines()
                next(lines)
            begin_s = time.monotonic()
            os.kill(int(processes[rank].name), number)
            wait_until(
                lambda: not any(path.exists() for path in processes.values()), "all have ended"
            )
            assert time.monotonic() - begin_s < within_s
            if not idle:
                with contextlib.suppress(httpx.TransportError):
                    list(lines)
        named = f"rank {rank} " if rank else "rank 0 is lost"
        assert any(named in line for line in server.lines), server.lines
        refused = 0
        while (answer := complete(server.url, body(0))).status_code != 200:
            assert answer.status_code == 503
            assert int(answer.headers["Retry-After"]) > 0
            refused += 1
        assert refused
        assert ranks_of(server.process).keys() == {0, 1}
        server.signal(signal.SIGTERM)
        assert server.end() == 0


def test_what_is_wrong_with_the_command_ends_it_at_once(models, env):
    """Nothing would be better the next time."""
    command = [*LAUNCH, "2", "--", "serve", str(models["llama"]), "--port", "0", "--kv-bits", "7"]
    done = subprocess.run(command, env=env, capture_output=True, timeout=TIMEOUT_S)
    assert done.returncode == 2
    assert "kv_bits is '7'" in done.stderr.decode()


def test_a_model_that_is_not_there_ends_all_ranks(env, tmp_path):
    command = [*LAUNCH, "2", "--", "generate", "--model", str(tmp_path / "none"), "-p", "x"]
    done = subprocess.run(command, env=env, capture_output=True, timeout=TIMEOUT_S)
    assert done.returncode == 2
    assert "none" in done.stderr.decode()
