"""Which layers each stage of a pipeline has."""

import mlx.core as mx
import pytest

from mlxserve.config import EngineConfig
from mlxserve.distributed.placement import Power, alike_on_one_host, place_stages
from mlxserve.errors import RequestError
from mlxserve.opening import open_model
from tests.support.model_dir import write_weights
from tests.support.tiny import tiny_llama

GIB = 2**30
LAYERS = 12
SIZES = {"num_hidden_layers": LAYERS, "vocab_size": 64, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Of twelve layers, beside which its embedding is small."""
    path = write_weights(
        tmp_path_factory.mktemp("placed") / "model", tiny_llama(**SIZES), dtype=mx.float32
    )
    return open_model(path, EngineConfig())


def counts(opened, powers, tensor=1):
    ranges = place_stages(opened, [Power(*power) for power in powers], tensor)
    assert [i for some in ranges for i in some] == list(range(LAYERS))
    return [len(some) for some in ranges]


@pytest.mark.parametrize(("speeds", "expected"), [
    ((100, 100), [6, 6]),
    ((100, 90), [6, 6]),  # that may be noise
    ((200, 100), [8, 4]),
    ((100, 300, 200), [2, 6, 4]),
])  # fmt: skip
def test_faster_machines_have_more_layers(opened, speeds, expected):
    assert counts(opened, [(GIB, speed) for speed in speeds]) == expected


def test_ranks_of_one_machine_are_alike_whatever_they_measured():
    powers = {1: Power(2, 50), 0: Power(1, 100), 2: Power(3, 70)}
    found = alike_on_one_host(powers, {0: "mini", 1: "mini", 2: "studio"})
    assert found == [Power(1, 100), Power(2, 100), Power(3, 70)]


def test_a_stage_is_as_fast_as_its_slowest_rank(opened):
    speeds = (100, 100, 300, 50)
    assert counts(opened, [(GIB, speed) for speed in speeds], tensor=2) == [8, 4]


def test_no_machine_has_more_than_its_memory_holds(opened):
    layer = opened.weight_bytes() // LAYERS
    assert counts(opened, [(100 * layer, 100), (4 * layer, 100)]) == [9, 3]


def test_what_fits_nowhere_is_refused(opened):
    little = opened.weight_bytes() // 4
    with pytest.raises(RequestError, match="no division of them fits"):
        counts(opened, [(little, 100), (little, 100)])


def test_more_stages_than_layers_are_refused(opened):
    with pytest.raises(RequestError, match=r"13 stages, and the model has 12 layers; use 12"):
        counts(opened, [(GIB, 100)] * 13)


def test_the_first_stage_has_the_head_beside_its_layers(tmp_path):
    """It has fewer of these where its memory holds no more."""
    path = write_weights(tmp_path / "model", tiny_llama(**SIZES | {"vocab_size": 4096}))
    opened = open_model(path, EngineConfig())
    assert counts(opened, [(GIB, 100)] * 2) == [6, 6]
    assert counts(opened, [(opened.weight_bytes() * 3 // 4, 100)] * 2) == [3, 9]
