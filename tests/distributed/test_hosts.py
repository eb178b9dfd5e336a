"""Which machines compute a model, and over what: --hosts, hostfiles, and what is refused."""

import json
import re
import socket

import pytest

from mlxserve.distributed import backends, hosts
from mlxserve.errors import RequestError

AWAY = "203.0.113."  # addresses that nobody has


@pytest.fixture
def hostfile(tmp_path):
    """Writes one, and gives its path."""

    def write(contents):
        path = tmp_path / "hosts.json"
        path.write_text(contents if isinstance(contents, str) else json.dumps(contents))
        return str(path)

    return write


def entries(*rdma):
    """Of this machine and of others, in a hostfile."""
    ips = ["127.0.0.1", *(f"{AWAY}{i}" for i in range(1, len(rdma)))]
    return [
        {"ssh": f"mac{i}", "ips": [ip], "rdma": devices}
        for i, (ip, devices) in enumerate(zip(ips, rdma, strict=True))
    ]


def test_hosts_by_name_or_address():
    roster = hosts.named("localhost, 127.0.0.2,me@127.0.0.3")
    assert [host.name for host in roster.hosts] == ["localhost", "127.0.0.2", "me@127.0.0.3"]
    assert [host.ips for host in roster.hosts] == [("127.0.0.1",), ("127.0.0.2",), ("127.0.0.3",)]
    assert [host.here for host in roster.hosts] == [True, False, False]
    assert roster.control_ip() == "127.0.0.1"
    assert roster.apart


def test_this_machine_by_its_own_name():
    first = hosts.named(f"{socket.gethostname()},127.0.0.2").hosts[0]
    assert (first.ips, first.here) == (("127.0.0.1",), True)


def test_so_many_processes_here():
    roster = hosts.here(3)
    assert len(roster.hosts) == 3
    assert not roster.apart


def test_a_hostfile_as_mlx_writes_it(hostfile):
    found = hosts.read(hostfile(entries([None, "rdma_en2"], [["rdma_en3", "rdma_en4"], None])))
    assert [host.name for host in found.hosts] == ["mac0", "mac1"]
    assert found.hosts[1].ips == (f"{AWAY}1",)
    assert found.hosts[1].rdma == (("rdma_en3", "rdma_en4"), None)
    assert (found.backend, found.env) == ("", {})
    wrapped = {"backend": "jaccl", "envs": ["MLX_METAL_FAST_SYNCH=1"], "hosts": entries([], [])}
    found = hosts.read(hostfile(wrapped))
    assert (found.backend, found.env) == ("jaccl", {"MLX_METAL_FAST_SYNCH": "1"})
    assert len(found.hosts) == 2


@pytest.mark.parametrize(("names", "message"), [
    ("localhost,,b", "has an empty name"),
    ("localhost", "has 1 hosts; name 2 to 16"),
    (",".join(f"127.0.0.{i}" for i in range(1, 18)), "has 17 hosts; name 2 to 16"),
    ("localhost,127.0.0.2,127.0.0.2", "names a host twice: 127.0.0.2; name each once"),
    ("localhost,127.0.0.1", "localhost and 127.0.0.1, both at 127.0.0.1"),
    ("localhost,-oProxyCommand=x", "'-oProxyCommand=x' is no name of a host"),
    ("localhost,b;reboot", "'b;reboot' is no name of a host"),
    ("localhost,a..b", "a..b has no address that this machine can find"),
    (f"{AWAY}1,127.0.0.1", f"{AWAY}1 comes first, and {AWAY}1 isn't this machine"),
])  # fmt: skip
def test_wrong_hosts_are_refused_by_name(names, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        hosts.named(names)


@pytest.mark.parametrize(("contents", "message"), [
    ("[", "isn't what mlx.distributed_config writes"),
    ([{"ips": ["127.0.0.1"]}], "missing required field `ssh`"),
    ([{"ssh": "a", "ips": "127.0.0.1"}], "Expected `array`, got `str` - at `$[0].ips`"),
    ([], "has 0 hosts"),
    ([{"ssh": "a", "ips": ["::1"]}, {"ssh": "b"}], "a has '::1' in ips; give IPv4 addresses"),
    ([{"ssh": "a", "ips": [f"{AWAY}1"]}, {"ssh": "b", "ips": [f"{AWAY}2"]}],
     f"a comes first, and {AWAY}1 isn't this machine"),
    ([{"ssh": "a", "ips": ["127.0.0.1"]}, {"ssh": "b", "ips": ["127.0.0.1"]}],
     "a and b, both at 127.0.0.1"),
    ({"hosts": entries([], []), "envs": ["X"]}, "has 'X' in envs; write NAME=VALUE"),
])  # fmt: skip
def test_a_wrong_hostfile_is_refused_by_name(hostfile, contents, message):
    path = hostfile(contents)
    with pytest.raises(RequestError, match="--hostfile") as caught:
        hosts.read(path)
    assert path in str(caught.value)
    assert message in str(caught.value)


def test_a_hostfile_that_is_not_there(tmp_path):
    with pytest.raises(RequestError, match=r"No such file or directory; `mlx\.dist"):
        hosts.read(str(tmp_path / "none.json"))


MESH = ([None, "a", "b"], ["c", None, "d"], ["e", "f", None])
RING = (
    [None, "a", None, "b"],
    ["c", None, "d", None],
    [None, "e", None, "f"],
    ["g", None, "h", None],
)
HALF = ([None, "a"], [None, None])


@pytest.mark.parametrize(("asked", "rdma", "has", "backend", "why"), [
    ("auto", MESH, True, "jaccl", ""),
    ("jaccl", MESH, True, "jaccl", ""),
    ("auto", RING, True, "jaccl", ""),
    ("ring", MESH, True, "ring", ""),
    ("auto", MESH, False, "ring", "this MLX has no JACCL"),
    ("auto", ([], []), True, "ring", "JACCL needs an rdma entry for each rank of mac0, mac1"),
    ("auto", HALF, True, "ring", "no rdma device from mac1 to mac0"),
])  # fmt: skip
def test_jaccl_where_all_have_it_and_else_the_ring(hostfile, asked, rdma, has, backend, why):
    chosen = backends.choose(asked, hosts.read(hostfile(entries(*rdma))), lambda name: has)
    assert chosen.backend == backend
    assert why in chosen.why
    assert bool(why) == bool(chosen.why)


def test_processes_of_one_machine_have_the_ring_without_a_word():
    assert backends.choose("auto", hosts.here(2), lambda name: True) == ("ring", "")


def test_a_hostfile_may_ask_for_the_ring(hostfile):
    roster = hosts.read(hostfile({"backend": "ring", "hosts": entries(*MESH)}))
    assert backends.choose("auto", roster, lambda name: True) == ("ring", "")


@pytest.mark.parametrize(("asked", "rdma", "has", "message"), [
    ("jaccl", MESH, False, "--backend jaccl: this MLX has no JACCL"),
    ("jaccl", ([], []), True, "--backend jaccl: JACCL needs an rdma entry"),
    ("mpi", MESH, True, "--backend mpi: .*; use ring"),
    ("nccl", MESH, True, "--backend is 'nccl'; choose auto, jaccl, ring, mpi"),
])  # fmt: skip
def test_a_backend_that_cannot_be_had_is_refused(hostfile, asked, rdma, has, message):
    roster = hosts.read(hostfile(entries(*rdma)))
    with pytest.raises(RequestError, match=message):
        backends.choose(asked, roster, lambda name: has)


def test_a_ring_needs_as_many_addresses_of_each(hostfile):
    made = entries([], [])
    made[1]["ips"].append(f"{AWAY}9")
    with pytest.raises(RequestError, match="1 ips of mac0 and 2 of mac1; a ring needs as many"):
        backends.choose("ring", hosts.read(hostfile(made)), lambda name: False)


def test_the_backend_of_a_hostfile_may_be_unknown(hostfile):
    roster = hosts.read(hostfile({"backend": "nccl", "hosts": entries([], [])}))
    with pytest.raises(RequestError, match="the hostfile's backend is 'nccl'"):
        backends.choose("auto", roster, lambda name: True)


def test_jaccl_between_neighbours_only(hostfile):
    assert backends.is_mesh(hosts.read(hostfile(entries(*MESH))))
    assert not backends.is_mesh(hosts.read(hostfile(entries(*RING))))
