"""`mlxserve serve` as a process: signals, ports, keys, and what it says."""

import contextlib
import json
import re
import signal
import socket
import sys

import httpx
import pytest

import mlxserve
from mlxserve.text.parsers import HARMONY, REASONING_FORMATS, TOOL_FORMATS
from tests.cli.conftest import MLXSERVE, TIMEOUT_S
from tests.support.processes import running
from tests.support.serving import wait_until

pytestmark = pytest.mark.full


@pytest.fixture
def serve(cli, tiny_model_dir):
    """Start `mlxserve serve` on the tiny model and a free port."""

    def start(*args: str):
        return running([MLXSERVE, "serve", str(tiny_model_dir), "--port", "0", *args], cli.env)

    return start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_right_after_the_ready_line_is_heard(serve, number):
    for _ in range(3):
        with serve() as server:
            server.signal(number)
            assert server.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("where", ["LLM.generate", "Formats.of", "Server.startup"])
def test_a_signal_on_the_way_to_the_ready_line_is_heard(cli, tiny_model_dir, where, number):
    """It comes while an answer warms the model up, while the app is made, or as uvicorn begins."""
    source = f"""
import os, sys
from mlxserve.cli import main
from mlxserve.llm import LLM
from mlxserve.server.formats import Formats
from mlxserve.server.run import Server
owner, name = {where.split(".")[0]}, {where.split(".")[1]!r}
whole = getattr(owner, name)
def early(*args, **kwargs):
    os.kill(os.getpid(), {int(number)})
    return whole(*args, **kwargs)
setattr(owner, name, early)
sys.argv = ["mlxserve", "serve", {str(tiny_model_dir)!r}, "--port", "0"]
main()
"""
    done = cli.python(source)
    assert (done.code, done.stdout, done.stderr) == (0, "", "")


def test_nobody_is_kept_waiting_while_the_model_loads(cli, tiny_model_dir):
    """Probes are refused, which they understand; and yet the port is taken from the start."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    source = f"""
import sys, urllib.request
from mlxserve.cli import main
from mlxserve.llm import LLM
from mlxserve.server import run
whole = LLM.__init__
def asked(*args, **kwargs):
    try:
        urllib.request.urlopen("http://127.0.0.1:{port}/ready", timeout=20)
    except urllib.error.URLError as error:
        print(type(error.reason).__name__)
    whole(*args, **kwargs)
LLM.__init__ = asked
class Server(run.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        self.should_exit = True
run.Server = Server
sys.argv = ["mlxserve", "serve", {str(tiny_model_dir)!r}, "--port", "{port}"]
main()
"""
    done = cli.python(source)
    assert (done.code, done.stdout) == (0, "ConnectionRefusedError\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_answers_are_finished_first(serve, number):
    with serve("--log-format", "json") as server, server.stream(max_tokens=1500) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        server.signal(number)
        wait_until(server.refuses, "new requests are refused")
        got = [line for line in lines if line.startswith("data: ")]
        assert got[-1] == "data: [DONE]"
        assert json.loads(got[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert server.end() == 0
        assert json.loads(server.lines[-1])["completion_tokens"] == 1500


def test_after_the_grace_answers_are_cut(serve):
    with serve("--grace", "0.3") as server, server.stream(n=8, temperature=1) as response:
        lines = response.iter_lines()
        next(lines)
        server.signal(signal.SIGTERM)
        *_, last = (line for line in lines if line.startswith("data: "))
        assert "shutting down" in json.loads(last[6:])["error"]["message"]
        assert server.end() == 0
        assert "Traceback" not in "\n".join(server.lines)
        assert "requests that are cut off: 1" in server.lines
        assert "task(s)" not in "\n".join(server.lines)


def test_after_the_grace_clients_that_dawdle_are_cut(serve):
    with serve("--grace", "0.3") as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
            )
            wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200, "it is up")
            server.signal(signal.SIGTERM)
            assert server.end() == 0
            assert sock.recv(100).startswith(b"HTTP/1.1 503 ")
        assert "Traceback" not in "\n".join(server.lines)


def test_a_second_ctrl_c_ends_it_at_once(serve):
    with serve() as server, server.stream(n=8, temperature=1) as response:
        lines = response.iter_lines()  # kept: with the iterator, the connection would be closed
        next(lines)
        server.signal(signal.SIGINT)
        wait_until(server.refuses, "it is on its way out")
        server.signal(signal.SIGINT)
        assert server.end() == 0
        assert "Traceback" not in "\n".join(server.lines)
        assert "finish_reason cancelled" in server.lines[-1]


def test_it_ends_with_its_engine(cli, tiny_model_dir):
    source = f"""
import sys
from mlxserve.cli import main
from mlxserve.engine.core import Core
from mlxserve.errors import InvariantError
whole = Core.advance
def broken(core):
    whole(core)
    if core.stats.completion_tokens > 30:
        raise InvariantError("a page too few")
Core.advance = broken
sys.argv = ["mlxserve", "serve", {str(tiny_model_dir)!r}, "--port", "0"]
main()
"""
    with running([sys.executable, "-c", source], cli.env) as server:
        with server.stream() as response:
            got = [line for line in response.iter_lines() if line.startswith("data: ")]
        assert (
            "the engine has stopped, and the server ends"
            in json.loads(got[-1][6:])["error"]["message"]
        )
        assert server.end() == 1
        assert server.lines[-1] == "the engine has stopped: a page too few; the server ends"


def test_it_ends_when_no_step_works_any_more(cli, tiny_model_dir):
    source = f"""
import sys
from mlxserve.cli import main
from mlxserve.engine.runner import Runner
whole, steps = Runner.build, []
def broken(*args):
    steps.append(1)
    if len(steps) > 30:
        raise SystemError("the device is gone")
    return whole(*args)
Runner.build = broken
sys.argv = ["mlxserve", "serve", {str(tiny_model_dir)!r}, "--port", "0"]
main()
"""
    with running([sys.executable, "-c", source], cli.env) as server:
        with server.stream() as response:
            got = [line for line in response.iter_lines() if line.startswith("data: ")]
        assert "the device is gone" in json.loads(got[-1][6:])["error"]["message"]
        assert server.end() == 1
        assert server.lines[-1] == "the engine has stopped: the device is gone; the server ends"


def test_a_port_in_use_is_said_before_the_model_is_loaded(here, tiny_model_dir):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = here("serve", "no-such-model-anywhere", "--port", str(port))
    assert done.code == 2
    reason = "Address already in use; choose another --port or --host"
    assert done.stderr == f"error: can't listen at 127.0.0.1:{port}: {reason}\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--port", "70000"], ["port is 70000"]),
        (["--port", "x"], ["'x' isn't a whole number"]),
        (["--host", "no..such..host"], ["can't listen at no..such..host"]),
        (["--api-key", "short"], ["API key of 5 characters", "at least 8"]),
        (["--api-key-file", "/no/such/file"], ["--api-key-file", "/no/such/file"]),
        (["--requests-per-minute", "0"], ["requests_per_minute is 0"]),
        (["--grace", "-1"], ["--grace is -1", "at most 86400"]),
        (["--grace", "nan"], ["--grace is nan"]),
        (["--max-body-mb", "0"], ["--max-body-mb is 0", "from 1 to 1024"]),
        (["--max-body-mb", "99999999999"], ["--max-body-mb is 99999999999"]),
        (["--tool-format", "xml"], ["no tool format 'xml'", "hermes"]),
        (["--reasoning-format", "loud"], ["no reasoning format 'loud'", "think"]),
        (["--max-connections", "0"], ["max_connections is 0"]),
        (["--max-queue", "0"], ["max_queue is 0"]),
        (["--temperature", "-1"], ["temperature is -1"]),
        (["--policy", "best"], ["policy", "fcfs"]),
        (["--log-format", "xml"], ["xml"]),
        (["--served-name", ""], ["--served-name is ''"]),
        (["--served-name", b"\xff"], ["--served-name isn't valid UTF-8"]),
        (["--prompt-cache", "x", "--no-prefix-cache"], ["--prompt-cache", "--no-prefix-cache"]),
    ],
)
def test_a_wrong_option_is_named_before_a_model_is_loaded(here, args, words):
    done = here("serve", "no-such-model-anywhere", *args)
    assert done.code == 2
    assert done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in words), done.stderr


def test_a_file_without_keys_opens_no_door(here, tmp_path):
    (tmp_path / "keys").write_text("\n  \n# a-comment-and-no-key\n")
    done = here("serve", "no-such-model-anywhere", "--api-key-file", str(tmp_path / "keys"))
    assert done.code == 2
    assert "has no key" in done.stderr


def test_keys_from_everywhere_and_in_no_output(serve, cli, tmp_path):
    lines = "# the keys of today\nfrom-the-file\n\n  also-from-the-file \n  # and the end"
    (tmp_path / "keys").write_text(lines)
    cli.env["MLXSERVE_API_KEYS"] = "from-the-env, other-from-env"
    keys = ("from-the-file", "also-from-the-file", "from-the-env", "other-from-env", "from-options")
    with serve("--api-key", "from-options", "--api-key-file", str(tmp_path / "keys")) as server:
        others = ("from-nowhere", "# the keys of today", "# and the end")
        for key, status in [*((key, 200) for key in keys), *((key, 401) for key in others)]:
            headers = {"Authorization": f"Bearer {key}"}
            got = httpx.get(f"{server.url}/v1/models", headers=headers, timeout=TIMEOUT_S)
            assert got.status_code == status
        server.signal(signal.SIGTERM)
        assert server.end() == 0
    text = "\n".join(server.lines)
    assert not any(key in text for key in keys)
    assert len(set(re.findall(r"tenant key-\w{8},", text))) == len(keys)


def test_options_reach_the_server(serve, tiny_model_dir, tmp_path):
    prompt, saved = "What was saved, and is over a page of tokens long. " * 3, tmp_path / "saved.st"
    with mlxserve.load(tiny_model_dir, max_batch=2) as llm:
        llm.save_cache(saved, prompt)
        expected = mlxserve.generate(llm, prompt + "?", max_tokens=4, ignore_eos=True).text
    args = [
        "--served-name",
        "mine",
        "--strict",
        "--temperature",
        "0",
        "--max-tokens",
        "4",
        "--max-body-mb",
        "1",
    ]
    args += ["--allowed-host", "my.example", "--cors-origin", "https://app.example"]
    args += ["--api-key", "one-of-two", "--api-key", "two-of-two", "--requests-per-minute", "3"]
    args += ["--prompt-cache", str(saved)]
    with serve(*args) as server:
        ask = {"model": "mine", "prompt": prompt + "?", "ignore_eos": True}
        for key in ("one-of-two", "two-of-two"):
            headers = {"Authorization": f"Bearer {key}", "Host": "my.example"}
            with httpx.Client(
                base_url=server.url or "", headers=headers, timeout=TIMEOUT_S
            ) as http:
                got = http.post("/v1/completions", json=ask).json()
                assert got["choices"][0]["text"] == expected
                assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt)
                assert http.post("/v1/completions", json={**ask, "odd": 1}).status_code == 400
                big = http.post("/v1/completions", content=b"x" * 1_100_000)
                assert big.status_code == 413
                assert http.post("/v1/completions", json=ask).status_code == 429
                page = http.get("/v1/models", headers={"Origin": "https://app.example"})
                assert page.headers["access-control-allow-origin"] == "https://app.example"


def test_a_server_without_keys_for_other_machines_says_so(serve):
    with serve("--host", "0.0.0.0") as server:
        assert server.lines[1].startswith("other machines may ask without a key")


def test_the_first_line_says_what_was_found(serve):
    with serve("--memory", "3") as server:
        assert re.fullmatch(
            r"context 2,048 tokens; memory [\d.]+ MB, at most 3.2 GB; tool calls: hermes; "
            r"reasoning: none",
            server.lines[0],
        )


def test_quiet_says_nothing(cli, tiny_model_dir):
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    with cli.start("serve", str(tiny_model_dir), "--port", str(port), "--quiet") as process:
        url = f"http://127.0.0.1:{port}"

        def up() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{url}/ready", timeout=TIMEOUT_S).status_code == 200
            return False

        wait_until(up, "it is up")
        httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=TIMEOUT_S)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=TIMEOUT_S) == (b"", b"")
        assert process.returncode == 0


def test_help_groups_its_options_and_shows_how_to_ask(here):
    shown = here("serve", "--help").stdout
    for heading in ("Network:", "Who may ask, and how much:", "Scheduling:", "Cache and memory:"):
        assert heading in shown
    assert "curl localhost:8080/v1/chat/completions" in shown
    for option, formats in (("tool", TOOL_FORMATS), ("reasoning", REASONING_FORMATS)):
        text = " ".join(
            shown.partition(f"--{option}-format NAME")[2].partition("[default")[0].split()
        )
        assert set(re.findall(r"\w+", text.partition(": ")[2])) - {"or"} == {*formats, HARMONY}
