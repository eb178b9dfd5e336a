"""`mlxserve launch --check`: what is wrong with the hosts, and how to mend it."""

import subprocess
import time
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from mlxserve.distributed.launch import POLL_S, Group, started
from mlxserve.distributed.links import MEET, Measured
from mlxserve.distributed.remote import Report, fingerprint_of
from mlxserve.distributed.ssh import Fault, faults_of, reached
from mlxserve.errors import RequestError
from mlxserve.opening import versions

ALL = "all"
LINKS = "mlxserve.distributed.links"
MEASURE_S = 180.0  # 8 MiB four times over each of 16 links, some of which are slow
MEET_S = 45.0  # JACCL may wait for ever for one that doesn't come
SLOW_S = 1e-3  # two sums a layer wait so long


class ApartError(RequestError):
    """Ranks that have started, and can't reach each other."""


class Finding(NamedTuple):
    """One line. where: a host, or several; fix: what to do about it."""

    where: str
    topic: str
    text: str
    state: Literal["ok", "note", "wrong"] = "ok"
    fix: str = ""


def findings(group: Group, why: str, model: str = "") -> Iterator[Finding]:
    """Look at every host, at what connects them, and for a model, if one is named.

    why: the backend isn't JACCL. Everything is given some time only.
    """
    hosts = group.roster.hosts
    yield Finding(hosts[0].name, "versions", _words(versions()))
    here = fingerprint_of(model) if model else ""
    if model:
        yield _of_model(hosts[0].name, model, here, here)
    sound = True
    with reached(hosts, group.python, model) as answers:
        for remote, answer in answers:
            for finding in _of_host(remote.host.name, answer, model, here):
                sound &= finding.state == "ok" or finding.topic == "model"
                yield finding
    if why:
        yield Finding(ALL, "backend", f"ring: {why}", "note")
    else:
        yield Finding(ALL, "backend", group.backend)
    if sound:
        yield from _of_links(group)
    else:
        yield Finding(ALL, "links", "not measured", "note", "mend the above first")


def why_apart(group: Group) -> str:
    """Why the ranks can't add up a number over the group's backend, or ""."""
    try:
        _run(group, MEET_S, MEET)
    except ApartError as error:
        return str(error)
    return ""


def _of_host(host: str, answer: Report | Fault, model: str, here: str) -> Iterator[Finding]:
    if isinstance(answer, Fault):
        yield Finding(host, "ssh", answer.text, "wrong", answer.fix)
        return
    yield Finding(host, "ssh", "answers")
    faults = faults_of(host, answer)
    for fault in faults:
        topic = "host" if answer.problem else "versions"
        yield Finding(host, topic, fault.text, "wrong", fault.fix)
    if not faults:
        yield Finding(host, "versions", _words(answer.versions))
    if model:
        yield _of_model(host, model, answer.model, here)


def _of_model(host: str, model: str, found: str, here: str) -> Finding:
    if not found:
        fix = "put it there: `mlxserve pull` for a name; for a path, its files at the same place"
        return Finding(host, "model", f"{model} isn't on this host", "wrong", fix)
    if here and found != here:
        fix = "copy the files from one to the other"
        return Finding(host, "model", f"{model} has other weights", "wrong", fix)
    return Finding(host, "model", model)


def _of_links(group: Group) -> Iterator[Finding]:
    names = [host.name for host in group.roster.hosts]
    try:
        out = _run(group, MEASURE_S)
        measured = msgspec.json.decode(out, type=list[Measured])
    except (RequestError, msgspec.DecodeError) as error:
        fix = "see what the ranks printed; do the hosts' firewalls let Python through?"
        yield Finding(ALL, "links", str(error), "wrong", fix)
        return
    for one in measured:
        where = ALL if one.by == "sum" else " - ".join(names[rank] for rank in one.ranks)
        text = f"{one.latency_s * 1e6:,.0f} µs, {one.bytes_per_s / 1e6:,.0f} MB/s"
        if one.latency_s < SLOW_S or one.by == "sum":
            yield Finding(where, one.by, text)
        else:
            fix = "connect them by a cable: each layer waits for two sums"
            yield Finding(where, one.by, f"{text}: slow", "note", fix)


def _run(group: Group, limit_s: float, *args: str) -> bytes:
    """What rank 0 prints. Raises ApartError where a rank fails, or time is up."""
    with started(group, LINKS, args, stdout=subprocess.PIPE) as processes:
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s:
            codes = [process.poll() for process in processes]
            for host, code in zip(group.roster.hosts, codes, strict=True):
                if code:
                    raise ApartError(f"{host.name}'s rank failed over {group.backend}")
            if codes[0] == 0:
                out = processes[0].stdout
                return b"" if out is None else out.read()
            time.sleep(POLL_S)
    raise ApartError(f"the ranks weren't done within {limit_s:g} s over {group.backend}")


def _words(found: dict[str, str]) -> str:
    return ", ".join(f"{what} {which}" for what, which in found.items())
