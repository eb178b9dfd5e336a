"""Models of two layers over three and four processes, asked over HTTP by eight at once."""

import signal

import pytest

from mlxserve import LLM
from tests.distributed.asking import CLIENTS, at_once, check_close, environment, serving, tell
from tests.support import serving as in_process
from tests.support.model_dir import Packing, write_model_dir
from tests.support.tiny import tiny_gemma3, tiny_llama, tiny_qwen3

pytestmark = pytest.mark.full

SIZES = {"vocab_size": 260, "max_position_embeddings": 512, "eos_token_id": 256}
LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {"llama": (tiny_llama, {}), "qwen3": (tiny_qwen3, {}), "gemma3": (tiny_gemma3, LAYERS)}
# Heads and inner width are whole groups of weights, enough of them for four ranks.
GROUPS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
GROUPS |= {"intermediate_size": 160}
# In nats. Against packed weights, activations are rounded to 16 bits: the order of sums decides
# here and there which way.
CLOSE = {None: 1e-4, Packing(4, 32): 2e-2}
slow = pytest.mark.slow


def asked(client: int) -> dict:
    """A prompt, which is reported, and a few tokens more."""
    text = ("All begins so. " * 2 if client < 3 else "") + "abcdefgh"[client] * (2 * client + 3)
    shared = {"prompt": text, "max_tokens": 2, "echo": True, "ignore_eos": True}
    return shared | ({"temperature": 0.8, "seed": 5} if client == 4 else {"temperature": 0})


@pytest.mark.parametrize(("ranks", "name", "packing"), [
    (3, "llama", None),
    (3, "gemma3", Packing(4, 32)),
    pytest.param(3, "qwen3", None, marks=slow),
    pytest.param(3, "gemma3", None, marks=slow),
    pytest.param(3, "llama", Packing(4, 32), marks=slow),
    pytest.param(3, "qwen3", Packing(4, 32), marks=slow),
    *(pytest.param(4, name, packing, marks=slow) for name in MODELS for packing in CLOSE),
])  # fmt: skip
def test_prompts_and_answers_are_those_of_one_process(tmp_path, ranks, name, packing):
    """And one that is asked alone has the batch's, to the last bit."""
    make, options = MODELS[name]
    options = SIZES | options | ({} if packing is None else GROUPS)
    model = write_model_dir(tmp_path / "model", make(**options), packing)
    with LLM(model) as llm, in_process.serving(llm) as whole:
        right = [tell(whole.url, asked(client)) for client in range(CLIENTS)]
    env = environment(tmp_path, timeout_s=20)
    with serving(model, ranks=ranks, env=env) as server:
        got = at_once(lambda client: tell(server.url, asked(client)))
        for (ours,), (theirs,) in zip(got, right, strict=True):
            check_close(ours, theirs, CLOSE[packing])
        assert tell(server.url, asked(2)) == got[2]
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        assert not [line for line in server.lines if "is lost" in line]
