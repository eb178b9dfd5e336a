"""`pull`, `ls` and `rm` of the catalog's models, without the network."""

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


@pytest.fixture(autouse=True)
def _empty_hub_cache(tmp_path, monkeypatch):
    """The models that the person who runs the tests has must not show up."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


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
    assert heading.split() == ["NAME", "SIZE", "TYPE", "PATH"]
    assert row.split() == ["smollm2-135m", "98.4", "MB", "gguf", str(pulled)]


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


@pytest.mark.real
def test_rm(here, pulled, smollm2_gguf):
    done = here("rm", "smollm2-135m")
    assert (done.code, done.stdout) == (2, "")
    assert "no terminal to ask at; smollm2-135m: add --yes" in done.stderr
    assert pulled.exists()
    done = here("rm", "smollm2-135m", "--yes")
    assert (done.code, done.stdout) == (0, "")
    assert done.stderr.startswith("removed smollm2-135m, ")
    assert not pulled.is_symlink()
    assert smollm2_gguf.exists()
    assert "is not on this machine" in here("rm", "smollm2-135m", "--yes").stderr


@pytest.mark.parametrize("name", [".", "/", "..", "~", "./x", "smollm3", "", "a/../..", "a/b\\c"])
def test_rm_takes_names_only(here, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_text("")
    done = here("rm", name, "--yes")
    assert done.code == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert (tmp_path / "x").exists()


def test_pull_of_a_path(here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").write_text("")
    assert "already here; give a name" in here("pull", "./m.gguf").stderr
