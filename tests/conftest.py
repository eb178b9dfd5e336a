"""Fixtures that several folders share. A test that would skip for something missing fails under CI."""

import os
from pathlib import Path

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Under CI a skip is a failure: there, everything the tests need is installed."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped under CI=true: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default model's file; `make test` fetches it before the tests, which use no network."""
    from mlxserve.sources.pull import installed

    for model in installed():
        if model.name == "smollm2-135m":
            return model.path
    pytest.skip("the default model is not here; `mlxserve pull smollm2-135m` fetches it")
