"""MLX's limits of memory on a Mac: with a recorder in the place of MLX."""

import types

import mlx.core as mx
import pytest

from mlxserve import device
from mlxserve.config import EngineConfig
from mlxserve.engine import engine as engine_module
from mlxserve.engine.engine import Engine
from mlxserve.errors import InvariantError, ModelError
from mlxserve.kernels import registry
from mlxserve.models.load import load_model
from tests.engine.test_engine import Failing, collect, request
from tests.support.tiny import tiny_llama

RECOMMENDED = 12_000_000_000
BEFORE = {"wired": 111, "cache": 222}
HELD = {"wired": RECOMMENDED, "cache": 600_000_000}


class Mac:
    """The part of mlx.core that `device` uses, on a Mac of 16 GB. log: limits as they were set."""

    def __init__(self):
        self.metal = types.SimpleNamespace(is_available=lambda: True)
        self.limits = dict(BEFORE)
        self.log = []

    def device_info(self):
        return {"device_name": "Apple M9", "max_recommended_working_set_size": RECOMMENDED}

    def set_wired_limit(self, limit):
        return self._set("wired", limit)

    def set_cache_limit(self, limit):
        return self._set("cache", limit)

    def _set(self, kind, limit):
        before, self.limits[kind] = self.limits[kind], limit
        self.log.append((kind, limit))
        return before


@pytest.fixture
def mac(monkeypatch):
    registry.report()  # kernels are chosen for the machine that this really is
    recorder = Mac()
    monkeypatch.setattr(device, "mx", recorder)
    return recorder


def test_limits_hold_while_an_engine_runs_and_end_after_its_memory_was_returned(mac, monkeypatch):
    tiny = tiny_llama()
    model = load_model(tiny.config, dict(tiny.weights), compute_dtype=mx.float32)
    release = engine_module.release_thread
    monkeypatch.setattr(
        engine_module, "release_thread", lambda: (release(), mac.log.append("memory returned"))
    )
    seen = []
    engine = Engine(lambda: seen.append(dict(mac.limits)) or model, EngineConfig(max_batch=2))
    collect(engine, [request([1, 2], max_tokens=3)])
    assert seen == [HELD]  # before the weights were loaded
    assert mac.limits == HELD
    engine.close()
    assert mac.limits == BEFORE
    assert mac.log[2:] == ["memory returned", ("wired", 111), ("cache", 222)]


def test_a_model_that_does_not_load_leaves_the_limits_as_they_were(mac):
    def load():
        raise ModelError("no such model")

    with pytest.raises(ModelError, match="no such model"):
        Engine(load, EngineConfig())
    assert mac.limits == BEFORE


def test_an_engine_that_dies_restores_them(mac):
    tiny = tiny_llama()
    model = load_model(tiny.config, dict(tiny.weights), compute_dtype=mx.float32)
    failing = Failing(model, InvariantError("broken"), call=2)
    engine = Engine(lambda: failing, EngineConfig(max_batch=2))
    assert "broken" in str(collect(engine, [request([1])])["r"][-1].error)
    engine._thread.join(timeout=60)
    assert mac.limits == BEFORE
    engine.close()
    assert len(mac.log) == 4


def test_the_first_engine_sets_them_and_the_last_restores_them(mac):
    first, second = device.wired_memory(), device.wired_memory()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert mac.limits == HELD
    second.__exit__(None, None, None)
    assert mac.limits == BEFORE
    assert len(mac.log) == 4
    with device.wired_memory():
        assert mac.limits == HELD


def test_a_cpu_has_none(mac, monkeypatch):
    monkeypatch.setattr(mac.metal, "is_available", lambda: False)
    with device.wired_memory():
        pass
    assert mac.log == []
