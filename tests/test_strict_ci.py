"""tests/support/ci.py: a skip is a failure in CI, unless the machine's kind explains it."""

import pytest

pytest_plugins = ["pytester"]

CASES = """
    import pytest

    def test_missing_tool():
        pytest.skip("no g++ here")

    @pytest.mark.skipif(True, reason="only on macOS")
    def test_other_machine():
        pass

    @pytest.mark.xfail(reason="known")
    def test_xfail():
        assert 0

    def test_runs():
        pass
"""


@pytest.fixture
def run(pytester, pytestconfig, monkeypatch):
    def run(ci: str, source: str):
        monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))
        monkeypatch.setenv("CI", ci)
        pytester.makepyfile(source)
        return pytester.runpytest_subprocess("-p", "tests.support.ci")

    return run


@pytest.mark.full
def test_skip_fails_in_ci(run):
    result = run("true", CASES)
    result.assert_outcomes(failed=1, skipped=1, xfailed=1, passed=1)
    result.stdout.fnmatch_lines(["*skipped in CI, where nothing may be missing: no g++ here*"])


@pytest.mark.full
def test_skip_is_a_skip_elsewhere(run):
    run("", CASES).assert_outcomes(skipped=2, xfailed=1, passed=1)


@pytest.mark.full
def test_skipped_module_fails_in_ci(run):
    result = run("true", "import pytest\npytest.importorskip('no_such_module')")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*nothing may be missing*no_such_module*"])
