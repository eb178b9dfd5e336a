"""Writing to the cache: native and reference against NumPy, and in place."""

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels import append as module
from mlxserve.kernels import registry
from mlxserve.kernels.append import append
from mlxserve.kernels.pages import pack_keys, pack_values
from tests.kernels.paged import PACK, P


@pytest.fixture(params=["reference", "native"])
def implementation(request, monkeypatch):
    if request.param == "native" and registry.native("append") is None:
        pytest.skip("only on machines with the native kernels")
    monkeypatch.setenv("MLXSERVE_KERNELS", request.param)
    registry.forget()
    yield request.param
    monkeypatch.undo()
    registry.forget()


def cache(heads=2, dim=5, dtype=mx.float32, page=P, sides=2):
    rng = np.random.default_rng(0)
    made = []
    for shape in ((4 * page, heads, dim), (3, heads, page, dim)):
        arrays = [mx.array(rng.normal(size=shape).astype(np.float32)) for _ in range(sides)]
        made.append(tuple(x.astype(dtype) for x in arrays))
    mx.eval(made)
    return made


def numbers(x):
    return np.array(x.astype(mx.float32))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("given", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(2, 5), (1, 16), (3, 64)])
def test_tokens_and_pages_land_where_they_should(implementation, dtype, given, heads, dim):
    hot, pool = cache(heads, dim, dtype)
    expected_hot, expected_pool = ([numbers(x).copy() for x in pair] for pair in (hot, pool))
    index, moves = [3, 64, 255, 70], [[1, 2], [0, 0]]
    new = [mx.random.normal((4, heads, dim)).astype(given) for _ in "kv"]
    got_hot, got_pool = append(
        hot, pool, mx.array(index, mx.int32), *new, mx.array(moves, mx.int32)
    )
    for i in range(2):
        expected_hot[i][index] = numbers(new[i].astype(dtype))
        for source, target in moves:
            page = expected_hot[i][source * P : (source + 1) * P]
            expected_pool[i][target] = page.swapaxes(0, 1)
        np.testing.assert_array_equal(numbers(got_hot[i]), expected_hot[i])
        np.testing.assert_array_equal(numbers(got_pool[i]), expected_pool[i])
        assert got_hot[i].dtype == got_pool[i].dtype == dtype


def test_moves_without_tokens_and_tokens_without_moves(implementation):
    hot, pool = cache()
    before = numbers(hot[0])[:P].copy()
    none = mx.zeros((0, 2, 5))
    moves = mx.array([[0, 1]], mx.int32)
    hot, pool = append(hot, pool, mx.zeros((0,), mx.int32), none, none, moves)
    np.testing.assert_array_equal(numbers(pool[0])[1], before.swapaxes(0, 1))
    one = mx.ones((1, 2, 5))
    hot, pool = append(hot, pool, mx.array([2], mx.int32), one, one)
    assert (numbers(hot[1])[2] == 1).all()


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("page", [4, 8, 64])
def test_a_page_is_sealed_with_the_token_that_completes_it(implementation, page, bits):
    """Whatever was in its place before, in the hot page as in the pool."""
    key_bits = 8 if bits and page == 4 else bits
    hot, pool = cache(page=page)
    if bits:
        pool = pack_keys(pool[0], key_bits), pack_values(pool[1], bits)
    filled = [numbers(x)[page : 2 * page].copy() for x in hot]
    new = [mx.random.normal((1, 2, 5)) for _ in "kv"]
    last, moves = mx.array([2 * page - 1], mx.int32), mx.array([[1, 2]], mx.int32)
    _, pool = append(hot, pool, last, *new, moves)
    for x, new_x, got, pack, n in zip(filled, new, pool, PACK, (key_bits, bits), strict=True):
        x[-1] = numbers(new_x)[0]
        sealed = x.swapaxes(0, 1)[None]
        if n is None:
            np.testing.assert_array_equal(numbers(got)[2], sealed[0])
            continue
        for array, expected in zip(got, pack(sealed, n)[0], strict=True):
            np.testing.assert_array_equal(np.array(array[2]), expected[0])


@pytest.mark.parametrize("sides", [1, 2])
def test_the_memory_is_written_where_it_is(implementation, sides):
    """The arrays are large beside what is written: a copy of one would show."""
    hot = tuple(mx.zeros((256 * P, 2, 64)) for _ in range(sides))
    pool = tuple(mx.zeros((256, 2, P, 64)) for _ in range(sides))
    index, x = mx.array([5], mx.int32), mx.ones((1, 2, 64))
    v = x if sides == 2 else None
    moves = mx.array([[0, 1]], mx.int32)
    mx.eval(hot, pool, index, x, moves)
    size, before = hot[0].nbytes, mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(5):
        hot, pool = append(hot, pool, index, x, v, moves)
        mx.eval(hot, pool)
    assert mx.get_peak_memory() - before < size / 2
    assert all((numbers(x)[1, :, 5] == 1).all() for x in pool)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("page", [4, 16, 64])
def test_keys_that_are_the_values_are_written_once(implementation, dtype, page):
    hot, pool = cache(1, 24, dtype, page=page, sides=1)
    expected_hot, expected_pool = numbers(hot[0]).copy(), numbers(pool[0]).copy()
    new = mx.random.normal((2, 1, 24))
    index, moves = mx.array([page - 1, page], mx.int32), mx.array([[0, 2]], mx.int32)
    hot, pool = append(hot, pool, index, new, None, moves)
    assert len(hot) == len(pool) == 1
    expected_hot[page - 1 : page + 1] = numbers(new.astype(dtype))
    expected_pool[2] = expected_hot[:page].swapaxes(0, 1)
    np.testing.assert_array_equal(numbers(hot[0]), expected_hot)
    np.testing.assert_array_equal(numbers(pool[0]), expected_pool)


def test_an_array_that_somebody_holds_is_copied(implementation):
    if implementation == "reference":
        pytest.skip("only on machines with the native kernels: the reference changes its arguments")
    hot, pool = cache()
    old = numbers(hot[0]).copy()
    one = mx.ones((1, 2, 5))
    (new_k, _), _ = append(hot, pool, mx.array([2], mx.int32), one, one)
    assert (numbers(new_k)[2] == 1).all()
    np.testing.assert_array_equal(numbers(hot[0]), old)


def test_what_is_out_of_range_is_not_written():
    kernels = registry.native("append")
    if kernels is None:
        pytest.skip("only on machines with the native kernels")
    hot, pool = cache()
    old = [numbers(x).copy() for x in (*hot, *pool)]
    index = mx.array([-1, 4 * P, 2**30], mx.int32)
    moves = mx.array([[-1, 0], [4, 0], [0, -1], [0, 3]], mx.int32)
    x = mx.ones((3, 2, 5))
    hot, pool = append(hot, pool, index, x, x, moves)
    for before, after in zip(old, (*hot, *pool), strict=True):
        np.testing.assert_array_equal(before, numbers(after))
    module.check(kernels)


def test_sides_and_pages_that_do_not_fit_are_refused(implementation):
    (hot, pool), x, index = cache(), mx.zeros((1, 2, 5)), mx.array([0], mx.int32)
    packed = pack_keys(pool[0], 8)
    bad = [
        ("sides", (hot, pool[:1]), x),
        ("sides", (hot, pool), None),
        ("sides", (hot[:1], pool[:1]), x),
        ("pool_k is packed, expected plain numbers", (hot[:1], (packed,)), None),
        ("expected pages of", (hot, tuple(x[:, :, :48] for x in pool)), x),
    ]
    for words, given, v in bad:
        with pytest.raises(ValueError, match=words):
            append(*given, index, x, v)


def test_what_does_not_fit_is_refused_by_name():
    if registry.native("append") is None:
        pytest.skip("only on machines with the native kernels")
    x, index = mx.zeros((3, 2, 5)), mx.zeros((3,), mx.int32)
    bad = [
        ("index is float32, expected int32", {"index": mx.zeros((3,))}),
        ("index has shape", {"index": mx.zeros((3, 1), mx.int32)}),
        ("k is .*expected", {"k": mx.zeros((2, 2, 5))}),
        ("v is .*expected", {"v": mx.zeros((3, 2, 6))}),
        ("v is float16", {"v": x.astype(mx.float16)}),
        ("moves is .*expected", {"moves": mx.zeros((2, 3), mx.int32)}),
        ("moves is float32", {"moves": mx.zeros((2, 2))}),
    ]
    for words, change in bad:
        hot, pool = cache()
        how = {"index": index, "k": x, "v": x, "moves": None, **change}
        with pytest.raises(ValueError, match=f"append: {words}"):
            append(hot, pool, **how)
