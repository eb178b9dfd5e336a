"""Under AddressSanitizer every array gets memory of its own, so that going past its end is seen."""

import os

import mlx.core as mx
import pytest

from mlxserve.config import CPU_LEVELS
from mlxserve.kernels import registry
from mlxserve.kernels.native import load

if "ASAN_OPTIONS" in os.environ:
    mx.set_cache_limit(0)


@pytest.fixture(params=CPU_LEVELS)
def native_level(request):
    """Native kernels at each instruction level that this machine has."""
    yield from _at_level(request.param)


@pytest.fixture(params=("reference", *CPU_LEVELS))
def kernel_level(request, monkeypatch):
    """References, then native kernels at each instruction level that this machine has."""
    if request.param != "reference":
        yield from _at_level(request.param)
        return
    monkeypatch.setenv("MLXSERVE_KERNELS", "reference")
    registry.forget()
    yield "reference"
    registry.forget()


def _at_level(level):
    kernels = load().module
    if kernels is None:
        pytest.skip("only on machines with native kernels")
    best = kernels.level()
    if not kernels.set_level(level):
        pytest.skip(f"only on processors with {level}")
    yield level
    kernels.set_level(best)
