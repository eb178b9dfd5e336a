"""Servers of several ranks, asked over HTTP by eight at once."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx
import pytest

from tests.support.processes import TIMEOUT_S, Process, running

PROGRAM = [sys.executable, "-m", "mlxserve"]
CLIENTS = 8

T = TypeVar("T")


def environment(home: Path, timeout_s: int = 8) -> dict[str, str]:
    """Of a launcher. timeout_s: how long a rank may be silent."""
    return os.environ | {
        "MLXSERVE_HOME": str(home),
        "MLXSERVE_PEER_TIMEOUT_S": str(timeout_s),
        "MLXSERVE_CPU_THREADS": "1",
    }


def serving(
    model: Path,
    *,
    ranks: int,
    env: dict[str, str],
    args: Sequence[str] = (),
    stages: int = 1,
    program: Sequence[str] = PROGRAM,
) -> AbstractContextManager[Process]:
    """ranks: 0 for a server without a launcher; stages: of a pipeline, into which they divide."""
    start = ["launch", "-n", str(ranks), "--pipeline", str(stages), "--"] if ranks else []
    return running([*program, *start, "serve", str(model), "--port", "0", *args], env)


def complete(url: str, asked: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=asked, timeout=TIMEOUT_S)


def at_once(work: Callable[[int], T]) -> list[T]:
    """What each client makes of its number, all at the same time."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(work, range(CLIENTS)))


class Told(NamedTuple):
    """A text's tokens. logprobs, tops: of each, and of the likeliest there; None for the first of a
    prompt."""

    tokens: list[str]
    logprobs: list[float | None]
    tops: list[dict[str, float] | None]


def tell(url: str, asked: dict[str, Any]) -> list[Told]:
    """Each choice of a completion, which asks for two logprobs."""
    answer = complete(url, asked | {"logprobs": 2})
    assert answer.status_code == 200, answer.text
    parts = [choice["logprobs"] for choice in answer.json()["choices"]]
    return [Told(p["tokens"], p["token_logprobs"], p["top_logprobs"]) for p in parts]


def check_close(got: Told, right: Told, close: float) -> None:
    """Logprobs that differ by less, and the same likeliest tokens wherever they lead by more.

    What follows a token that was drawn otherwise, since two were as likely, isn't compared.
    """
    assert len(got.tokens) == len(right.tokens)
    for i, top in enumerate(right.tops):
        if got.tokens[i] != right.tokens[i]:
            assert lead(top) < close, f"token {i} is {got.tokens[i]!r}, not {right.tokens[i]!r}"
            return
        if top is None:
            continue
        assert got.logprobs[i] == pytest.approx(right.logprobs[i], abs=close), f"token {i}"
        assert lead(top) < close or likeliest(top) == likeliest(got.tops[i])


def lead(top: dict[str, float] | None) -> float:
    """By how much the likeliest token is likelier than the next."""
    assert top is not None
    first, second = sorted(top.values())[-2:]
    return first - second


def likeliest(top: dict[str, float] | None) -> str:
    assert top is not None
    return max(top, key=lambda token: top[token])


def ranks_of(process: subprocess.Popen[bytes]) -> dict[int, Path]:
    """Ranks that a launcher started, by number, as directories that are there while they live."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, StopIteration, IndexError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == process.pid:
                variables = (entry / "environ").read_bytes().split(b"\0")
                rank = next(v for v in variables if v.startswith(b"MLXSERVE_RANK="))
                found[int(rank.partition(b"=")[2])] = entry
    return found
