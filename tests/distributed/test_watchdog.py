"""Steps and meetings that never end are noticed, and long ones that are over in time aren't."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from mlxserve.distributed.addresses import LOOPBACK, free_ports
from mlxserve.distributed.watchdog import FIRST_TOKEN_S, PATIENCE, SLACK, Watchdog

WAIT_S = 30


@pytest.fixture
def stuck():
    """A watchdog whose ranks may be silent for 0.3 s, and what it says."""
    said, heard = [], threading.Event()

    def on_stuck(what: str) -> None:
        said.append(what)
        heard.set()

    watchdog = Watchdog(0.3, on_stuck)
    watchdog.begin(1)
    watchdog.end()  # a token takes next to nothing, so a step may take 0.9 s
    yield watchdog, said, heard
    watchdog.close()


def test_a_step_that_never_ends_is_noticed_once(stuck):
    watchdog, said, heard = stuck
    watchdog.begin(1)
    watchdog.begin(1)  # built ahead
    assert heard.wait(WAIT_S)
    time.sleep(0.5)
    assert len(said) == 1
    assert said[0].startswith("a step isn't over after")


def test_time_with_no_step_under_way_does_not_count(stuck):
    watchdog, said, _ = stuck
    time.sleep(1.2)
    watchdog.begin(1)
    watchdog.end()
    time.sleep(1.2)
    assert said == []


def test_a_closed_one_says_nothing(stuck):
    watchdog, said, _ = stuck
    watchdog.begin(1)
    watchdog.close()
    time.sleep(1.2)
    assert said == []


def test_what_is_allowed_grows_with_tokens_and_with_what_they_took():
    watchdog = Watchdog(10, lambda what: None)
    assert watchdog.allowed_s(128) == PATIENCE * 10 + SLACK * 128 * FIRST_TOKEN_S
    watchdog.begin(2)
    time.sleep(0.2)
    watchdog.end()
    watchdog.close()
    assert watchdog.allowed_s(128) >= PATIENCE * 10 + SLACK * 128 * 0.1
    assert watchdog.allowed_s(1) < watchdog.allowed_s(128)


def test_steps_under_way_are_allowed_for_together():
    """In a pipeline the oldest is read once younger ones have passed rank 0."""
    stuck = threading.Event()
    watchdog = Watchdog(0.05, lambda what: stuck.set())
    watchdog._token_s = 0.02
    watchdog.begin(1)
    watchdog.begin(1000)
    assert not stuck.wait(1.0)  # one token alone may take 0.35 s
    watchdog.end()
    watchdog.end()
    watchdog.begin(1)
    assert stuck.wait(WAIT_S)
    watchdog.close()


def test_a_rank_that_never_comes_to_the_ring_ends_the_others(tmp_path):
    """MLX waits for it with Python's lock held, so that no thread of ours could."""
    hosts = tmp_path / "hosts.json"
    ports = free_ports([LOOPBACK] * 2)
    hosts.write_text(json.dumps([[f"{LOOPBACK}:{port}"] for port in ports]))
    code = "from mlxserve.distributed import group; group.MEET_S = 1; group.Ranks('ring')"
    env = os.environ | {"MLX_RANK": "0", "MLX_HOSTFILE": str(hosts)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=2 * WAIT_S
    )
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "group.py" in done.stderr
