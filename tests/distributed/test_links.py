"""Links between ranks that are cut, or over which nothing passes any more, at any moment."""

import json
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from tests.distributed.asking import CLIENTS, complete, environment, ranks_of, serving
from tests.support.links import CONTROL, CUT, FREEZE, RING, START, TOLD
from tests.support.model_dir import write_model_dir
from tests.support.processes import ENDLESS, TIMEOUT_S
from tests.support.serving import wait_until

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="only on Linux, for /proc"),
]

BUSY_S = 1.5  # within which something happens to clients that have begun
SHORT = {"prompt": "x", "max_tokens": 2}
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def env(tmp_path):
    return environment(tmp_path, timeout_s=5)


def program(link: str, fault: str, when: str) -> list[str]:
    return [sys.executable, "-m", "tests.support.links", link, fault, when]


def fails(url: str, client: int) -> None:
    """Ask for more than there is time for: refused, or ended with words, and to be tried again."""
    asked = ENDLESS | {"prompt": "ab" * (client + 1), "stream": client % 2 == 0}
    try:
        answer = complete(url, asked)
    except httpx.RemoteProtocolError:
        return  # rank 0 has four seconds for its last words, which a busy machine may not give it
    error: dict[str, Any]
    if answer.status_code == 200:
        assert asked["stream"]
        last = [line for line in answer.text.splitlines() if line.startswith("data: ")][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert answer.status_code == 503
        assert int(answer.headers["Retry-After"]) > 0
        error = answer.json()["error"]
    assert error["type"] == "server_error"


def answers(url: str) -> bool:
    return complete(url, SHORT).status_code == 200


@pytest.mark.parametrize(("link", "fault", "idle"), [
    (RING, FREEZE, False),
    (CONTROL, CUT, False),
    pytest.param(RING, CUT, False, marks=slow),
    pytest.param(CONTROL, FREEZE, False, marks=slow),
    pytest.param(RING, CUT, True, marks=slow),
    pytest.param(RING, FREEZE, True, marks=slow),
    pytest.param(CONTROL, CUT, True, marks=slow),
    pytest.param(CONTROL, FREEZE, True, marks=slow),
])  # fmt: skip
def test_all_ranks_end_with_a_name_and_new_ones_begin(model, env, link, fault, idle):
    """Requests are told to come again. What is wrong with idle ranks' tensors shows at the next."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    how = program(link, fault, TOLD)
    with (
        serving(model, ranks=2, env=env, program=how) as server,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        assert server.url is not None
        processes = ranks_of(server.process)
        asking = [] if idle else [pool.submit(fails, server.url, i) for i in range(CLIENTS)]
        time.sleep(random.Random(seed).uniform(0, BUSY_S))
        server.signal(signal.SIGUSR1)
        if idle and link == RING:
            asking = [pool.submit(fails, server.url, 0)]
        gone = [path.exists for path in processes.values()]
        wait_until(lambda: not any(there() for there in gone), "all have ended", TIMEOUT_S)
        for answer in asking:
            answer.result(TIMEOUT_S)
        begun = partial(answers, server.url)
        wait_until(begun, "new ones have begun", TIMEOUT_S)
        server.signal(signal.SIGTERM)
        assert server.end() == 0
    assert [line for line in server.lines if line.startswith("rank 1 (")], server.lines
    assert [line for line in server.lines if line.startswith("[rank 1] rank 0 ")], server.lines


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "words"), [
    (FREEZE, "can't be reached over ring: a step isn't over after"),
    (CUT, "[rank 1] error: the ranks can't reach each other over ring"),
])  # fmt: skip
def test_tensors_that_never_pass_end_the_start(model, tmp_path, fault, words):
    """MLX takes 31 seconds to see that nobody listens."""
    command = [*program(RING, fault, START), "launch", "-n", "2", "--", "serve", str(model)]
    done = subprocess.run(
        [*command, "--port", "0"],
        env=environment(tmp_path, timeout_s=10),
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
    )
    assert done.returncode != 0
    assert words in done.stderr
