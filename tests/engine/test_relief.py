"""Memory that is given back when the system runs short of it; a stand-in says when that is."""

import ctypes
import logging
import time

import pytest

from mlxserve import device
from mlxserve.device import Pressure
from mlxserve.engine import relief
from tests.engine.test_engine import MODELS, collect, request, start, tokens
from tests.support.tiny import prompt


class System:
    """Says how short of memory it is, once or for as long as it lasts."""

    def __init__(self):
        self.level, self.lasts = Pressure.NORMAL, True

    def __call__(self):
        level = self.level
        if not self.lasts:
            self.level = Pressure.NORMAL
        return level


@pytest.fixture
def system(monkeypatch):
    stand_in = System()
    monkeypatch.setattr(device, "pressure_signal", lambda: stand_in)
    monkeypatch.setattr(relief, "CHECK_S", 0.01)
    return stand_in


def asked(n=3, tokens=700, **params):
    return [
        request(prompt(tokens, seed=i), name=f"r{i}", **{"max_tokens": 20, **params})
        for i in range(n)
    ]


def until(condition):
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kv_bits", [None, 8])
def test_prefixes_go_and_their_memory_too_and_answers_stay_the_same(system, model, kv_bits, caplog):
    caplog.set_level(logging.WARNING, relief.__name__)
    engine = start(MODELS[model](), kv_bits=kv_bits)
    try:
        small = collect(engine, [request(prompt(10), max_tokens=1)])
        assert tokens(small["r"])
        least = engine.call(lambda core: core.storage.nbytes)
        before = {name: tokens(got) for name, got in collect(engine, asked()).items()}
        until(lambda: engine.stats.pages_cached)
        held = engine.stats.cache_bytes
        assert held > 1.5 * least
        system.level = Pressure.CRITICAL
        until(lambda: engine.stats.pages_cached == 0)
        assert engine.stats.cache_bytes == least
        assert "the system is short of memory (critical)" in caplog.text
        assert f"{(held - least) / 1e6:.1f} MB are given back" in caplog.text
        system.level = Pressure.NORMAL
        again = collect(engine, asked())
        assert {name: tokens(got) for name, got in again.items()} == before
        assert all(got[-1].usage.cached_tokens == 0 for got in again.values())
        until(lambda: engine.stats.pages_cached)  # and kept as before
        assert all(got[-1].usage.cached_tokens for got in collect(engine, asked()).values())
    finally:
        engine.close()


@pytest.mark.full
def test_at_a_warning_the_oldest_half_goes(system):
    engine = start(MODELS["llama"]())
    try:
        for one in asked(4, tokens=320):  # of five pages each
            collect(engine, [one])
        until(lambda: engine.stats.pages_cached >= 20)
        system.lasts = False  # first: it may be asked at any time
        system.level = Pressure.WARNING
        until(lambda: engine.stats.pages_cached <= 12)
        cached = {}
        for one in asked(4, tokens=320):
            got = collect(engine, [one])[one.id]
            cached[one.id] = got[-1].usage.cached_tokens
        assert cached["r3"] >= 256
        assert cached["r2"] >= 256
        assert cached["r0"] == 0
    finally:
        engine.close()


@pytest.mark.full
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_requests_under_way_lose_nothing(system, model):
    engine = start(MODELS[model](), max_batch=3)
    try:
        wanted = asked(6, max_tokens=60)
        calm = {name: tokens(got) for name, got in collect(engine, wanted).items()}
        system.level = Pressure.CRITICAL
        until(lambda: engine.stats.pages_cached == 0)
        short = {name: tokens(got) for name, got in collect(engine, wanted).items()}
        assert short == calm
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("failed", "told", "level"),
    [
        (0, 1, Pressure.NORMAL),
        (0, 2, Pressure.WARNING),
        (0, 4, Pressure.CRITICAL),
        (-1, 4, Pressure.NORMAL),  # a system that has no such level
    ],
)
def test_macos_is_asked_by_its_own_name_and_in_its_own_numbers(failed, told, level):
    def sysctlbyname(name, at, size, new, new_size):
        assert name == b"kern.memorystatus_vm_pressure_level"
        assert (new, new_size) == (None, 0)
        ctypes.cast(at, ctypes.POINTER(ctypes.c_int))[0] = told
        return failed

    assert device._PressureLevel(sysctlbyname)() is level


@pytest.mark.skipif(device.pressure_signal() is None, reason="only on Macs")
def test_this_mac_says_how_short_of_memory_it_is():
    signal = device.pressure_signal()
    assert signal is not None
    assert signal() in Pressure
