"""The checks of norms and rotations find what they should, with a changed stand-in."""

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels.metal import norm_check, rope_check
from mlxserve.kernels.uses import NormUse, RopeUse
from tests.support.stand_ins.right import compute

USES = [
    (norm_check, NormUse(576, "float16")),
    (norm_check, NormUse(640, "bfloat16", inner=True)),
    (rope_check, RopeUse(9, 3, 64, "float16")),
    (rope_check, RopeUse(4, 1, 256, "bfloat16", norms=True)),
]
EACH_USE = pytest.mark.parametrize(("checks", "use"), USES, ids=lambda value: str(value)[:30])


@EACH_USE
def test_what_is_right_passes(checks, use):
    assert 0 < checks.check(use, compute) < 2.0**-8


def changed(which, edit):
    """One of the results, edited in NumPy."""

    def run(launch):
        outs = compute(launch)
        wide = np.array(outs[which].astype(mx.float32))
        outs[which] = mx.array(edit(wide)).astype(outs[which].dtype)
        return outs

    return run


def one_off(x):
    x.flat[-1] += np.abs(x).max() / 16
    return x


WRONG = {
    "a first result is off": changed(0, one_off),
    "a second result is off": changed(1, one_off),
    "all is a little large": changed(1, lambda x: x * 1.02),
    "rows are mixed up": changed(0, lambda x: x[::-1].copy()),
    "a result is missing": changed(1, lambda x: np.where(np.arange(x.shape[-1]) == 7, np.nan, x)),
}


@EACH_USE
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_does_not(checks, use, wrong):
    with pytest.raises(ArithmeticError, match=f"{use.op} is .* away from its reference"):
        checks.check(use, WRONG[wrong])


def test_angles_that_are_right_at_first_positions_only_are_found():
    """As float32 quotients are, which MLX's own kernel has."""

    def run(launch):
        q, k, positions, *others = launch.arrays
        near = mx.minimum(positions, 100)
        arrays = (q, k, near, *others)
        return compute(type(launch)(
            launch.kernel, arrays, launch.template, launch.grid, launch.threadgroup,
            launch.shapes, launch.dtypes,
        ))  # fmt: skip

    with pytest.raises(ArithmeticError):
        rope_check.check(RopeUse(1, 1, 64, "float16"), run)


@pytest.mark.parametrize(("checks", "use", "reason"), [
    (norm_check, NormUse(576, "float32"), "activations in float32 aren't float16 or bfloat16"),
    (norm_check, NormUse(578, "float16"), "a width of 578 isn't a multiple of 4 from 8 to 32768"),
    (norm_check, NormUse(4, "float16"), "a width of 4 isn't a multiple of 4 from 8 to 32768"),
    (norm_check, NormUse(32_772, "float16"), "a width of 32772 isn't"),
    (rope_check, RopeUse(1, 1, 64, "float32"), "activations in float32 aren't"),
    (rope_check, RopeUse(1, 1, 66, "float16"), "head dim 66 isn't a multiple of 4 from 16 to 512"),
    (norm_check, NormUse(32_768, "bfloat16", inner=True), ""),
    (rope_check, RopeUse(1, 1, 512, "bfloat16", norms=True), ""),
])  # fmt: skip
def test_what_they_do_not_serve_has_a_reason(checks, use, reason):
    named = checks.unsupported(use)
    assert named.startswith(reason) if reason else named == ""


@EACH_USE
def test_they_are_timed_for_one_row_and_for_many(checks, use, monkeypatch):
    monkeypatch.setattr(checks, "BUDGET_S", 0.0)
    monkeypatch.setattr(checks, "CALLS", 2)
    monkeypatch.setattr(checks, "TIMED_ROWS", (1, 3))
    timings = checks.measure(use, compute)
    assert [timing.rows for timing in timings] == [1, 3]
    assert all(timing.kernel_s > 0 and timing.reference_s > 0 for timing in timings)
