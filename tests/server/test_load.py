"""Many at once, some of which give up: nothing leaks, and each answer is the one it is alone."""

import asyncio
import json
import os
import random
import time

import httpx
import pytest

import mlxserve
from tests.support.serving import TIMEOUT_S, serving, wait_until

KINDS = 24
CLIENTS = 64


def ask_of(kind: int) -> dict:
    """A request that is the same every time; some share the beginnings of their prompts."""
    rng = random.Random(kind)
    shared = "The same beginning for several prompts, more than a page long. " * (kind % 3)
    return {
        "prompt": shared + "".join(rng.choices("abcdefgh ", k=rng.randrange(1, 120))),
        "max_tokens": rng.randrange(1, 60),
        "temperature": rng.choice([0.0, 0.9]),
        "seed": kind,
        "ignore_eos": rng.random() < 0.5,
    }


async def storm(url: str, seconds: float, alone: list[str]) -> tuple[int, int]:
    """Ask and now and then hang up; returns how many were answered and how many cut off."""
    rng = random.Random(1)
    end_s = time.monotonic() + seconds
    finished = cut = 0

    async def one(http: httpx.AsyncClient) -> None:
        nonlocal finished, cut
        while time.monotonic() < end_s:
            kind = rng.randrange(KINDS)
            ask = {**ask_of(kind), "stream": rng.random() < 0.7}
            try:
                async with asyncio.timeout(rng.uniform(0.01, 0.5) if rng.random() < 0.4 else 60):
                    assert await answer(http, ask) == alone[kind]
                finished += 1
            except TimeoutError:
                cut += 1

    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as http:
        await asyncio.gather(*[one(http) for _ in range(CLIENTS)])
    return finished, cut


async def answer(http: httpx.AsyncClient, ask: dict) -> str:
    if not ask["stream"]:
        got = await http.post("/v1/completions", json=ask)
        return got.json()["choices"][0]["text"]
    text, done = "", False
    async with http.stream("POST", "/v1/completions", json=ask) as got:
        async for line in got.aiter_lines():
            done = done or line == "data: [DONE]"
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    assert done
    return text


@pytest.mark.parametrize(
    "seconds",
    [pytest.param(4, marks=pytest.mark.full), pytest.param(120, marks=pytest.mark.slow)],
)
def test_many_clients_some_of_whom_give_up(tiny_model_dir, seconds):
    with mlxserve.load(tiny_model_dir, max_batch=16) as llm, serving(llm) as server:
        alone = [
            mlxserve.generate(
                llm, ask["prompt"], **{k: v for k, v in ask.items() if k != "prompt"}
            ).text
            for ask in map(ask_of, range(KINDS))
        ]
        server.complete(prompt="x", max_tokens=1)
        files = len(os.listdir("/dev/fd"))
        finished, cut = asyncio.run(storm(server.url, seconds, alone))
        assert finished > 20
        assert cut > 5
        wait_until(server.idle, "the engine is idle")
        wait_until(lambda: server.tasks() == 2, "no tasks are left")
        wait_until(lambda: len(os.listdir("/dev/fd")) <= files, "no files are left")
        llm._engine.call(lambda core: core.check_integrity())
