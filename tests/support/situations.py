"""What may happen to a request, each as a function that makes it happen.

A situation takes a stage, runs an engine, and returns it with the proof that it happened. A new one
is a function here and a line in SITUATIONS.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from mlxserve.kernels import registry
from tests.support.caches import KINDS, SAMPLING, Answer, Asked, CacheKind, Ids, Run, solo
from tests.support.composed import VOCAB


class Impossible(Exception):  # noqa: N818
    """Why a situation can't come about for this kind."""


@dataclass(frozen=True)
class Stage:
    """A kind of cache, the tokens of its pages, and how the first request draws its tokens."""

    name: str
    page_tokens: int
    sampling: str

    @property
    def kind(self) -> CacheKind:
        return KINDS[self.name]

    @property
    def new(self) -> int:
        """Tokens of an answer: over two pages where they are small."""
        return 40 if self.page_tokens == 64 else 2 * self.page_tokens + 2

    def text(self, tokens: int, seed: int) -> Ids:
        """Words that begin like those of no other seed."""
        drawn = np.random.default_rng(seed).integers(0, VOCAB, tokens - 1)
        return (seed, *map(int, drawn))

    def main(self) -> Asked:
        """The request that it's about: a prompt over three pages, of an odd length."""
        return Asked(self.text(3 * self.page_tokens + 5, 1), self.new, self.sampling)

    def mate(self, tokens: int, seed: int) -> Asked:
        """Another, which draws its tokens otherwise."""
        (other,) = SAMPLING.keys() - {self.sampling}
        return Asked(self.text(tokens, seed), self.new, other)

    def run(self, *, pool_pages: int = 64, **config: object) -> Run:
        return Run(self.name, self.page_tokens, pool_pages=pool_pages, **config)

    def solo(self, asked: Asked) -> Answer:
        return solo(self.name, self.page_tokens, asked)


Shown = tuple[list[Run], str]


def alone(stage: Stage) -> Shown:
    """Nobody else is there; twice, so that a recorded step is run as well."""
    run = stage.run(prefix_cache=False)
    run.alone(stage.main())
    run.alone(stage.main())
    assert max(run.rows()) == 1
    if registry.recorder() is not None:
        assert bool(run.recorded) == stage.kind.records
    return [run], "1 row"


def join(stage: Stage) -> Shown:
    """Others begin while it decodes."""
    run, P = stage.run(), stage.page_tokens
    run.submit(stage.main())
    run.step(4)
    run.submit(stage.mate(P + 3, 2))
    run.step(2)
    run.submit(stage.mate(2 * P, 3))
    run.drain()
    rows = run.rows()
    assert rows[0] == 1
    assert sorted(set(rows)) == [1, 2, 3]
    return [run], "1 to 3 rows"


def leave(stage: Stage) -> Shown:
    """One that runs with it ends, another is aborted."""
    run, P = stage.run(), stage.page_tokens
    main = run.submit(stage.main())
    short = stage.mate(P + 3, 2)
    run.submit(Asked(short.ids, 3, short.sampling))
    run.submit(stage.mate(2 * P, 3))
    run.step(6)
    assert max(run.rows()) == 3
    run.abort("r2")
    run.step(2)
    assert not main.finished
    assert run.rows()[-1] == 1
    run.drain()
    return [run], "3 rows to 1"


def chunked(stage: Stage) -> Shown:
    """Its prompt is computed in small and odd pieces."""
    runs, chunks = [], []
    for tokens in (3, 7) if stage.page_tokens < 64 else (17, 50):
        run = stage.run(max_batch=2, max_batched_tokens=tokens, prefix_cache=False)
        run.alone(stage.main())
        prompt = len(stage.main().ids)
        chunks.append(sum(plan.chunks[0].start < prompt for plan in run.plans))
        assert chunks[-1] >= -(-prompt // tokens) > 1
        runs.append(run)
    return runs, f"{chunks[0]} and {chunks[1]} chunks"


def whole_prefix(stage: Stage) -> Shown:
    """It is asked again, and so is what continues it."""
    run, main = stage.run(), stage.main()
    run.alone(main)
    again = run.alone(main)
    known = len(main.ids) + main.new - 1  # the last token is never computed
    turn = (*main.ids, *(token for token, _ in run.answers["r0"]), 5, 6, 7)
    longer = run.alone(Asked(turn, 4, stage.sampling))
    _found(stage, again, len(main.ids) - 1)
    _found(stage, longer, known)
    assert again.usage().diverged_at is None
    return [run], f"{again.cached} and {longer.cached} cached"


def part_of_a_prefix(stage: Stage) -> Shown:
    """Another begins alike, up to the middle of a page."""
    P, main = stage.page_tokens, stage.main()
    run = stage.run(max_batched_tokens=P)  # then there is a snapshot at the end of each page
    run.alone(main)
    agreed = 2 * P + P // 2
    other = (*main.ids[:agreed], (main.ids[agreed] + 1) % VOCAB, *stage.text(P, 4))
    seq = run.alone(Asked(other, main.new, stage.sampling))
    _found(stage, seq, agreed)
    assert stage.kind.cuts == bool(seq.cached % P)
    assert seq.usage().diverged_at == agreed
    return [run], f"{seq.cached} cached"


def evicted(stage: Stage) -> Shown:
    """What was cached of it had to go for another, and is computed again."""
    P, main = stage.page_tokens, stage.main()
    tokens = len(main.ids) + main.new + 3
    run = stage.run(max_batch=1, max_batched_tokens=P, pool_pages=tokens // P)
    run.alone(main)
    answer = (token for token, _ in run.answers["r0"])
    turn = Asked((*main.ids, *answer, 5), 2, stage.sampling)
    before = run.alone(turn)
    other = stage.mate(len(turn.ids), 2)
    run.alone(Asked(other.ids, turn.new, other.sampling))
    after = run.alone(turn)
    assert before.cached > 0
    assert after.cached == 0, f"{after.cached} tokens are still cached"
    return [run], f"{before.cached} cached, then 0"


def preempted(stage: Stage) -> Shown:
    """Three run until the pages don't suffice; the newest starts over."""
    P = stage.page_tokens
    all_asked = [stage.main(), *(stage.mate(3 * P - 2, seed) for seed in (2, 3))]
    all_asked = [Asked(asked.ids, P + 6, asked.sampling) for asked in all_asked]
    # Room for the prompts and a page more, as is needed to start; what comes of them is longer.
    pages = sum(len(asked.ids) // P + 1 for asked in all_asked)
    run = stage.run(max_batch=3, pool_pages=pages)
    oldest, *newer = (run.submit(asked) for asked in all_asked)
    run.drain()
    assert not oldest.preempted
    if not any(seq.preempted for seq in newer):
        assert all(group.window is not None for group in run.core.manager.groups)
        raise Impossible("it takes no more than it had room for when it started")
    return [run], f"{run.core.stats.preemptions} preempted"


def restored(stage: Stage) -> Shown:
    """One engine computes its prompt and keeps it in a file; another goes on from there."""
    P, main = stage.page_tokens, stage.main()
    first, second = stage.run(), stage.run()
    first.alone(stage.mate(5 * P, 3))  # what it leaves in a page mustn't come along
    first.alone(Asked(main.ids, 1, stage.sampling))
    # Here pages lie elsewhere, and the first is there.
    second.alone(stage.mate(4 * P + 3, 2))
    second.alone(Asked((*main.ids[: P + 1], *stage.text(3, 5)), 3, stage.sampling))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "prompt.st"
        saved = first.save(path, main.ids)
        assert saved == second.load(path) == stage.kind.resumes_at(len(main.ids), P)
    again = second.alone(main)
    longer = second.alone(Asked((*main.ids[:saved], *stage.text(P, 4)), main.new, stage.sampling))
    _found(stage, again, len(main.ids) - 1)
    _found(stage, longer, saved)
    return [first, second], f"{saved} from a file"


def _found(stage: Stage, seq, agreed: int) -> None:
    expected = stage.kind.resumes_at(agreed, stage.page_tokens)
    assert seq.cached == expected > 0, f"{seq.cached} cached, expected {expected}"


SITUATIONS: dict[str, Callable[[Stage], Shown]] = {
    "alone": alone,
    "others join": join,
    "others leave": leave,
    "in chunks": chunked,
    "all cached": whole_prefix,
    "part cached": part_of_a_prefix,
    "evicted": evicted,
    "preempted": preempted,
    "saved and restored": restored,
}
