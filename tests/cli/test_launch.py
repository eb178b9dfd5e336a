"""What `mlxserve launch` refuses before anything is started."""

import json
import socket

import pytest

HOSTS = ("--hosts", "localhost,127.0.0.2")
SERVE = ("--", "serve")


@pytest.mark.parametrize(("args", "message"), [
    ((), "launch needs serve, generate or cache build; write it after --"),
    (("-n", "0", *SERVE), "0 ranks; give a number from 1 to 16"),
    (("-n", "x", *SERVE), "'x' isn't a whole number"),
    (("-n", "2", "--", "chat"), "launch runs serve, generate or cache build, not chat"),
    (("-n", "2", "--", "cache", "verify"), "not cache verify; write it after --"),
    (("-n", "2", *HOSTS, *SERVE), "-n and --hosts both say where; give one of them"),
    ((*HOSTS, "--hostfile", "x", *SERVE), "--hosts and --hostfile both say where"),
    (("-n", "2", "--python", "x", *SERVE), "--python is for other machines"),
    (("-n", "2", "--check"), "--check looks at machines; name them with --hosts or --hostfile"),
    (("-n", "2", "--backend", "jaccl", *SERVE), "--backend jaccl: "),
    (("-n", "2", "--backend", "mpi", *SERVE), "--backend mpi: "),
    (("-n", "2", "--backend", "x", *SERVE), "--backend is 'x'; choose auto, jaccl, ring, mpi"),
    (("-n", "4", "--tensor", "3", *SERVE), "--tensor is 3, which doesn't divide 4 processes"),
    (("-n", "4", "--pipeline", "0", *SERVE), "--pipeline is 0, which doesn't divide 4 processes"),
    (("-n", "4", "--tensor", "2", "--pipeline", "4", *SERVE),
     "--tensor 2 times --pipeline 4 is 8, and there are 4 processes"),
    ((*HOSTS, "--tensor", "4", *SERVE), "--tensor is 4, which doesn't divide 2 processes"),
    ((*HOSTS, "--check", *SERVE, "--nonsense"), "no such option: --nonsense"),
    (("--hosts", "localhost,localhost", *SERVE), "names a host twice: localhost"),
    (("--hostfile", "/none.json", *SERVE), "--hostfile /none.json: No such file"),
])  # fmt: skip
def test_what_cannot_be_launched_is_refused(here, args, message):
    done = here("launch", *args)
    assert done.code == 2
    assert message in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("args", [("-n", "2", *SERVE, "--help"), (*HOSTS, "--", "generate", "-h")])
def test_help_of_what_is_launched_starts_nothing(here, args):
    done = here("launch", *args)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: mlxserve {args[-2]} ")


def test_a_port_in_use_is_named_before_a_host_is_asked(here):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = here("launch", *HOSTS, *SERVE, "--port", port)
    assert done.code == 2
    assert f"can't listen at 127.0.0.1:{port}: Address already in use" in done.stderr


def test_jaccl_that_cannot_be_had_gives_way_to_the_ring_aloud(here, tmp_path, monkeypatch):
    """There is no ssh here: so much comes before it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps([{"ssh": "localhost"}, {"ssh": "127.0.0.2"}]))
    done = here("launch", "--hostfile", str(file), "--", "generate", "-p", "x")
    assert done.code == 2
    said, error = done.stderr.splitlines()
    assert said.startswith("over the ring: ")
    assert error == "error: there is no ssh here; install OpenSSH's client"
