"""Decoding steps that are run from a recording: the very bits of those that are built anew."""

import queue
import threading

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.config import EngineConfig
from mlxserve.engine import forward
from mlxserve.engine.core import Core
from mlxserve.kernels import registry
from mlxserve.kernels.quantized import PackedWeight
from mlxserve.models.load import load_model
from mlxserve.types import Request, SamplingParams
from tests.support.tiny import prompt, tiny_gemma3, tiny_llama, tiny_mistral

LONG = {"max_position_embeddings": 2048}
native = pytest.mark.skipif(
    registry.recorder() is None, reason="only on machines with native kernels"
)


def quantised(tiny):
    """Its matrices in 4 bits, in groups of 32."""
    weights = dict(tiny.weights)
    for name, w in weights.items():
        if w.ndim == 2:
            q, scales, biases = mx.quantize(w.astype(mx.float16), group_size=32, bits=4)
            weights[name] = PackedWeight(q, scales, biases, 4, 32)
    return weights


MODELS = {
    "llama": lambda: tiny_llama(**LONG),
    "windows": lambda: tiny_mistral(sliding_window=70, **LONG),
    "gemma3": lambda: tiny_gemma3(**LONG),
    "capped logits": lambda: tiny_gemma3(final_logit_softcapping=5.0, **LONG),
}


def start(tiny, packed, **config):
    weights = quantised(tiny) if packed else dict(tiny.weights)
    return Core(load_model(tiny.config, weights), EngineConfig(**{"max_batch": 8, **config}))


def requests(n):
    """Rows of unequal lengths, which join and leave; some drawn, some greedy, with logprobs."""
    return [
        Request(
            id=f"r{i}",
            prompt_ids=tuple(int(t) for t in prompt(5 + 37 * i, seed=i)),
            params=SamplingParams(
                max_tokens=40 + 30 * i, top_logprobs=5, temperature=0.7 * (i % 2), seed=i
            ),
        )
        for i in range(n)
    ]


def run(core, asked):
    out = queue.SimpleQueue()
    core.admit(asked, out, 0.0)
    while core.busy:
        core.advance()
        core.check_integrity()
    got = {r.id: [] for r in asked}
    while not out.empty():
        delivery = out.get()
        assert delivery.error is None
        got[delivery.request_id].append((delivery.token_id, delivery.logprob))
    return got


@pytest.mark.full
@native
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "quantised"])
@pytest.mark.parametrize("name", MODELS)
def test_recorded_steps_give_the_same_bits(monkeypatch, name, packed):
    tiny = MODELS[name]()
    core = start(tiny, packed)
    recorded = run(core, requests(4))
    assert core.runner._forward._trusted  # they were recorded
    monkeypatch.setattr(registry, "recorder", lambda: None)
    assert recorded == run(start(tiny, packed), requests(4))


@pytest.mark.full
@native
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "quantised"])
@pytest.mark.parametrize("name", MODELS)
def test_a_row_gives_the_same_bits_alone_and_in_a_batch(name, packed):
    core = start(MODELS[name](), packed, max_batched_tokens=33)
    together = run(core, requests(5))
    for request in requests(5):
        alone = run(core, [request])
        assert alone[request.id] == together[request.id]


@native
def test_only_so_many_shapes_are_kept(monkeypatch):
    monkeypatch.setattr(forward, "MAX_PROGRAMS", 2)
    core = start(MODELS["llama"](), True)
    run(core, requests(5))
    assert 1 <= len(core.runner._forward._trusted) <= 2
    assert len(core.runner._forward._recorded) <= 2


@native
def test_an_array_of_one_step_alone_is_not_taken_for_a_weight():
    module = registry.recorder()
    weight = module.pack(mx.ones((16, 32)), None, None, "f32", 0)
    x = mx.ones((1, 32))
    mx.eval(x, weight.data)

    def step(bias):
        return module.matmul(x, [weight], [bias])

    first, again = (module.record([x], [], step(mx.array([0.0] * 16)), []) for _ in "ab")
    assert not first.agrees_with(again)
    kept = mx.zeros((16,))
    mx.eval(kept)
    first, again = (module.record([x], [], step(kept), []) for _ in "ab")
    assert first.agrees_with(again)
    (y,) = again.run([mx.full((1, 32), 2.0)], module.State([]))
    assert np.array(y).tolist() == [[64.0] * 16]


@native
def test_what_cannot_be_recorded_is_refused_by_name():
    module = registry.recorder()
    x = mx.ones((4,))
    with pytest.raises(ValueError, match="no native kernel for"):
        module.record([x], [], [mx.sin(x)], [])
    none = module.State([])
    capped = module.soft_cap(x, 30.0)
    program = module.record([x], [], [capped], [])
    with pytest.raises(ValueError, match=r"an input is \[3\], expected \[4\]"):
        program.run([mx.ones((3,))], none)
    with pytest.raises(ValueError, match="another number of inputs"):
        program.run([], none)
    with pytest.raises(ValueError, match="another number of inputs"):
        program.run([], module.State([x]))
    with pytest.raises(ValueError, match="an input is given twice"):
        module.record([x, x], [], [capped], [])
    state, constant = mx.zeros((4,)), mx.ones((3,))
    mx.eval(x, state, constant)
    for output in (x, x.reshape(2, 2), state, constant):
        with pytest.raises(ValueError, match="an output is an input or a constant"):
            module.record([x], [state], [output], [state])
    with pytest.raises(ValueError, match="or is asked for twice"):
        module.record([x], [], [capped, capped], [])


def cache_arrays():
    arrays = [mx.zeros((64, 1, 4)), mx.zeros((64, 1, 4)), mx.zeros((1, 1, 64, 4))]
    arrays.append(mx.zeros((1, 1, 64, 4)))
    mx.eval(arrays)
    return arrays


def append(module, cache, index, k):
    hot_k, hot_v, pool_k, pool_v = cache
    return module.append((hot_k, hot_v), ((pool_k,), (pool_v,)), index, (k, k), None)


@native
def test_runs_that_are_queued_write_one_state_in_turn():
    module = registry.recorder()
    index, k = mx.array([0], mx.int32), mx.ones((1, 1, 4))
    before, ones = cache_arrays(), mx.ones((4,))
    mx.eval(ones)
    after = append(module, before, index, k)
    program = module.record([index, k], before, [module.rms_norm(k, ones, 0.0)], after)
    held = cache_arrays()
    state = module.State(held)
    queued = [
        program.run([mx.array([i], mx.int32), mx.full((1, 1, 4), i + 1.0)], state)[0]
        for i in range(50)
    ]
    for output in queued:
        mx.async_eval(output)
    mx.eval(queued)
    assert held[0][:, 0, 0].tolist() == [i + 1.0 for i in range(50)] + [0.0] * 14


@native
def test_a_state_that_is_not_written_in_place_is_refused():
    module = registry.recorder()
    index, k = mx.array([0], mx.int32), mx.ones((1, 1, 4))
    before = cache_arrays()
    after = append(module, before, index, k)
    with pytest.raises(ValueError, match="another number of arrays after"):
        module.record([index, k], before, [], after[:3])
    with pytest.raises(ValueError, match="its state isn't written in place"):
        module.record([index, k], before, [], [after[1], after[0], *after[2:]])
    with pytest.raises(ValueError, match="isn't part of its state"):
        module.record([index, k, *before], [], [after[0]], [])
    again = append(module, before, index, k)  # reads what the first has written over
    with pytest.raises(ValueError, match="isn't part of its state"):
        module.record([index, k], before, [again[0]], after)


@native
def test_a_program_may_run_on_two_threads():
    module = registry.recorder()
    width = 50_000
    weight, x = mx.ones((width,)), mx.ones((4, width))
    mx.eval(weight, x)

    def step(x):
        for _ in range(3):
            x = module.rms_norm(x, weight, 1e-5)
        return x

    program, none = module.record([x], [], [step(x)], []), module.State([])
    right = []

    def use(seed):
        x = mx.random.normal((4, width), key=mx.random.key(seed))
        expected = np.array(step(x))
        right.append(
            all((np.array(program.run([x], none)[0]) == expected).all() for _ in range(60))
        )
        mx.clear_streams()

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True, True]
