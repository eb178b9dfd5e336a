"""A model and a server for each module."""

import openai
import pytest

import mlxserve
from tests.support.serving import TIMEOUT_S, serving


@pytest.fixture(scope="module")
def llm(tiny_model_dir):
    with mlxserve.load(tiny_model_dir, max_batch=8) as model:
        yield model


@pytest.fixture(scope="module")
def server(llm):
    with serving(llm) as served:
        yield served


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as made:
        yield made
