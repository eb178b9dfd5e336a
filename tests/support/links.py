"""`mlxserve launch` with a proxy in every link between its ranks, for links that fail.

    python -m tests.support.links LINK FAULT WHEN launch -n 2 -- serve ...

LINK: control or ring. FAULT: cut or freeze. WHEN: "start", of the first group that is started, or
"told": of the present one, at SIGUSR1. Later groups have sound links.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxserve.cli import main
from mlxserve.distributed import launch
from tests.support.proxy import LOCAL, Proxy

CONTROL, RING = "control", "ring"
CUT, FREEZE = "cut", "freeze"
START, TOLD = "start", "told"


class Links:
    """The proxies of the group that runs now, by the link they are in."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._proxies: dict[str, list[Proxy]] = {}

    def renew(self) -> None:
        """Before a group starts."""
        for proxies in self._proxies.values():
            for proxy in proxies:
                proxy.close()
        self._proxies = {CONTROL: [], RING: []}

    def environment(self, rank: int, env: dict[str, str]) -> dict[str, str]:
        """A rank's, in which the others' ports are those of proxies."""
        changed = {}
        if rank:
            control = self._proxy(CONTROL, env["MLXSERVE_CONTROL"])
            changed["MLXSERVE_CONTROL"] = control
        hosts = Path(env["MLX_HOSTFILE"])
        ring = [
            [address if i == rank else self._proxy(RING, address) for address in addresses]
            for i, addresses in enumerate(json.loads(hosts.read_text()))
        ]
        own = hosts.with_name(f"{rank}.json")
        own.write_text(json.dumps(ring))
        return env | changed | {"MLX_HOSTFILE": str(own)}

    def fail(self, link: str) -> None:
        for proxy in self._proxies[link]:
            if self._fault == FREEZE:
                proxy.freeze()
            else:
                proxy.close()

    def _proxy(self, link: str, address: str) -> str:
        proxy = Proxy(int(address.rpartition(":")[2]))
        self._proxies[link].append(proxy)
        return f"{LOCAL}:{proxy.port}"


def run(link: str, fault: str, when: str, args: list[str]) -> int:
    """Launch so; returns the exit code."""
    links = Links(fault)
    start: Callable[..., Any] = launch._start
    groups = 0

    def started(module: str, args: list[str], env: dict[str, str], **how: Any) -> Any:
        nonlocal groups
        rank = int(env["MLXSERVE_RANK"])
        if rank == 0:
            links.renew()
            groups += 1
        through = links.environment(rank, env)
        if when == START and groups == 1:
            links.fail(link)
        return start(module, args, through, **how)

    launch._start = started  # type: ignore[assignment]
    signal.signal(signal.SIGUSR1, lambda *_: links.fail(link))
    sys.argv[1:] = args
    return main()


if __name__ == "__main__":
    os.environ.setdefault("MLXSERVE_PEER_TIMEOUT_S", "5")
    sys.exit(run(*sys.argv[1:4], sys.argv[4:]))  # type: ignore[arg-type]
