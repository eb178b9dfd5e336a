"""`bench kernels`: figures of what ops reach, of sizes that can be counted by hand."""

import itertools
import json

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels import bench, registry

CASES = bench.cases()


def arrays(result):
    """All arrays in what a call returns."""
    if isinstance(result, mx.array):
        return [result]
    return [array for part in result for array in arrays(part)]


@pytest.mark.full
def test_a_table_and_a_file(cli, tmp_path):
    done = cli("bench", "kernels", "--op", "norm", "--seconds", "0.01", "--json", tmp_path / "f")
    assert done.code == 0, done.stderr
    limits, head, *rows = done.stdout.splitlines()
    assert "GB/s" in limits
    assert "GFLOP/s" in limits
    assert head.split()[:2] == ["OP", "SIZE"]
    assert [row.split()[:3] for row in rows] == [["norm", "1", "rows"], ["norm", "16", "rows"]]
    told = json.loads((tmp_path / "f").read_text())
    assert told["bytes_per_s"] > 1e8
    assert told["flops_per_s"] > 1e8
    for row, op in zip(rows, told["ops"], strict=True):
        assert op["implementation"] in row
        assert op["seconds"] > 0
        assert f"{op['bytes'] / op['seconds'] / 1e9:.3g}" in row


@pytest.mark.full
def test_an_op_that_there_is_not_is_refused_with_those_that_there_are(cli):
    done = cli("bench", "kernels", "--op", "softmax")
    assert done.code == 2
    assert "'softmax'" in done.stderr
    assert "matmul, attention, append" in done.stderr


@pytest.mark.parametrize(
    ("op", "size", "moved", "flops"),
    [
        # 4 bits and two 16-bit numbers for 64 weights; x and y in float32 on a CPU
        ("matmul", "1 x 2048 -> 8192, 4 bits", 8192 * 2048 * 4.5 / 8 + 4 * 10240, 2 * 2048 * 8192),
        ("attention", "8 x 4096 tokens, 16 bits", 8 * (4096 * 8 * 64 * 4 + 2 * 8192), 2**28),
        (
            "attention",
            "last 512 of 4096 tokens",
            4096 * 8 * 64 * 4 + 2 * 512 * 8192,
            4 * 2048 * (3584 * 512 + 512 * 513 // 2),
        ),
        ("append", "4 pages to 16 bits", 2 * 4 * 64 * 8 * 64 * 4, 0),
        ("select", "16 x 128256", 16 * 128256 * 4, 0),
    ],
)
def test_bytes_and_operations_are_those_counted_by_hand(op, size, moved, flops):
    (case,) = (case for case in CASES if (case.op, case.size) == (op, size))
    assert case.moved == moved
    assert case.flops == flops


def test_packed_pages_are_smaller_by_their_bits():
    moved = {case.size: case.moved for case in CASES if case.op == "attention"}
    plain = moved["8 x 4096 tokens, 16 bits"]
    assert 0.5 < moved["8 x 4096 tokens, 8 bits"] / plain < 0.56
    assert 0.25 < moved["8 x 4096 tokens, 4 bits"] / plain < 0.32


@pytest.mark.parametrize("op", ["norm", "rope", "gated", "select", "append"])
def test_both_sides_of_a_comparison_compute_the_same(op):
    """Two calls after another, as they are timed."""
    case = next(case for case in CASES if case.op == op)
    call = case.make(3)
    got = [np.array(array) for _ in range(2) for array in arrays(call())]
    with registry.references():
        call = case.make(3)
        expected = [np.array(array) for _ in range(2) for array in arrays(call())]
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_references_are_used_only_meanwhile():
    before = {op: registry.native(op) for op in registry.OPS}
    with registry.references():
        assert not any(registry.native(op) for op in registry.OPS)
    assert {op: registry.native(op) for op in registry.OPS} == before


def test_a_call_that_takes_longer_than_the_budget_is_made_once(monkeypatch):
    calls = []

    def timed(run):
        before = len(calls)
        run()
        return 0.25 * (len(calls) - before) / 16  # exact in binary

    def make(number):
        return lambda: calls.append(number) or mx.zeros(1)

    monkeypatch.setattr(bench, "_timed", timed)
    case = bench.Case("norm", "one", 1 << 20, 0, make)
    assert bench._seconds(case, 0.015) == 0.25 / 16
    assert calls == [0]
    assert bench._seconds(case, 0.045) == 0.25 / 16  # one after another: three layers fit
    assert set(calls) == {0, 1, 2}
    monkeypatch.setattr(bench, "_timed", lambda run: run() or 1e-6)
    assert bench._seconds(case, 0.001) == pytest.approx(1e-6 / 16)
    assert set(calls) == set(range(16))  # and no more than there are


def test_the_first_call_which_compiles_does_not_count(monkeypatch):
    took = itertools.chain([0.01], itertools.repeat(0.002))
    monkeypatch.setattr(bench, "_timed", lambda run: next(took))
    case = bench.Case("norm", "one", 1 << 30, 0, lambda number: mx.zeros(1))
    assert bench._seconds(case, 0.02) == 0.002
