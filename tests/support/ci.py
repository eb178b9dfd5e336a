"""Pytest hooks: in CI a skipped test is a failed one, because there every tool must be there.

A skip that no installation could avoid says so: its reason begins with "only on", as in
`pytest.skip("only on macOS")`.
"""

import os

import pytest

_ALLOWED = "only on "


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Turn a test's skip into a failure where CI=true."""
    report = yield
    if not hasattr(report, "wasxfail"):
        _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """The same for a whole module, as `pytest.importorskip` skips it."""
    report = yield
    _fail_if_skipped(report)
    return report


def _fail_if_skipped(report) -> None:
    if os.environ.get("CI") != "true" or report.outcome != "skipped":
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if not reason.startswith(_ALLOWED):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, where nothing may be missing: {reason}"
