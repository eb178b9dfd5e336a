"""The tests of Metal kernels, which run them in the emulator."""

import pytest

from tests.support.metal import unavailable


@pytest.fixture(autouse=True, scope="session")
def emulator():
    """Skips where there is no emulator; in CI that is a failure."""
    if reason := unavailable():
        pytest.skip(reason)
