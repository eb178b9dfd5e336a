"""The check of the Metal attention of chunks finds what it should, with a changed stand-in."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels import registry
from mlxserve.kernels.metal import chunk_check
from mlxserve.kernels.uses import ChunkUse
from tests.kernels.test_attention_check import column, edited, without
from tests.support.stand_ins.right import compute

USE = ChunkUse(6, 2, 64, "bfloat16", window=256, softcap=3.0, sinks=True)
PACKED = replace(USE, key_bits=8, value_bits=4)


@pytest.fixture(autouse=True)
def reference(monkeypatch):
    monkeypatch.setenv("MLXSERVE_KERNELS", "reference")
    registry.forget()
    yield
    registry.forget()


@pytest.mark.full
@pytest.mark.parametrize("use", [
    USE,
    ChunkUse(9, 3, 80, "float16", softcap=50.0),
    ChunkUse(4, 1, 256, "bfloat16", window=512),
    PACKED,
    ChunkUse(9, 3, 80, "float16", key_bits=4, value_bits=4),
], ids=str)  # fmt: skip
def test_what_is_right_passes_within_the_rounding(use):
    spacing = 2.0**-10 if use.dtype == "float16" else 2.0**-7
    assert chunk_check.check(use, compute) <= spacing / 2 * 1.01


def change(name, edit):
    """The launch, with its array of that name edited in NumPy."""

    def changed(launch):
        return edited(launch, launch.kernel.inputs.index(name), edit)

    return changed


TOKENS, START, WINDOW, BASE, SEALED = 1, 2, 3, 4, 5
MUTANTS = {
    "queries see one token less": change("rows", column(START, lambda *row: row[START] - 1)),
    "queries see one token more": change("rows", column(START, lambda *row: row[START] + 1)),
    "the window is smaller": change("rows", column(WINDOW, lambda *row: row[WINDOW] - 1)),
    "the window is larger": change("rows", column(WINDOW, lambda *row: row[WINDOW] + 1)),
    "a hot page is taken from the pool": change(
        "rows", column(SEALED, lambda *row: row[SEALED] + 1)
    ),
    "sealed pages are taken from the hot": change(
        "rows", column(SEALED, lambda *row: 0 * row[SEALED])
    ),
    "pages in another order": change("pages", lambda pages: np.roll(pages, 1)),
    "another scale": change("how", lambda how: how * np.array([1.1, 1], np.float32)),
    "other sinks": change("sinks", lambda sinks: np.roll(sinks, 1)),
    "no softcap": without("SOFTCAP"),
    "no sinks": without("SINKS"),
    "rows are mixed up": change("rows", column(0, lambda first, *_: np.roll(first, 1))),
}


@pytest.mark.full
@pytest.mark.parametrize("mutate", MUTANTS.values(), ids=MUTANTS)
def test_what_is_wrong_is_found(mutate):
    with pytest.raises(ArithmeticError, match="away from its reference"):
        chunk_check.check(USE, lambda launch: compute(mutate(launch)))


PACKED_MUTANTS = {
    "other scales of keys": change("k_scales", lambda scales: scales * np.float16(1.1)),
    "other scales of values": change("v_scales", lambda scales: scales * np.float16(1.1)),
    "codes of values from another token": change("v", lambda codes: np.roll(codes, 1, axis=2)),
    "codes of keys from another channel": change("k", lambda codes: np.roll(codes, 1, axis=2)),
}


@pytest.mark.full
@pytest.mark.parametrize("mutate", PACKED_MUTANTS.values(), ids=PACKED_MUTANTS)
def test_what_is_wrong_with_packed_pages_is_found(mutate):
    with pytest.raises(ArithmeticError, match="away from its reference"):
        chunk_check.check(PACKED, lambda launch: compute(mutate(launch)))


@pytest.mark.full
@pytest.mark.parametrize("use", [replace(USE, window=70), PACKED], ids=["plain", "packed"])
def test_kernel_and_reference_are_timed_on_the_same_rows(monkeypatch, use):
    """Of a chunk at the end of a context; and what they compute agrees."""
    monkeypatch.setattr(chunk_check, "CONTEXTS", (256,))
    monkeypatch.setattr(chunk_check, "CHUNKS", (64, 128))
    shapes = []

    def run(launch):
        rows = np.array(launch.arrays[launch.kernel.inputs.index("rows")])
        shapes.append((rows[:, 1].sum(), rows[0, 2], (rows[:, 1] + rows[:, 2]).max()))
        (out,) = compute(launch)
        assert mx.isfinite(out).all()
        return [out]

    timings = chunk_check.measure(use, run)
    assert [timing.size for timing in timings] == ["64x256", "128x256"]
    assert set(shapes) == {(64, 192, 256), (128, 128, 256)}
    assert all(timing.kernel_s > 0 and timing.reference_s > 0 for timing in timings)
