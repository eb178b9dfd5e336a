"""`pull` and `ls`, without the network."""

import pytest

from mlxserve.sources.catalog import CATALOG


@pytest.fixture
def pulled(tmp_path, smollm2_gguf):
    """The default model in this test's own home, as a link to the real file."""
    folder = tmp_path / "home" / "models" / "smollm2-135m"
    folder.mkdir(parents=True)
    path = folder / CATALOG["smollm2-135m"].file_name
    path.symlink_to(smollm2_gguf)
    return path


def test_ls_without_models(here):
    done = here("ls")
    assert done.code == 0
    assert done.stdout == ""
    assert "mlxserve pull smollm2-135m" in done.stderr


def test_ls_paths_without_models(here):
    assert here("ls", "--paths") == (0, "", "")


@pytest.mark.real
def test_ls(here, pulled):
    done = here("ls")
    assert done.code == 0
    assert done.stderr == ""
    heading, row = done.stdout.splitlines()
    assert heading.split() == ["NAME", "SIZE", "PATH"]
    assert row.split() == ["smollm2-135m", "98.4", "MB", str(pulled)]


@pytest.mark.real
def test_ls_paths(here, pulled):
    assert here("ls", "--paths") == (0, f"smollm2-135m\t{pulled}\n", "")


@pytest.mark.real
def test_pull_of_a_model_that_is_here_prints_its_path(here, pulled):
    assert here("pull", "smollm2-135m") == (0, f"{pulled}\n", "")


@pytest.mark.real
def test_pull_verify_reads_it_and_quiet_says_nothing(here, pulled):
    assert here("pull", "smollm2-135m", "--verify", "--quiet") == (0, f"{pulled}\n", "")
    assert "checking" in here("pull", "smollm2-135m", "--verify").stderr


def test_pull_of_an_unknown_name(here):
    done = here("pull", "smollm3")
    assert done.code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "smollm3" in done.stderr
    assert "smollm2-135m" in done.stderr


def test_pull_without_a_name(here):
    done = here("pull")
    assert done.code == 2
    assert "MODEL" in done.stderr


def test_pull_of_a_name_that_is_not_text(here):
    done = here("pull", b"\xff")
    assert done.code == 2
    assert "MODEL isn't valid UTF-8" in done.stderr


def test_home_that_is_a_file(here, tmp_path):
    (tmp_path / "home").write_text("")
    done = here("pull", "smollm2-135m")
    assert done.code == 2
    assert done.stderr.startswith("error: ")
    assert "MLXSERVE_HOME" in done.stderr
    assert (tmp_path / "home").is_file()
