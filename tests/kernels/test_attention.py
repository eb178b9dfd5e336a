"""The reference of paged attention against NumPy in float64, over random tables."""

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels import registry
from mlxserve.kernels.attention import PagedRows, paged_attention
from tests.kernels.paged import Paged


@pytest.fixture(autouse=True)
def use_the_reference(monkeypatch):
    monkeypatch.setenv("MLXSERVE_KERNELS", "reference")
    registry.forget()
    yield
    monkeypatch.undo()
    registry.forget()


@pytest.mark.full
@pytest.mark.parametrize("window", [None, 1, 16, 64, 100])
@pytest.mark.parametrize("options", ["plain", "softcap", "sinks", "both"])
@pytest.mark.parametrize(("hq", "hk", "dim"), [(4, 2, 32), (3, 3, 80), (8, 1, 64)])
def test_ragged_rows_equal_dense_attention(window, options, hq, hk, dim):
    rng = np.random.default_rng(hq * 100 + (window or 0))
    rows = [(0, 1), (63, 1), (64, 1), (200, 1), (0, 70), (60, 10), (128, 64), (130, 1), (5, 200)]
    paged = Paged(rows, hk, dim, window=window, filler=1e3)
    q = rng.normal(size=(paged.total, hq, dim))
    how = {"scale": dim**-0.5}
    if options in ("softcap", "both"):
        how["softcap"] = 2.0
    if options in ("sinks", "both"):
        how["sinks"] = rng.normal(size=hq)
    as_mx = {k: mx.array(v.astype(np.float32)) if k == "sinks" else v for k, v in how.items()}
    q32 = mx.array(q.astype(np.float32))
    out = paged_attention(q32, paged.hot, paged.pool, paged.described, window=window, **as_mx)
    np.testing.assert_allclose(np.array(out), paged.expected(q, **how), atol=2e-5)


def test_rows_that_do_not_cover_the_queries_are_refused():
    paged = Paged([(0, 4)], 2, 32)
    with pytest.raises(ValueError, match="rows cover 4 tokens, q has 5"):
        paged_attention(mx.zeros((5, 4, 32)), paged.hot, paged.pool, paged.described, scale=1.0)
    with pytest.raises(ValueError, match="3 query heads can't share 2"):
        paged_attention(mx.zeros((4, 3, 32)), paged.hot, paged.pool, paged.described, scale=1.0)


def test_a_description_gives_the_reference_its_pages():
    rows = PagedRows(
        np.array([[0, 1, 130, 1, 1, 0, 0], [1, 2, 0, 0, 0, 2, 0]]), np.array([7, 3, 5])
    )
    decode, prompt = rows.rows
    assert (decode.base, decode.sealed.tolist(), decode.hot.tolist()) == (64, [7], [3])
    assert (prompt.base, prompt.sealed, prompt.hot.tolist()) == (0, None, [5])
