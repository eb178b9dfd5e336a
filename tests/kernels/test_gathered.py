"""Gathered matmuls against loops in NumPy's float64, and bit for bit against `matmul`."""

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels import registry
from mlxserve.kernels.gathered import gathered_matmul
from mlxserve.kernels.matmul import PanelWeight, matmul, prepare
from mlxserve.kernels.quantized import PackedWeight, dequantize

native = registry.native("gathered")
needs_native = pytest.mark.skipif(native is None, reason="only on machines with native kernels")

DENSE = [mx.float32, mx.float16, mx.bfloat16]
PACKED = [
    ("affine", 2, 32), ("affine", 3, 32), ("affine", 4, 64), ("affine", 5, 32), ("affine", 6, 128),
    ("affine", 8, 64), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16),
]  # fmt: skip
FORMS = [*DENSE, *PACKED]


def numbers(*shape, seed=0):
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def stack(e, n, k, form, seed=0):
    w = numbers(e, n, k, seed=seed)
    if isinstance(form, mx.Dtype):
        return w.astype(form)
    mode, bits, group = form
    words, scales, *biases = mx.quantize(w.astype(mx.float16), group, bits, mode=mode)
    return PackedWeight(words, scales, biases[0] if biases else None, bits, group, mode)


def expert_of(weight, e):
    if isinstance(weight, mx.array):
        return weight[e]
    biases = None if weight.biases is None else weight.biases[e]
    parts = (weight.weight[e], weight.scales[e], biases)
    return PackedWeight(*parts, weight.bits, weight.group_size, weight.mode)


def chosen(tokens, a, e, seed=0):
    return mx.array(np.random.default_rng(seed).integers(0, e, (tokens, a)), mx.int32)


def dense64(weight):
    dense = dequantize(weight, mx.float32) if isinstance(weight, PackedWeight) else weight
    return np.array(dense.astype(mx.float32), np.float64)


def exact(x, weight, experts, bias=None):
    """Pair by pair."""
    x, w = np.array(x.astype(mx.float32), np.float64), dense64(weight)
    ids = np.array(experts)
    out = np.full((*ids.shape, w.shape[1]), np.nan)
    for t, a in np.ndindex(ids.shape):
        if 0 <= ids[t, a] < len(w):
            out[t, a] = w[ids[t, a]] @ (x[t] if x.ndim == 2 else x[t, a])
            out[t, a] += 0 if bias is None else np.array(bias, np.float64)[ids[t, a]]
    return out


def rounding(x, weight, experts):
    """What 16 bits for x may move a result: half a step of each, all in one direction."""
    if not isinstance(weight, PackedWeight):
        return 2e-4
    group = weight.group_size
    groups = np.abs(np.array(x)).reshape(*x.shape[:-1], -1, group).max(-1)
    steps = mx.array(np.repeat(groups / 32767 / 2, group, -1))
    most = exact(steps, mx.array(np.abs(dense64(weight)).astype(np.float32)), experts)
    return most + 1e-5 * np.abs(exact(x, weight, experts)).max()


def close(got, want, tolerance):
    got = np.array(got.astype(mx.float32), np.float64)
    assert got.shape == want.shape
    assert (np.isnan(got) == np.isnan(want)).all()
    assert (np.nan_to_num(np.abs(got - want)) <= np.nan_to_num(tolerance)).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("own_rows", [False, True])
def test_the_reference(form, own_rows):
    weight, bias = stack(5, 21, 128, form), numbers(5, 21, seed=1)
    experts = mx.array([[0, 4, 4], [-1, 2, 5], [1, 0, 2], [4, 2**31 - 1, -(2**31)]], mx.int32)
    x = numbers(4, 3, 128, seed=2) if own_rows else numbers(4, 128, seed=2)
    (plain,) = gathered_matmul(x, [weight], experts)
    (added,) = gathered_matmul(x, [weight], experts, [bias])
    close(plain, exact(x, weight, experts), 2e-4)
    close(added, exact(x, weight, experts, bias), 2e-4)


@pytest.mark.parametrize("form", [mx.float32, ("affine", 4, 32)])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_the_result_has_the_type_of_x(kernel_level, form, dtype):
    weight, experts = stack(3, 20, 64, form), chosen(4, 2, 3)
    x = numbers(4, 64, seed=1).astype(dtype)
    for bias in (None, numbers(3, 20).astype(dtype)):
        for ready in (weight, prepare(weight, mx.float32)):
            (out,) = gathered_matmul(x, [ready], experts, [bias])
            assert out.dtype == dtype
            wide = None if bias is None else bias.astype(mx.float32)
            close(out, exact(x, weight, experts, wide), 0.3)


@pytest.mark.full
@needs_native
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 5, 130])
@pytest.mark.parametrize("own_rows", [False, True])
def test_every_format(form, tokens, own_rows):
    weight, bias = stack(6, 37, 256, form), numbers(6, 37, seed=1)
    experts = chosen(tokens, 3, 5, seed=tokens)  # nobody picks the last one
    x = numbers(tokens, 3, 256, seed=2) if own_rows else numbers(tokens, 256, seed=2)
    ready = prepare(weight, mx.float32)
    assert isinstance(ready, PanelWeight)
    assert ready.shape == (6, 37, 256)
    tolerance = rounding(x, weight, experts)
    (plain,) = gathered_matmul(x, [ready], experts)
    (added,) = gathered_matmul(x, [ready], experts, [bias])
    close(plain, exact(x, weight, experts), tolerance)
    close(added, exact(x, weight, experts, bias), tolerance)


@needs_native
@pytest.mark.parametrize("shape", [
    (1, 1, 1, 32), (1, 4, 16, 32), (3, 1, 33, 96), (64, 8, 7, 64), (2, 2, 47, 513), (9, 5, 128, 1),
])  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 2, 19])
def test_stacks_of_any_shape(native_level, shape, tokens):
    e, a, n, k = shape
    experts = chosen(tokens, a, e, seed=n)
    x = numbers(tokens, k, seed=2)
    for form in (mx.float32, ("affine", 4, 32)):
        if form != mx.float32 and k % 32:
            continue
        weight = stack(e, n, k, form)
        (out,) = gathered_matmul(x, [prepare(weight, mx.float32)], experts)
        close(out, exact(x, weight, experts), rounding(x, weight, experts))


@needs_native
@pytest.mark.parametrize("form", FORMS)
def test_a_pair_has_the_bits_of_a_matmul_with_its_expert(native_level, form):
    """Whoever else is in the call: one expert for 150 tokens, one for a single token, and so on."""
    experts = np.random.default_rng(0).choice(6, (150, 2), p=[0.6, 0.2, 0.1, 0.08, 0.02, 0])
    experts[:, 1] = np.where(np.arange(150) == 77, 5, experts[:, 0])  # twice in one row, once
    weight, bias, x = stack(6, 37, 256, form), numbers(6, 37, seed=1), numbers(150, 256, seed=2)
    ready = prepare(weight, mx.float32)
    (out,) = gathered_matmul(x, [ready], mx.array(experts, mx.int32), [bias])
    out = np.array(out)
    for e in range(6):
        alone = prepare(expert_of(weight, e), mx.float32)
        for t, a in np.argwhere(experts == e)[:4]:
            want = np.array(matmul(x[int(t) : int(t) + 1], alone, bias[e]))[0]
            np.testing.assert_array_equal(out[t, a], want)


@needs_native
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("own_rows", [False, True])
def test_tokens_have_the_same_bits_alone_and_in_any_batch(form, own_rows):
    ready, experts = prepare(stack(4, 21, 128, form), mx.float32), chosen(300, 2, 4)
    x = numbers(300, 2, 128, seed=2) if own_rows else numbers(300, 128, seed=2)
    together = np.array(gathered_matmul(x, [ready], experts)[0])
    for begin, end in ((0, 1), (7, 9), (11, 30), (0, 129), (299, 300)):
        part = gathered_matmul(x[begin:end], [ready], experts[begin:end])[0]
        np.testing.assert_array_equal(np.array(part), together[begin:end])


BITS = """
import hashlib
import mlx.core as mx
import numpy as np
from mlxserve.kernels.gathered import gathered_matmul
from mlxserve.kernels.matmul import prepare
from mlxserve.kernels.quantized import PackedWeight
rng = np.random.default_rng(0)
w = mx.array(rng.normal(size=(8, 200, 256)).astype(np.float32)).astype(mx.float16)
forms = [prepare(w, mx.float32), prepare(PackedWeight(*mx.quantize(w, 64, 4), 4, 64), mx.float32)]
total = hashlib.sha256()
for tokens in (1, 3, 200):
    x = mx.array(rng.normal(size=(tokens, 256)).astype(np.float32))
    experts = mx.array(rng.integers(0, 8, (tokens, 4)), mx.int32)
    for out in gathered_matmul(x, forms, experts):
        total.update(np.array(out).tobytes())
print(total.hexdigest())
"""


@pytest.mark.full
@needs_native
def test_the_number_of_threads_changes_nothing():
    digests = set()
    for threads in ("1", "2", "5"):  # a process each: the first kernel fixes it
        environment = os.environ | {"MLXSERVE_CPU_THREADS": threads}
        command = [sys.executable, "-c", BITS]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout)
    assert len(digests) == 1


@needs_native
def test_several_weights_in_one_call():
    x, experts = numbers(7, 128), chosen(7, 3, 4)
    stacks = [stack(4, 30, 128, form) for form in (("affine", 4, 32), mx.float16, ("mxfp4", 4, 32))]
    stacks += [stack(4, 17, 128, ("affine", 8, 64)), stack(4, 30, 128, mx.float32)]
    biases = [numbers(4, 30), None, None, numbers(4, 17), None]
    ready = [prepare(s, mx.float32) for s in stacks]
    outs = gathered_matmul(x, ready, experts, biases)
    for out, weight, bias in zip(outs, ready, biases, strict=True):
        (alone,) = gathered_matmul(x, [weight], experts, [bias])
        np.testing.assert_array_equal(np.array(out), np.array(alone))


@needs_native
def test_weights_in_different_forms():
    x, experts, w = numbers(5, 64), chosen(5, 2, 3), numbers(3, 24, 64, seed=1)
    packed = stack(3, 24, 64, ("affine", 4, 32))
    first, second = gathered_matmul(x, [packed, prepare(w, mx.float32)], experts)
    close(first, exact(x, packed, experts), 2e-4)
    close(second, exact(x, w, experts), 2e-4)


def test_an_expert_that_does_not_exist_gives_a_row_that_is_not_a_number(kernel_level):
    weight, bias = stack(3, 21, 64, ("affine", 4, 32)), numbers(3, 21)
    ready, x = prepare(weight, mx.float32), numbers(4, 64, seed=1)
    experts = mx.array([[3, 0], [-1, 2], [1, 1], [2**31 - 1, -(2**31)]], mx.int32)
    (out,) = gathered_matmul(x, [ready], experts, [bias])
    close(out, exact(x, weight, experts, bias), 1e-3)
    (nobody,) = gathered_matmul(x, [ready], mx.full((4, 2), 3, mx.int32))
    assert np.isnan(np.array(nobody)).all()


def test_nothing_in_nothing_out(kernel_level):
    ready = prepare(stack(3, 21, 64, ("affine", 4, 32)), mx.float32)
    for tokens, a in ((0, 2), (4, 0)):
        experts = mx.zeros((tokens, a), mx.int32)
        for x in (mx.zeros((tokens, 64)), mx.zeros((tokens, a, 64))):
            (out,) = gathered_matmul(x, [ready], experts)
            assert np.array(out).shape == (tokens, a, 21)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_own_row_alone(kernel_level, bad):
    x = np.array(numbers(3, 64))
    x[1, 40] = bad
    for form in (mx.float32, ("affine", 4, 32)):
        ready = prepare(stack(2, 21, 64, form), mx.float32)
        (out,) = gathered_matmul(mx.array(x), [ready], mx.array([[0, 1]] * 3, mx.int32))
        out = np.array(out)
        assert not np.isfinite(out[1]).any()
        assert np.isfinite(out[[0, 2]]).all()


@needs_native
def test_inputs_that_are_views():
    weight = stack(4, 21, 128, ("affine", 4, 32))
    ready, x, experts = prepare(weight, mx.float32), numbers(128, 6), chosen(3, 6, 4)
    got = gathered_matmul(x.T, [ready], experts.T)[0]
    copies = [mx.array(np.ascontiguousarray(np.array(a).T)) for a in (x, experts)]
    want = gathered_matmul(copies[0], [ready], copies[1])[0]
    np.testing.assert_array_equal(np.array(got), np.array(want))
    wide = mx.broadcast_to(x.T[:, None], (6, 3, 128))
    again = gathered_matmul(wide, [ready], experts.T)[0]
    np.testing.assert_array_equal(np.array(again), np.array(want))
    # A stack that is a view: of every other expert.
    dense = numbers(8, 21, 128, seed=4)
    sliced = gathered_matmul(copies[0], [prepare(dense[::2], mx.float32)], copies[1])[0]
    close(sliced, exact(copies[0], dense[::2], copies[1]), 2e-4)


@needs_native
def test_in_a_recorded_program_experts_are_chosen_anew():
    ready, bias = prepare(stack(4, 21, 64, ("affine", 4, 32)), mx.float32), numbers(4, 21)
    mx.eval(ready.data)

    def two_layers(x, experts):
        first, second = gathered_matmul(x, [ready, ready], experts, [bias, None])
        return [first, second]

    x, experts = numbers(3, 64), chosen(3, 2, 4)
    kernels = registry.native("matmul")
    program = kernels.record([x, experts], [], two_layers(x, experts), [])
    for seed in (1, 2):
        x, experts = numbers(3, 64, seed=seed), chosen(3, 2, 5, seed=seed)  # 4 doesn't exist
        outs = program.run([x, experts], kernels.State([]))
        for got, want in zip(outs, two_layers(x, experts), strict=True):
            np.testing.assert_array_equal(np.array(got), np.array(want))


@needs_native
def test_a_stack_is_padded_by_expert():
    weight = stack(5, 17, 64, ("affine", 4, 32))
    single = prepare(expert_of(weight, 0), mx.float32)
    assert prepare(weight, mx.float32).data.nbytes == 5 * single.data.nbytes


def test_what_does_not_fit_is_refused(kernel_level):
    ready = prepare(stack(3, 21, 64, ("affine", 4, 32)), mx.float32)
    other = prepare(stack(2, 21, 64, ("affine", 4, 32)), mx.float32)
    single = prepare(numbers(21, 64), mx.float32)
    x, experts = mx.zeros((4, 64)), mx.zeros((4, 2), mx.int32)
    for message, arguments in {
        "x is mlx.core.int32, expected a floating type": (x.astype(mx.int32), [ready], experts),
        r"experts is mlx.core.uint32 \[4, 2\], expected int32 \[T, A\]":
            (x, [ready], experts.astype(mx.uint32)),
        r"experts is mlx.core.int32 \[4\], expected int32 \[T, A\]": (x, [ready], experts[:, 0]),
        r"x is \[3, 64\], expected \[4, K\] or \[4, 2, K\]": (x[:3], [ready], experts),
        r"x is \[4, 1, 64\], expected \[4, K\] or \[4, 2, K\]": (x[:, None], [ready], experts),
        r"x is \[64\], expected \[4, K\]": (x[0], [ready], experts),
        "x has K=32, the weight has K=64": (x[:, :32], [ready], experts),
        r"a weight is \[21, 64\], expected a stack \[E, N, K\]": (x, [single], experts),
        "a weight has E=2, the first has E=3": (x, [ready, other], experts),
        r"bias is \[3, 20\], expected \[3, 21\]": (x, [ready], experts, [mx.zeros((3, 20))]),
        "1 biases for 2 weights": (x, [ready, ready], experts, [None]),
        "no weights": (x, [], experts),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=message):
            gathered_matmul(*arguments)
    with pytest.raises(ValueError, match=r"matmul: .*weight is .*expected"):
        matmul(x, ready)


@needs_native
def test_what_does_not_fit_is_refused_by_the_kernels_themselves():
    raw = stack(3, 21, 64, ("affine", 4, 32))
    weight, single = (prepare(w, mx.float32).handle for w in (raw, expert_of(raw, 0)))
    other = prepare(stack(2, 21, 64, mx.float32), mx.float32).handle
    x, experts = mx.zeros((4, 64)), mx.zeros((4, 2), mx.int32)
    for message, arguments in {
        "x is float16, expected float32": (x.astype(mx.float16), [weight], experts, [None]),
        "experts is uint32, expected int32": (x, [weight], experts.astype(mx.uint32), [None]),
        "experts has shape .*, expected 2 dimensions": (x, [weight], experts[0], [None]),
        "x has shape .*, expected 2 or 3 dimensions": (x[0], [weight], experts, [None]),
        r"x is \[3, 64\], expected \[4, 64\]": (x[:3], [weight], experts, [None]),
        r"x is \[4, 1, 64\], expected \[4, 2, 64\]": (x[:, None], [weight], experts, [None]),
        "x has K=32, the weight has K=64": (x[:, :32], [weight], experts, [None]),
        "a weight is a single matrix, expected a stack": (x, [single], experts, [None]),
        "a weight has E=2, another has E=3": (x, [weight, other], experts, [None, None]),
        r"bias is \[21\], expected \[3, 21\]": (x, [weight], experts, [mx.zeros((21,))]),
        "bias is float16, expected float32":
            (x, [weight], experts, [mx.zeros((3, 21), mx.float16)]),
        "needs weights, and a bias or None for each": (x, [weight], experts, []),
        "a weight is None": (x, [None], experts, [None]),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=message):
            native.gathered_matmul(*arguments)
    with pytest.raises(ValueError, match="a weight is a stack of matrices, expected a single one"):
        native.matmul(x, [weight], [None])
    with pytest.raises(ValueError, match="the weight is a stack of matrices, expected a single"):
        native.rows(weight, mx.zeros((1,), mx.int32))
    with pytest.raises(ValueError, match=r"scales is \[3, 21, 1\], expected \[3, 21, 2\]"):
        native.pack(raw.weight, raw.scales[..., :1], None, "q4", 32)
    with pytest.raises(ValueError, match=r"weight has shape .*, expected 2 or 3 dimensions"):
        native.pack(raw.weight[None], raw.scales, None, "q4", 32)
