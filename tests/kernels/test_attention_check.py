"""The check of the Metal attention finds what it should: with a stand-in that is changed."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels import registry
from mlxserve.kernels.metal import attention_check
from mlxserve.kernels.uses import AttentionUse
from tests.support.stand_ins.right import compute

USE = AttentionUse(6, 2, 64, "bfloat16", window=256, softcap=3.0, sinks=True)
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
    AttentionUse(32, 8, 128, "float16"),
    AttentionUse(9, 3, 80, "float16", softcap=50.0),
    AttentionUse(4, 1, 256, "bfloat16", window=512),
    AttentionUse(8, 8, 192, "bfloat16", sinks=True),
    AttentionUse(2, 1, 72, "float16", window=1),
    PACKED,
    AttentionUse(9, 3, 80, "float16", key_bits=4, value_bits=4),
    AttentionUse(4, 1, 256, "bfloat16", window=512, key_bits=8),
], ids=str)  # fmt: skip
def test_what_is_right_passes_within_the_rounding(use):
    spacing = 2.0**-10 if use.dtype == "float16" else 2.0**-7
    assert attention_check.check(use, compute) <= spacing / 2 * 1.01


def parts(number, edit):
    """The first launch, with its array of that number edited in NumPy."""
    return "paged_attention", lambda launch: edited(launch, number, edit)


def merge(number, edit):
    """The second."""
    return "paged_attention_merge", lambda launch: edited(launch, number, edit)


def edited(launch, number, edit):
    arrays = list(launch.arrays)
    arrays[number] = mx.array(edit(np.array(arrays[number])))
    return replace(launch, arrays=tuple(arrays))


def column(number, edit):
    """An edit of one column of a table, which is given the others too."""

    def change(table):
        table[:, number] = edit(*table.T)
        return table

    return change


def other_order(work):
    return np.concatenate([work[:, :4], np.roll(work[:, 4:], 1, axis=1)], axis=1)


def without(option):
    def change(launch):
        template = dict(launch.template) | {option: False}
        return replace(launch, template=tuple(template.items()))

    return change


BEGIN, END, SEALED = 1, 2, 3  # of work
FIRST_ITEM, ITEMS = 0, 1  # of rows
LATE = column(BEGIN, lambda t, begin, end, *_: begin + ((begin > 0) & (end - begin > 1)))
EARLY = column(BEGIN, lambda t, begin, *_: begin - (begin > 0))
MUTANTS = {
    "the newest token is left out": parts(
        5, column(END, lambda t, begin, end, *_: end - (end - begin > 1))
    ),
    "one beyond it is read": parts(5, column(END, lambda t, begin, end, *_: end + (end % 64 > 0))),
    "the window begins late": parts(5, LATE),
    "the window begins early": parts(5, EARLY),
    "a hot page is taken from the pool": parts(5, column(SEALED, lambda *row: row[SEALED] + 1)),
    "sealed pages are taken from the hot": parts(5, column(SEALED, lambda *row: 0 * row[SEALED])),
    "pages in another order": parts(5, other_order),
    "another scale": parts(6, lambda how: how * np.array([1.1, 1], np.float32)),
    "no softcap": ("paged_attention", without("SOFTCAP")),
    "no sinks": ("paged_attention_merge", without("SINKS")),
    "no last part": merge(2, column(ITEMS, lambda *row: row[ITEMS] - (row[ITEMS] > 1))),
    "no first part": merge(2, column(FIRST_ITEM, lambda *row: row[FIRST_ITEM] + (row[ITEMS] > 1))),
    "rows are mixed up": merge(2, lambda rows: np.roll(rows, 1, axis=0)),
}


@pytest.mark.parametrize(("kernel", "mutate"), MUTANTS.values(), ids=MUTANTS)
def test_what_is_wrong_is_found(kernel, mutate):
    def run(launch):
        return compute(mutate(launch) if launch.kernel.name == kernel else launch)

    with pytest.raises(ArithmeticError, match="away from its reference"):
        attention_check.check(USE, run)


def packed(number, edit):
    """The launch over packed pages, edited likewise."""
    return "packed_attention", lambda launch: edited(launch, number, edit)


PACKED_MUTANTS = {
    "the window begins late": packed(7, LATE),
    "the window begins early": packed(7, EARLY),
    "other scales of keys": packed(2, lambda scales: scales * np.float16(1.1)),
    "other scales of values": packed(5, lambda scales: scales * np.float16(1.1)),
    "codes of values from another token": packed(4, lambda codes: np.roll(codes, 1, axis=2)),
    "pages in another order": packed(7, other_order),
    "no softcap": ("packed_attention", without("SOFTCAP")),
    "no newer parts": ("paged_attention_merge", without("NEWER")),
    "no newest part": merge(5, column(ITEMS, lambda *row: 0 * row[ITEMS])),
}


@pytest.mark.parametrize(("kernel", "mutate"), PACKED_MUTANTS.values(), ids=PACKED_MUTANTS)
def test_what_is_wrong_with_packed_pages_is_found(kernel, mutate):
    def run(launch):
        return compute(mutate(launch) if launch.kernel.name == kernel else launch)

    with pytest.raises(ArithmeticError, match="away from its reference"):
        attention_check.check(PACKED, run)


def test_outputs_that_are_not_numbers_are_found():
    def run(launch):
        return [out * mx.nan for out in compute(launch)]

    with pytest.raises(ArithmeticError, match="attention is nan away from its reference"):
        attention_check.check(USE, run)
