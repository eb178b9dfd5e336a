"""What carries tensors between hosts: JACCL (RDMA over Thunderbolt), or the ring over TCP."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mlxserve.distributed.hosts import Roster
from mlxserve.errors import RequestError

BACKENDS = ("auto", "jaccl", "ring", "mpi")
_OF_HOSTFILES = ("", "ring", "jaccl", "jaccl-ring")
_NO_MPI = (
    "--backend mpi: processes of MPI are started by mpirun, and launch starts its own, so that it "
    "keeps the server's address; use ring, which takes the same networks"
)


class Choice(NamedTuple):
    """backend: of `mx.distributed`; why: it isn't the best one, or ""."""

    backend: str
    why: str = ""


def choose(asked: str, roster: Roster, available: Callable[[str], bool]) -> Choice:
    """The backend of a group. available: whether this machine's MLX has one.

    Raises RequestError for one that was asked for and can't be had.
    """
    if asked not in BACKENDS:
        raise RequestError(f"--backend is {asked!r}; choose {', '.join(BACKENDS)}")
    if roster.backend not in _OF_HOSTFILES:
        raise RequestError(
            f"the hostfile's backend is {roster.backend!r}; launch knows ring, jaccl and jaccl-ring"
        )
    if asked == "mpi":
        raise RequestError(_NO_MPI)
    if asked == "auto" and (roster.backend == "ring" or not roster.apart):
        asked = "ring"
    if asked == "ring":
        _check_ring(roster)
        return Choice("ring")
    why = _no_jaccl(roster, available)
    if not why:
        return Choice("jaccl")
    if asked == "jaccl":
        raise RequestError(f"--backend jaccl: {why}; or use ring")
    _check_ring(roster)
    return Choice("ring", why)


def links(roster: Roster, ports: Sequence[Sequence[int]]) -> list[list[str]]:
    """What MLX's ring reads: where each rank listens, one or more times."""
    pairs = zip(roster.hosts, ports, strict=True)
    return [[f"{ip}:{port}" for ip, port in zip(host.ips, own, strict=True)] for host, own in pairs]


def is_mesh(roster: Roster) -> bool:
    """Whether each host has RDMA to each, and not only to its neighbours."""
    return not list(_unconnected(roster, neighbours=False))


def _check_ring(roster: Roster) -> None:
    first, *others = roster.hosts
    for host in others:
        if len(host.ips) != len(first.ips):
            raise RequestError(
                f"the hostfile has {len(first.ips)} ips of {first.name} and {len(host.ips)} of "
                f"{host.name}; a ring needs as many of each"
            )


def _no_jaccl(roster: Roster, available: Callable[[str], bool]) -> str:
    """Why these hosts can't use it, with what to do; or ""."""
    if not available("jaccl"):
        return "this MLX has no JACCL, which needs macOS 26.2 and RDMA turned on"
    if without := [host.name for host in roster.hosts if len(host.rdma) != len(roster.hosts)]:
        return (
            f"JACCL needs an rdma entry for each rank of {', '.join(without)}; "
            "`mlx.distributed_config --over thunderbolt` writes a --hostfile that has them"
        )
    if pairs := [f"{a} to {b}" for a, b in _unconnected(roster, neighbours=True)]:
        return f"the hostfile has no rdma device from {', '.join(pairs)}; write it anew"
    return ""


def _unconnected(roster: Roster, *, neighbours: bool) -> Iterator[tuple[str, str]]:
    count = len(roster.hosts)
    for i, host in enumerate(roster.hosts):
        for j, to in enumerate(roster.hosts):
            wanted = (i - j) % count in (1, count - 1) if neighbours else i != j
            if wanted and not host.rdma[j]:
                yield host.name, to.name
