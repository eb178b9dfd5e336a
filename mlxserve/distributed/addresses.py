"""Addresses and ports of machines, in IPv4, which is all that MLX's ring takes."""

import contextlib
import ipaddress
import socket
from collections.abc import Sequence

from mlxserve.errors import RequestError

LOOPBACK = "127.0.0.1"
_ANY_PORT = 9  # nothing is sent to it


def is_address(text: str) -> bool:
    """Whether it is an IPv4 address, and no name."""
    try:
        return ipaddress.ip_address(text).version == 4
    except ValueError:
        return False


def is_loopback(ip: str) -> bool:
    """Whether it's an address that only this machine itself reaches."""
    return ipaddress.ip_address(ip).is_loopback


def resolve(host: str) -> str:
    """The address of a host; of `user@host`, too. Raises RequestError."""
    name = host.rpartition("@")[2]
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise RequestError(
            f"{name} has no address that this machine can find; correct the name, or give `ips` in "
            "a --hostfile"
        ) from None
    return str(found[0][4][0])


def is_own(ip: str) -> bool:
    """Whether it is an address of this machine: whether one can listen there."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((ip, 0))
        except OSError:
            return False
    return True


def own_address(towards: Sequence[str]) -> str | None:
    """This machine's address in the network that these lie in; None where they lie in several."""
    found = set()
    for ip in towards:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((ip, _ANY_PORT))  # asks for the route, and sends nothing
            except OSError:
                return None
            found.add(probe.getsockname()[0])
    return found.pop() if len(found) == 1 else None


def free_ports(ips: Sequence[str]) -> list[int]:
    """One at each of these addresses of this machine, where nobody listens. Raises OSError."""
    with contextlib.ExitStack() as stack:
        doors = [stack.enter_context(socket.create_server((ip, 0))) for ip in ips]
        return [door.getsockname()[1] for door in doors]
