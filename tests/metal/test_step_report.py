"""A step's launches and bytes are those of the committed table, and few."""

import pytest

from tests.metal import step_report

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", params=[1, 16])
def step(request):
    config, layers = step_report.SHAPES["llama-8B"]
    return step_report.step(config, layers, request.param)


def test_the_committed_table_is_that_of_the_code():
    assert step_report.TABLE.read_text() == step_report.table()


def test_a_step_moves_little_beside_weights_keys_and_values(step):
    assert 1.0 < step.ratio <= 1.05


def test_every_launch_of_a_layer_is_argued(step):
    assert set(step.layer) == set(step_report.PURPOSE)


def test_matmuls_are_seven_and_attention_is_one(step):
    """What cannot be less, counted from the model's description."""
    assert step.layer["QuantizedMatmul"] == 7
    assert step.layer["paged_attention"] == 1
    assert step.ends["QuantizedMatmul"] == 1
