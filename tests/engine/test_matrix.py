"""Every kind of cache in every situation gives the answer of the request alone, to the bit."""

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.config import EngineConfig
from mlxserve.engine.cache_plan import cache_specs
from mlxserve.kernels import registry
from tests.support.caches import KINDS, REFUSED, Asked, solo
from tests.support.composed import ComposedModel
from tests.support.dense_view import DenseView
from tests.support.matrix import TABLE, cells, committed, prove, refusal
from tests.support.situations import SITUATIONS, Stage


def name(cell):
    return f"{cell.kind}: {cell.situation}, {cell.page_tokens}, {cell.sampling}"


def some(cell):
    """A third of the cells: each kind of cache and each situation is among them."""
    return (list(KINDS).index(cell.kind) + list(SITUATIONS).index(cell.situation)) % 3 == 0


def when(cell):
    """Small pages are quick; of those of 64, `make test` has some, and `make test-slow` all."""
    if cell.quick:
        return ()
    return pytest.mark.full if cell.page_tokens < 64 or some(cell) else pytest.mark.slow


@pytest.mark.parametrize("cell", [pytest.param(c, marks=when(c)) for c in cells()], ids=name)
def test_the_answer_is_that_of_the_request_alone(cell):
    check(cell)


def check(cell):
    entry = committed()[cell.kind, cell.situation, cell.page_tokens < 64]
    assert prove(cell) == entry, "run `python -m tests.support.matrix --write`"


def test_the_committed_table_has_all_kinds_and_situations():
    expected = {(kind, at, small) for kind in KINDS for at in SITUATIONS for small in (True, False)}
    assert committed().keys() == expected


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_kind_of_layer_cannot_do_is_refused_by_name(name):
    reason = refusal(name)
    assert "layer 1 keeps Latent pages" in reason
    assert f"- {name}: {reason}\n" in TABLE.read_text("utf-8")


# In nats: what sealing pages in so many bits may change of a logprob.
ALLOWED = {8: 0.1, "8/4": 1.2, 4: 1.5}


@pytest.mark.parametrize("name", KINDS)
def test_alone_it_has_the_logprobs_of_a_cache_without_pages(name):
    kind = KINDS[name]
    stage = Stage(name, kind.small, "greedy")
    main = stage.main()
    answer = solo(name, kind.small, Asked(main.ids, main.new, "greedy"))
    config = EngineConfig(**kind.config(kind.small))
    model = ComposedModel(kind.layers(kind.small))
    ids = [*main.ids, *(token for token, _ in answer[:-1])]
    view = DenseView(cache_specs(model.layer_specs(), config)).advance(len(ids))
    logits = model.logits(model(mx.array(ids), view))[len(main.ids) - 1 :]
    exact = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    allowed = ALLOWED[config.kv_bits] if kind.packed else 1e-4
    worst = max(
        abs(value - exact[i, token])
        for i, (_, logprob) in enumerate(answer)
        for token, value in logprob.top
    )
    assert worst < allowed


@pytest.fixture(scope="module")
def references():
    """The reference kernels of the cache, in place of native ones."""
    if registry.recorder() is None:
        pytest.skip("only on machines with native kernels: others have just proven it")
    with pytest.MonkeyPatch.context() as patch:
        # Not of matmuls: the reference gives a row other bits in another batch.
        patch.setenv("MLXSERVE_KERNELS", "attention=reference,append=reference")
        forget()
        yield
    forget()


def forget():
    registry.forget()
    solo.cache_clear()


@pytest.mark.usefixtures("references")
@pytest.mark.parametrize("cell", [
    pytest.param(cell, marks=pytest.mark.full if some(cell) else pytest.mark.slow)
    for cell in cells() if cell.quick
], ids=name)  # fmt: skip
def test_so_it_is_with_reference_kernels(cell):
    check(cell)
