"""What the Metal kernels move: within their targets, and as the committed table says.

Counting is slow, so `make test` has some rows of each section, and `make test-slow` all.
"""

import pytest

from tests.metal import chunk_cost, matmul_cost, pack_cost, rows_cost
from tests.metal.cost_report import CASES, LENGTHS, TABLE, Case, measure, table
from tests.support.metal import cost

# Hot, so token-major, as complete pages aren't left: 160 bytes of a head, then those of the other.
ACROSS_LINES = Case(3, 80, 2, sealed=False)


# Of each section: every kind of pages, of heads and of groups, every number of bits.
SOME_ROWS = [Case(1, 128), ACROSS_LINES, Case(8, 64, bits=8), Case(3, 128, bits=4)]
SOME_PACKED = [
    pack_cost.Case(True, 64, 8), pack_cost.Case(True, 80, 4),
    pack_cost.Case(False, 80, 8), pack_cost.Case(False, 128, 4),
]  # fmt: skip
SOME_MATMULS = [
    matmul_cost.Case(1), matmul_cost.Case(16), matmul_cost.Case(8, group=128),
    matmul_cost.Case(8, bits=8), matmul_cost.Case(8, 576, 576),
]  # fmt: skip
SOME_CHUNKS = [
    case
    for case in chunk_cost.CASES
    if (case.group, case.dim, case.bits) in ((3, 64, 0), (1, 128, 8), (8, 128, 4))
]


@pytest.fixture(
    scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"]
)
def every(request):
    """Whether all rows are counted."""
    return request.param


@pytest.fixture(scope="module")
def rows(every):
    return {case: measure(case, LENGTHS) for case in (CASES if every else SOME_ROWS)}


@pytest.fixture(scope="module")
def matmul_rows(every):
    cases = matmul_cost.CASES if every else SOME_MATMULS
    return {case: matmul_cost.measure(case) for case in cases}


@pytest.fixture(scope="module")
def pack_rows(every):
    cases = pack_cost.CASES if every else SOME_PACKED
    return {case: pack_cost.measure(case) for case in cases}


@pytest.fixture(scope="module")
def row_wise():
    return {case: rows_cost.measure(case) for case in rows_cost.CASES}


@pytest.fixture(scope="module")
def chunk_rows(every):
    cases = chunk_cost.CASES if every else SOME_CHUNKS
    return {case: chunk_cost.measure(case) for case in cases}


@pytest.mark.full
def test_the_committed_table_is_that_of_the_kernels(
    every, rows, pack_rows, matmul_rows, row_wise, chunk_rows
):
    text = table(rows) + pack_cost.table(pack_rows) + matmul_cost.table(matmul_rows)
    text += rows_cost.table(row_wise) + chunk_cost.table(chunk_rows)
    committed = TABLE.read_text("utf-8")
    if not every:
        counted = set(text.splitlines())
        committed = "".join(f"{x}\n" for x in committed.splitlines() if x in counted)
    assert committed == text, "run `python -m tests.metal.cost_report --write`"


@pytest.mark.full
def test_pages_are_read_once_and_whole(rows):
    assert ACROSS_LINES in rows
    for case, row in rows.items():
        assert row.cache_loads <= 1.01, case
        assert row.bytes_ratio <= 1.10, case
        if case != ACROSS_LINES:
            assert row.transactions_ratio <= 1.15, case
            assert row.coalescing <= 1.03, case


@pytest.mark.full
def test_weights_are_read_once_and_whole(matmul_rows):
    for case, row in matmul_rows.items():
        assert row.weight_bytes_ratio == 1, case
        assert row.bytes_ratio <= 1.05, case
        if case.inputs >= 4096:
            assert row.lines_ratio <= 1.15, case


@pytest.mark.full
def test_pages_are_packed_in_one_reading(pack_rows):
    for case, row in pack_rows.items():
        assert row.bytes_ratio <= 1.01, case
        if case.dim != 80:
            assert row.lines_ratio <= 1.10, case


@pytest.mark.full
def test_rows_are_read_and_written_once(row_wise):
    for case, row in row_wise.items():
        assert row.bytes_ratio == 1, case
        assert row.lines_ratio == (2 if case.sizes[-1] == 64 else 1), case


@pytest.mark.full
def test_a_block_reads_what_it_sees_once(chunk_rows):
    for case, row in chunk_rows.items():
        assert row.moved_bytes <= 1.02 * row.least_bytes, case
        assert row.lines <= (1.40 if case.bits else 1.17) * row.least_bytes / 128, case


@pytest.mark.full
def test_pages_of_queries_add_up_to_a_chunk():
    case = chunk_cost.Case(128, 128, 3, 64)
    counted = cost(chunk_cost.launch_of(case))
    whole, added = chunk_cost.row_of(case, counted), chunk_cost.measure(case)
    assert (whole.least_bytes, whole.barriers) == (added.least_bytes, added.barriers)
    assert whole.cache_bytes == added.cache_bytes
    assert whole.operations == added.operations
    assert whole.moved_bytes == pytest.approx(added.moved_bytes, rel=1e-4)  # but for tables
    assert whole.lines == pytest.approx(added.lines, rel=1e-3)
