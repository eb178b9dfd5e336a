"""One model over several machines, which are addresses of this one, by an ssh without a network."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import msgspec
import pytest

from mlxserve.distributed import check, hosts, ssh
from mlxserve.distributed.launch import Group
from mlxserve.distributed.remote import MARK, Inquiry, Orders, Report
from tests.support.model_dir import write_model_dir
from tests.support.processes import TIMEOUT_S, running
from tests.support.serving import wait_until
from tests.support.ssh import fake_ssh
from tests.support.tiny import tiny_llama

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8"),
]

PROGRAM = [sys.executable, "-m", "mlxserve"]
LAUNCH = [*PROGRAM, "launch", "--hosts", "127.0.0.1,127.0.0.2"]
SIZES = {"vocab_size": 260, "max_position_embeddings": 2048, "eos_token_id": 256}
REFUSED = "ssh: connect to host 127.0.0.2 port 22: Connection refused"
BODY = {"prompt": "All begins so. ", "max_tokens": 20, "temperature": 0, "ignore_eos": True}


def make_model(home, **changes):
    (home / "llama").mkdir()
    write_model_dir(home / "llama", tiny_llama(**SIZES | changes))


OLDER = """from importlib import metadata
found = metadata.version
metadata.version = lambda name: "0.0.9" if name == "mlxserve" else found(name)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Of a user, with a model in it."""
    path = tmp_path_factory.mktemp("home")
    make_model(path)
    return path


@pytest.fixture
def env(home, tmp_path):
    """Variables with an `ssh` on the PATH. `env(name={...})`: a host with special ones."""
    own = os.environ | {
        "HOME": str(home), "MLXSERVE_HOME": str(home / "kept"), "MLXSERVE_CPU_THREADS": "1",
        "MLXSERVE_PEER_TIMEOUT_S": "30", "MLXSERVE_DEBUG": "",
    }  # fmt: skip
    return lambda **special: fake_ssh(tmp_path, own, **special)


def complete(url):
    return httpx.post(f"{url}/v1/completions", json=BODY, timeout=TIMEOUT_S)


def text_of(url):
    answer = complete(url)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def launched(env, *args):
    done = subprocess.run([*LAUNCH, *args], env=env, capture_output=True, timeout=TIMEOUT_S)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def children(process):
    """Process ids of a launcher's children, by whether they are on the other machine."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == process.pid:
                remote = b"mlxserve.distributed.remote" in (entry / "cmdline").read_bytes()
                found["there" if remote else "here"] = int(entry.name)
    return found


def wait_for_end(pids):
    paths = [Path(f"/proc/{pid}") for pid in pids]
    wait_until(lambda: not any(path.exists() for path in paths), "all have ended")


def test_two_machines_serve_one_model_and_end_together(env, tmp_path):
    serve = ["serve", "~/llama", "--port", "0"]
    own = env()
    with running([*PROGRAM, *serve], own) as alone:
        expected = text_of(alone.url)
    with running([*LAUNCH, "--", *serve], own) as server:
        assert text_of(server.url) == expected
        assert children(server.process).keys() == {"here", "there"}
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        assert not [line for line in server.lines if "is lost" in line]
    said = (tmp_path / "log").read_text()
    assert "BatchMode=yes" in said
    assert "llama" not in said  # nothing of what is run is on a command line


@pytest.mark.parametrize("whose", ["launcher", "there", "here"])
def test_when_one_of_them_is_killed_all_end(env, whose):
    """After the launcher's end there is nobody; after another's, a new group begins."""
    with running([*LAUNCH, "--", "serve", "~/llama", "--port", "0"], env()) as server:
        pids = children(server.process)
        os.kill(server.process.pid if whose == "launcher" else pids[whose], signal.SIGKILL)
        if whose == "launcher":
            server.process.wait(TIMEOUT_S)
            wait_for_end(pids.values())
            return
        wait_for_end(pids.values())
        while (answer := complete(server.url)).status_code != 200:
            assert answer.status_code == 503
        server.signal(signal.SIGTERM)
        assert server.end() == 0


def test_a_host_that_is_away_for_a_while_is_waited_for(env):
    """The server has served, so it is worth it."""
    with running([*LAUNCH, "--", "serve", "~/llama", "--port", "0"], env()) as server:
        env(**{"127_0_0_2": {"says": REFUSED}})
        os.kill(children(server.process)["there"], signal.SIGKILL)
        wait_until(lambda: any(REFUSED in line for line in server.lines), "it is missed")
        assert complete(server.url).status_code == 503
        env()
        wait_until(lambda: complete(server.url).status_code == 200, "it serves again")
        server.signal(signal.SIGTERM)
        assert server.end() == 0


def test_generate(env):
    code, out, said = launched(env(), "--", "generate", "-m", "~/llama", "-p", "x", "-n", "5")
    assert (code, bool(out)) == (0, True), said


@pytest.mark.parametrize(("special", "message"), [
    ({"says": REFUSED}, f"{REFUSED}; turn sshd on there"),
    ({"says": "me@b: Permission denied (publickey)."}, "`ssh-copy-id 127.0.0.2`"),
    ({"says": "Host key verification failed."}, "run `ssh 127.0.0.2` once"),
    ({"says": "kex_exchange: odd"}, "kex_exchange: odd; see what `ssh 127.0.0.2"),
    ({"PYTHONHOME": "/none"}, "No module named 'encodings'"),
])  # fmt: skip
def test_a_host_that_cannot_be_reached_is_named_before_anything_starts(env, special, message):
    own = env(**{"127_0_0_2": special})
    code, out, said = launched(own, "--", "generate", "-m", "~/llama", "-p", "x")
    assert (code, out) == (2, "")
    assert "error: 127.0.0.2: " in said
    assert message in said


def test_no_python_there(env):
    code, _, said = launched(env(), "--python", "/none/python", "--", "generate", "-p", "x")
    assert code == 2
    assert "/none/python" in said
    assert "say with --python where it is" in said


def test_a_host_that_does_not_answer_is_given_some_time_only(env, monkeypatch):
    monkeypatch.setenv("PATH", env(**{"127_0_0_2": {"hangs": ""}})["PATH"])
    monkeypatch.setattr(ssh, "ANSWER_S", 1.0)
    begin_s = time.monotonic()
    with ssh.reached(hosts.named("127.0.0.1,127.0.0.2").hosts, sys.executable) as answers:
        ((_, fault),) = answers
    assert str(fault).startswith("127.0.0.2: no answer within 1 s; ")
    assert time.monotonic() - begin_s < TIMEOUT_S  # not as long as it hangs


@pytest.fixture
def older(tmp_path):
    """A host where another version is installed."""
    folder = tmp_path / "older"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(OLDER)
    return {"127_0_0_2": {"PYTHONPATH": str(folder)}}


def test_another_version_there_is_named(env, older):
    code, _, said = launched(env(**older), "--", "generate", "-m", "~/llama", "-p", "x")
    assert code == 2
    assert "error: 127.0.0.2: mlxserve is 0.0.9, and 0.1.0 here; make them the same" in said


def rows(out):
    """Of --check, by host and topic."""
    lines = [line for line in out.splitlines() if not line.lstrip().startswith("fix:")]
    cells = [line.replace(" - ", "-").split(None, 3) for line in lines]
    return {(where, topic): (state, text) for state, where, topic, text in cells}


def test_addresses_that_a_host_does_not_have(env, tmp_path):
    file = tmp_path / "hosts.json"
    entries = [{"ssh": "localhost"}, {"ssh": "127.0.0.2", "ips": ["203.0.113.1"]}]
    file.write_text(msgspec.json.encode(entries).decode())
    command = [*PROGRAM, "launch", "--hostfile", str(file), "--check"]
    done = subprocess.run(command, env=env(), capture_output=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    found = rows(done.stdout.decode())
    assert found["127.0.0.2", "host"] == ("wrong", "203.0.113.1 isn't an address of this machine")


def test_check_finds_nothing_wrong(env):
    code, out, said = launched(env(), "--check", "--", "serve", "--port", "1", "~/llama")
    found = rows(out)
    assert code == 0, out + said
    assert found["127.0.0.2", "ssh"] == ("ok", "answers")
    for host in ("127.0.0.1", "127.0.0.2"):
        assert found[host, "versions"][0] == found[host, "model"][0] == "ok"
    for where, topic in (("127.0.0.1-127.0.0.2", "tcp"), ("127.0.0.1-127.0.0.2", "ring"),
                         ("all", "sum")):  # fmt: skip
        latency, bandwidth = found[where, topic][1].split(", ", 1)
        assert float(latency.split()[0].replace(",", "")) > 0
        assert float(bandwidth.split()[0].replace(",", "")) > 0


@pytest.mark.parametrize("other", [False, True])
def test_check_compares_the_models_files(env, tmp_path, other):
    if other:
        make_model(tmp_path, num_hidden_layers=1)
    own = env(**{"127_0_0_2": {"HOME": str(tmp_path)}})
    code, out, _ = launched(own, "--check", "--", "generate", "-m", "~/llama", "-p", "x")
    found = rows(out)
    assert code == 1
    assert found["127.0.0.1", "model"] == ("ok", "~/llama")
    text = "~/llama has other weights" if other else "~/llama isn't on this host"
    assert found["127.0.0.2", "model"] == ("wrong", text)
    assert found["all", "sum"][0] == "ok"  # that doesn't keep the links from being measured


def test_check_says_all_that_is_wrong(env, older):
    command = [*PROGRAM, "launch", "--hosts", "127.0.0.1,127.0.0.2,me@127.0.0.3", "--check"]
    own = env(**older, **{"me@127_0_0_3": {"says": "Permission denied (publickey)."}})
    done = subprocess.run(command, env=own, capture_output=True, timeout=TIMEOUT_S)
    found = rows(done.stdout.decode())
    assert done.returncode == 1
    assert found["127.0.0.2", "versions"] == ("wrong", "mlxserve is 0.0.9, and 0.1.0 here")
    assert found["me@127.0.0.3", "ssh"] == ("wrong", "Permission denied (publickey).")
    assert "fix: let this machine in without a password: `ssh-copy-id me@127.0.0.3`" in (
        done.stdout.decode()
    )
    assert found["all", "links"] == ("note", "not measured")


def test_jaccl_is_tried_before_it_is_used(env, tmp_path, monkeypatch):
    """MLX has none here, as it might not come up between two Macs."""
    monkeypatch.setenv("PATH", env()["PATH"])
    file = tmp_path / "hosts.json"
    entries = [
        {"ssh": "localhost", "ips": ["127.0.0.1"], "rdma": [None, "rdma_en2"]},
        {"ssh": "127.0.0.2", "rdma": ["rdma_en2", None]},
    ]
    file.write_text(msgspec.json.encode(entries).decode())
    group = Group(roster=hosts.read(str(file)), backend="jaccl", tensor=2)
    assert "rank failed over jaccl" in check.why_apart(group)


@contextlib.contextmanager
def remote():
    """What runs on another machine, once it has said what it has."""
    command = [sys.executable, "-m", "mlxserve.distributed.remote"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            tell(process, Inquiry(["127.0.0.2", "127.0.0.2"], "/none"))
            line = process.stdout.readline().decode()
            assert line.startswith(MARK)
            yield process, msgspec.json.decode(line[len(MARK) :], type=Report)
        finally:
            process.kill()


def tell(process, message):
    process.stdin.write(msgspec.json.encode(message) + b"\n")
    process.stdin.flush()


def test_what_is_on_another_machine_ends_with_its_stdin():
    """Before it has orders, and while it does something that would never end."""
    with remote() as (process, report):
        assert not report.problem
        for port in report.ports:
            socket.create_server(("127.0.0.2", port)).close()
        process.stdin.close()
        assert process.wait(TIMEOUT_S) == 0
    with remote() as (process, report):
        args = [str(report.ports[0]), "--bind", "127.0.0.2"]
        tell(process, Orders("http.server", args, {}, {}))

        def serves():
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.2", report.ports[0])).close()
                return True
            return False

        wait_until(serves, "it does as told")
        process.stdin.close()
        assert process.wait(TIMEOUT_S) == 3
