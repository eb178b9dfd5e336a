"""The check of the kernel that packs pages finds what it should, with a changed stand-in."""

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels.metal import pack_check
from mlxserve.kernels.uses import SealUse
from tests.support.stand_ins.right import compute

USES = [
    SealUse("keys", 2, 64, "float16", 8),
    SealUse("keys", 3, 80, "bfloat16", 4),
    SealUse("values", 2, 80, "float16", 8),
    SealUse("values", 1, 128, "bfloat16", 4),
]


@pytest.mark.parametrize("use", USES, ids=str)
def test_what_is_right_passes(use):
    assert pack_check.check(use, compute) < 1e-6


def changed(which, edit):
    """Of codes, scales and biases, one that is edited in NumPy."""

    def run(launch):
        outs = compute(launch)
        outs[which] = mx.array(edit(np.array(outs[which])))
        return outs

    return run


def other_page(launch):
    return compute(type(launch)(
        launch.kernel, (launch.arrays[0], launch.arrays[1][::-1]), launch.template, launch.grid,
        launch.threadgroup, launch.shapes, launch.dtypes,
    ))  # fmt: skip


WRONG = {
    "scales are off": changed(1, lambda x: x * np.float16(1.02)),
    "biases are off": changed(
        2, lambda x: np.where(np.isnan(x), x, np.nan_to_num(x) + np.float16(0.05))
    ),
    "codes are two off": changed(0, lambda x: x ^ 2),
    "many codes are one off": changed(0, lambda x: x ^ 1),
    "some words are zero": changed(0, lambda x: np.where(np.arange(x.shape[-1]) % 4, x, 0)),
    "no number shows that it isn't finite": changed(2, np.nan_to_num),
    "pages are mixed up": other_page,
}


@pytest.mark.parametrize("use", USES, ids=str)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_does_not(use, wrong):
    with pytest.raises(ArithmeticError, match="packed pages"):
        pack_check.check(use, WRONG[wrong])


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (SealUse("keys", 1, 64, "float32", 8), "a cache in float32 isn't float16 or bfloat16"),
        (SealUse("values", 1, 63, "float16", 8), "head dim 63 is odd"),
        (SealUse("values", 1, 64, "float16", 8), ""),
    ],
    ids=str,
)
def test_what_it_does_not_serve_has_a_reason(use, reason):
    assert pack_check.unsupported(use) == reason


def test_it_is_timed_at_few_and_at_many_pages(monkeypatch):
    monkeypatch.setattr(pack_check, "BUDGET_S", 0.0)
    timings = pack_check.measure(USES[0], compute)
    assert [timing.rows for timing in timings] == [1, 4, 16]
    assert all(timing.kernel_s > 0 and timing.reference_s > 0 for timing in timings)
