"""Fixtures that several folders share."""

from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import settings

from tests.support.model_dir import write_model_dir

pytest_plugins = ["tests.support.ci"]

# Everybody runs the same examples; `pytest --hypothesis-profile explore` finds others.
settings.register_profile("same", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("same")


@pytest.fixture(autouse=True)
def same_seeds(request, monkeypatch):
    """Requests without a seed draw other ones within a test, and the same ones in every run."""
    drawn = SimpleNamespace(randbits=Random(request.node.nodeid).getrandbits)
    monkeypatch.setattr("mlxserve.sequence.secrets", drawn)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default model's file; `make test` fetches it before the tests, which use no network."""
    from mlxserve.sources.pull import installed

    for model in installed():
        if model.name == "smollm2-135m":
            return model.path
    pytest.skip("the default model is not here; `mlxserve pull smollm2-135m` fetches it")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """The file of gemma3-270m, from where the default model's comes."""
    from mlxserve.sources.pull import installed

    for model in installed():
        if model.name == "gemma3-270m":
            return model.path
    pytest.skip("gemma3-270m is not here; `mlxserve pull gemma3-270m` fetches it")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory) -> Path:
    """A tiny random llama in Hugging Face's layout, with a byte tokenizer and a chat template."""
    return write_model_dir(tmp_path_factory.mktemp("tiny-llama"))
