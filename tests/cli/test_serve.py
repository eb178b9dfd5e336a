"""`mlxserve serve` as a process: signals, ports, keys, and what it says."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx
import pytest

import mlxserve
from tests.cli.conftest import MLXSERVE, TIMEOUT_S
from tests.support.serving import wait_until

pytestmark = pytest.mark.full

ENDLESS = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}


class Process:
    """A server that was started; `lines` of its stderr come in as they are written."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        wait_until(lambda: self.url is not None or process.poll() is not None, "it listens")
        assert self.url is not None, self.lines

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.decode().rstrip("\n"))

    @property
    def url(self) -> str | None:
        found = [re.search(r" at (http://\S+)/v1;", line) for line in self.lines]
        return next((one[1] for one in found if one), None)

    def stream(self, **body) -> contextlib.AbstractContextManager[httpx.Response]:
        ask = {**ENDLESS, **body}
        return httpx.stream("POST", f"{self.url}/v1/completions", json=ask, timeout=TIMEOUT_S)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for its end; its exit code."""
        code = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return code

    def refuses(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=TIMEOUT_S).status_code == 503
        except httpx.TransportError:
            return True


@contextlib.contextmanager
def running(cli, command: list[str]) -> Iterator[Process]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=cli.env,
    )
    try:
        yield Process(process)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def serve(cli, tiny_model_dir):
    """Start `mlxserve serve` on the tiny model and a free port."""

    def start(*args: str):
        return running(cli, [MLXSERVE, "serve", str(tiny_model_dir), "--port", "0", *args])

    return start


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
    with running(cli, [sys.executable, "-c", source]) as server:
        with server.stream() as response:
            got = [line for line in response.iter_lines() if line.startswith("data: ")]
        assert "a page too few" in json.loads(got[-1][6:])["error"]["message"]
        assert server.end() == 1
        assert server.lines[-1] == "the engine has stopped: a page too few; the server ends"


def test_a_port_in_use_is_said_before_the_model_is_loaded(here, tiny_model_dir):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = here("serve", "no-such-model-anywhere", "--port", str(port))
    assert done.code == 2
    assert done.stderr.startswith(f"error: can't listen at 127.0.0.1:{port}: ")
    assert done.stderr.count("\n") == 1
    assert "choose another --port" in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--port", "70000"], ["port is 70000"]),
        (["--port", "x"], ["'x' isn't a whole number"]),
        (["--host", "no..such..host"], ["can't listen at no..such..host"]),
        (["--api-key", "short"], ["API key of 5 characters", "at least 8"]),
        (["--api-key-file", "/no/such/file"], ["--api-key-file", "/no/such/file"]),
        (["--requests-per-minute", "0"], ["requests_per_minute is 0"]),
        (["--grace", "0"], ["grace_s is 0"]),
        (["--grace", "nan"], ["grace_s is nan"]),
        (["--max-body-mb", "0"], ["max_body_bytes is 0"]),
        (["--max-connections", "0"], ["max_connections is 0"]),
        (["--max-queue", "0"], ["max_queue is 0"]),
        (["--temperature", "-1"], ["temperature is -1"]),
        (["--policy", "best"], ["policy", "fcfs"]),
        (["--log-format", "xml"], ["xml"]),
        (["--served-name", ""], ["names is"]),
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
    (tmp_path / "keys").write_text("\n  \n")
    done = here("serve", "no-such-model-anywhere", "--api-key-file", str(tmp_path / "keys"))
    assert done.code == 2
    assert "has no key" in done.stderr


def test_keys_from_everywhere_and_in_no_output(serve, cli, tmp_path):
    (tmp_path / "keys").write_text("from-the-file\n\n  also-from-the-file \n")
    cli.env["MLXSERVE_API_KEYS"] = "from-the-env, other-from-env"
    keys = ("from-the-file", "also-from-the-file", "from-the-env", "other-from-env", "from-options")
    with serve("--api-key", "from-options", "--api-key-file", str(tmp_path / "keys")) as server:
        for key, status in [*((key, 200) for key in keys), ("from-nowhere", 401)]:
            headers = {"Authorization": f"Bearer {key}"}
            got = httpx.get(f"{server.url}/v1/models", headers=headers, timeout=TIMEOUT_S)
            assert got.status_code == status
        server.signal(signal.SIGTERM)
        assert server.end() == 0
    text = "\n".join(server.lines)
    assert not any(key in text for key in keys)
    assert "tenant key5" in text


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
        assert server.lines[0].startswith("other machines may ask without a key")


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
