"""The machines that compute one model: read from --hosts or a hostfile, and checked.

A hostfile is what `mlx.distributed_config` writes: a JSON list with an object for each host, or an
object that has it as `hosts`, beside `backend` and `envs`. Of a host, `ssh` is what ssh calls it;
`ips` are its addresses, at which the host before it reaches it; `rdma` are its RDMA devices, one
for each host of the list, or several, and null for itself.
"""

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from mlxserve.distributed.addresses import (
    LOOPBACK,
    is_address,
    is_loopback,
    is_own,
    own_address,
    resolve,
)
from mlxserve.errors import RequestError

MAX_RANKS = 16
Devices = str | tuple[str, ...] | None
# No `-` in front, which ssh would take for an option.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*")


@dataclass(frozen=True, slots=True)
class Host:
    """Where a rank runs. name: what ssh calls it; here: it is this machine, which needs no ssh.

    ips: at which the rank before it reaches it; rdma: devices towards each rank.
    """

    name: str
    ips: tuple[str, ...]
    rdma: tuple[Devices, ...] = ()
    here: bool = False


@dataclass(frozen=True, slots=True)
class Roster:
    """All hosts, in the order of ranks. backend, env: what their file says of them, if it does."""

    hosts: tuple[Host, ...]
    backend: str = ""
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def apart(self) -> bool:
        """Whether some ranks run on other machines."""
        return not all(host.here for host in self.hosts)

    def control_ip(self) -> str:
        """An address of this machine that all others reach.

        The one towards where ssh finds them. Cables between two machines each, of which a ring may
        be made, don't lead everywhere; where nothing else is known, it is the first of the ring.
        """
        try:
            towards = [resolve(host.name) for host in self.hosts if not host.here]
        except RequestError:  # a name that only ssh knows
            towards = []
        return (own_address(towards) if towards else None) or self.hosts[0].ips[0]


def here(count: int) -> Roster:
    """So many ranks on this machine. Raises RequestError."""
    if not 1 <= count <= MAX_RANKS:
        raise RequestError(f"{count} ranks; give a number from 1 to {MAX_RANKS}")
    return Roster((Host(LOOPBACK, (LOOPBACK,), here=True),) * count)


def named(text: str) -> Roster:
    """Of --hosts. Raises RequestError."""
    names = [name.strip() for name in text.split(",")]
    if "" in names:
        raise RequestError(f"--hosts {text!r} has an empty name; separate names by one comma each")
    return _checked("--hosts", [_Entry(ssh=name) for name in names], "", {})


def read(path: str) -> Roster:
    """Of --hostfile. Raises RequestError."""
    option = f"--hostfile {path}"
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=list[_Entry] | _File)
    except OSError as error:
        raise RequestError(
            f"{option}: {error.strerror}; `mlx.distributed_config --hosts A,B --output-hostfile "
            f"{path}` writes one"
        ) from None
    except msgspec.DecodeError as error:
        raise RequestError(
            f"{option} isn't what mlx.distributed_config writes: {error}; expected "
            '[{"ssh": NAME, "ips": [ADDRESS]}, ...]'
        ) from None
    file = _File(hosts=found) if isinstance(found, list) else found
    for variable in file.envs:
        if not _VARIABLE.fullmatch(variable):
            raise RequestError(f"{option} has {variable!r} in envs; write NAME=VALUE")
    env = {name: value for name, _, value in (one.partition("=") for one in file.envs)}
    return _checked(option, file.hosts, file.backend, env)


class _Entry(msgspec.Struct):
    ssh: str
    ips: list[str] = []
    rdma: list[str | list[str] | None] = []


class _File(msgspec.Struct):
    hosts: list[_Entry]
    backend: str = ""
    envs: list[str] = []


def _checked(option: str, entries: Sequence[_Entry], backend: str, env: dict[str, str]) -> Roster:
    """Everything that can be known without asking the hosts. Raises RequestError."""
    if not 2 <= len(entries) <= MAX_RANKS:
        raise RequestError(
            f"{option} has {len(entries)} hosts; name 2 to {MAX_RANKS}, this machine first, or "
            "start several processes here with -n"
        )
    for entry in entries:
        if not _NAME.fullmatch(entry.ssh):
            raise RequestError(f"{option}: {entry.ssh!r} is no name of a host; write it as for ssh")
        for ip in entry.ips:
            if not is_address(ip):
                raise RequestError(f"{option}: {entry.ssh} has {ip!r} in ips; give IPv4 addresses")
    _no_duplicates(option, [(entry.ssh, entry.ssh) for entry in entries])
    first, *others = entries
    hosts = [_other(entry) for entry in others]
    hosts.insert(0, _first(option, first, hosts))
    _no_duplicates(option, [(ip, host.name) for host in hosts for ip in host.ips])
    return Roster(tuple(hosts), backend, env)


def _no_duplicates(option: str, named: Sequence[tuple[str, str]]) -> None:
    seen: dict[str, str] = {}
    for key, name in named:
        if key in seen:
            both = name if seen[key] == name else f"{seen[key]} and {name}, both at {key}"
            raise RequestError(f"{option} names a host twice: {both}; name each once")
        seen[key] = name


def _other(entry: _Entry) -> Host:
    return Host(entry.ssh, tuple(entry.ips) or (resolve(entry.ssh),), _devices(entry))


def _first(option: str, entry: _Entry, others: Sequence[Host]) -> Host:
    name = entry.ssh
    strange = next((ip for ip in entry.ips if not is_own(ip)), None)
    if strange is not None or not (entry.ips or _is_here(name)):
        raise RequestError(
            f"{option}: {name} comes first, and {strange or name} isn't this machine, where the "
            f"server listens; run launch on {name}, or name this machine first"
        )
    ips = tuple(entry.ips) or (_own_ip(name, others[-1].ips[0]),)
    return Host(name, ips, _devices(entry), here=True)


def _is_here(name: str) -> bool:
    own = socket.gethostname().partition(".")[0].lower()
    plain = name.rpartition("@")[2].lower()
    return plain in ("localhost", own, f"{own}.local") or is_own(resolve(plain))


def _own_ip(name: str, last: str) -> str:
    """Where the last rank reaches the first: a machine's own name often leads to loopback."""
    found = own_address([last])
    if found is None:
        raise RequestError(f"this machine has no way to {last}; connect it, or correct the address")
    if is_address(name) and is_loopback(name) == is_loopback(found):
        return name
    return found


def _devices(entry: _Entry) -> tuple[Devices, ...]:
    return tuple(tuple(one) if isinstance(one, list) else one for one in entry.rdma)
