"""Small models over two to four processes, asked over HTTP by eight at once."""

import signal

import pytest

from mlxserve import LLM
from tests.distributed.asking import CLIENTS, at_once, check_close, environment, serving, tell
from tests.support import serving as in_process
from tests.support.model_dir import Packing, write_model_dir
from tests.support.tiny import tiny_gemma3, tiny_llama, tiny_qwen3

pytestmark = pytest.mark.full

SIZES = {"vocab_size": 260, "max_position_embeddings": 512, "eos_token_id": 256}
KINDS = ["sliding_attention", "full_attention"]
MODELS = {"llama": tiny_llama, "qwen3": tiny_qwen3, "gemma3": tiny_gemma3}
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


QUICK = (
    (3, 1, "llama", None),
    (2, 2, "qwen3", None),
    (4, 2, "gemma3", Packing(4, 32)),
)
SLOW = (
    *((3, 1, name, packing) for name in MODELS for packing in CLOSE),
    *((4, 1, name, packing) for name in MODELS for packing in CLOSE),
    *((2, 2, name, packing) for name in MODELS for packing in CLOSE),
    *((3, 3, name, packing) for name in MODELS for packing in CLOSE),
    *((4, 2, name, packing) for name in MODELS for packing in CLOSE),
    (4, 4, "gemma3", None),
)


@pytest.mark.parametrize(("ranks", "stages", "name", "packing"), [
    *QUICK, *(pytest.param(*case, marks=slow) for case in SLOW if case not in QUICK)
])  # fmt: skip
def test_prompts_and_answers_are_those_of_one_process(tmp_path, ranks, stages, name, packing):
    """And one that is asked alone has the batch's, to the last bit."""
    options = SIZES | ({} if packing is None else GROUPS)
    options |= {"num_hidden_layers": max(2, stages)}
    if name == "gemma3":
        options |= {"layer_types": (KINDS * stages)[: max(2, stages)]}
    model = write_model_dir(tmp_path / "model", MODELS[name](**options), packing)
    with LLM(model) as llm, in_process.serving(llm) as whole:
        right = [tell(whole.url, asked(client)) for client in range(CLIENTS)]
    env = environment(tmp_path, timeout_s=20)
    with serving(model, ranks=ranks, stages=stages, env=env) as server:
        got = at_once(lambda client: tell(server.url, asked(client)))
        for (ours,), (theirs,) in zip(got, right, strict=True):
            check_close(ours, theirs, CLOSE[packing])
        assert tell(server.url, asked(2)) == got[2]
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        assert not [line for line in server.lines if "is lost" in line]
