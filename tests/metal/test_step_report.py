"""A step's launches and bytes are those of the committed table, and few."""

import pytest

from tests.metal import step_report

pytestmark = pytest.mark.full


CASES = [(name, rows) for name in step_report.SHAPES for rows in step_report.ROWS]


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request):
    name, rows = request.param
    return name, step_report.step(step_report.SHAPES[name], rows)


@pytest.fixture
def step(case):
    return case[1]


def test_the_committed_table_is_that_of_the_code():
    assert step_report.TABLE.read_text() == step_report.table()


def test_a_step_moves_little_beside_weights_keys_and_values(step):
    assert 1.0 < step.ratio <= 1.05


def test_every_launch_of_a_layer_is_argued(step):
    assert set(step.layer) <= set(step_report.PURPOSE)


def test_matmuls_and_attention_are_those_of_the_models_description(case):
    """What cannot be less. Where there are experts: a router, and three matmuls over them."""
    name, step = case
    matmuls = {"llama-8B": (7, 0), "qwen3-30B-A3B": (5, 3)}[name]
    assert (step.layer["QuantizedMatmul"], step.layer["GatherQMM"]) == matmuls
    assert step.layer["paged_attention"] == 1
    assert step.ends["QuantizedMatmul"] == 1
    assert step.layer["add_rms_norm"] == 2
    assert step.layer["rotate"] == 1
