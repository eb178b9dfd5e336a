"""The Python API as a notebook uses it, on a tiny random model with a byte tokenizer."""

import gc
import json
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import mlxserve
from mlxserve import ModelError, RequestError
from mlxserve.errors import EngineDead
from mlxserve.types import Request, SamplingParams
from tests.support.model_dir import END_ID, write_model_dir
from tests.support.tiny import reference_logits, tiny_llama

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm(tiny_model_dir):
    with mlxserve.load(tiny_model_dir, max_batch=8) as model:
        yield model


def raw_bytes(llm, completion):
    return b"".join(llm.tokenizer.token_bytes(t) for t in completion.token_ids)


def test_text_messages_and_ids_are_prompts(llm):
    by_text = mlxserve.generate(llm, "Hello", max_tokens=6)
    ids = llm.tokenizer.encode("Hello")
    for by_ids in (ids, np.array(ids)):
        assert mlxserve.generate(llm, by_ids, max_tokens=6).token_ids == by_text.token_ids
    by_chat = mlxserve.generate(llm, CHAT, max_tokens=6)
    rendered = mlxserve.generate(llm, "<|user|>Hi<|end|><|assistant|>", max_tokens=6)
    assert by_chat.token_ids == rendered.token_ids
    assert by_chat.usage.prompt_tokens == 5


def test_a_list_of_prompts_gives_a_list_in_order(llm):
    prompts = ["one", CHAT, [1, 2, 3], "two"]
    together = mlxserve.generate(llm, prompts, max_tokens=7)
    alone = [mlxserve.generate(llm, prompt, max_tokens=7) for prompt in prompts]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


def test_a_completion_says_what_it_took(llm):
    got = mlxserve.generate(llm, "Hello", max_tokens=9, ignore_eos=True)
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (5, 9)
    assert len(got.token_ids) == 9
    assert got.finish_reason == "length"
    assert got.logprobs is None
    for rate in (got.timings.ttft_s, got.timings.prefill_tokens_per_s):
        assert rate > 0
    assert got.timings.decode_tokens_per_s > 0
    assert str(got) == got.text == raw_bytes(llm, got).decode(errors="replace")


def test_streamed_text_is_the_whole_text(llm):
    how = {"max_tokens": 60, "temperature": 1.5, "seed": 3}
    pieces = list(mlxserve.stream(llm, "Once", **how))
    whole = mlxserve.generate(llm, "Once", **how)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [p.completion is None for p in pieces] == [True] * (len(pieces) - 1) + [False]
    assert pieces[-1].completion.token_ids == whole.token_ids


def test_a_stop_string_ends_the_text_across_token_borders(llm):
    free = mlxserve.generate(llm, "Once", max_tokens=80, ignore_eos=True).text
    stop = free[20:23]  # three characters: with one token per byte, at least three tokens
    at = free.index(stop)
    got = mlxserve.generate(llm, "Once", max_tokens=80, ignore_eos=True, stop=[stop])
    assert (got.text, got.finish_reason) == (free[:at], "stop")
    assert got.usage.completion_tokens < 80
    pieces = mlxserve.stream(llm, "Once", max_tokens=80, ignore_eos=True, stop=stop)
    assert "".join(piece.text for piece in pieces) == free[:at]


def test_a_stop_string_in_one_row_leaves_the_others_alone(llm):
    free = mlxserve.generate(llm, "Once", max_tokens=50, ignore_eos=True)
    stop = free.text[10:12]
    both = mlxserve.generate(llm, ["Once", "xyz"], max_tokens=50, ignore_eos=True, stop=stop)
    other = mlxserve.generate(llm, "xyz", max_tokens=50, ignore_eos=True, stop=stop)
    assert both[0].text == free.text[: free.text.index(stop)]
    assert both[1].token_ids == other.token_ids


def test_the_models_end_token_ends_and_is_no_text(llm):
    got = mlxserve.generate(llm, "Once", max_tokens=20, logit_bias={END_ID: 1000.0})
    assert (got.text, got.token_ids, got.finish_reason) == ("", (END_ID,), "stop")
    ids = [ord("a") - 33, END_ID]  # both are likely; the end token is held off for two tokens
    bias = {ids[0]: 1000.0, ids[1]: 2000.0}
    got = mlxserve.generate(llm, "Once", max_tokens=20, min_tokens=2, logit_bias=bias)
    assert got.text == "BB" or len(got.text) == 2
    assert got.usage.completion_tokens == 3
    got = mlxserve.generate(llm, "Once", max_tokens=5, ignore_eos=True, logit_bias=bias)
    assert (got.token_ids, got.finish_reason) == ((END_ID,) * 5, "length")


def test_logprobs_come_with_each_token(llm):
    got = mlxserve.generate(llm, "Once", max_tokens=4, top_logprobs=3)
    scores = llm.score(llm.tokenizer.encode("Once") + list(got.token_ids))
    for i, (token, logprob) in enumerate(zip(got.token_ids, got.logprobs, strict=True)):
        row = scores[3 + i].astype(np.float64)
        exact = row - np.log(np.exp(row).sum())
        assert (logprob.token_id, len(logprob.top)) == (token, 3)
        assert abs(logprob.logprob - exact[token]) < 1e-4
        assert [t for t, _ in logprob.top] == np.argsort(-exact)[:3].tolist()


def test_score_equals_transformers(tmp_path):
    tiny = tiny_llama(seed=4, vocab_size=260, max_position_embeddings=2048)
    ids = np.random.default_rng(0).integers(0, 260, 500)
    with mlxserve.load(write_model_dir(tmp_path, tiny)) as llm:
        scores = llm.score(ids.tolist())
    assert scores.dtype == np.float32
    assert np.abs(scores - reference_logits(tiny.reference, ids)).max() < 2e-3


@pytest.mark.parametrize("max_batched_tokens", [32, 100])
def test_scores_read_packed_pages_from_the_second_page_on(tiny_model_dir, llm, max_batched_tokens):
    """A page's own tokens see it as it was computed, however the text is cut into steps."""
    ids = np.random.default_rng(0).integers(0, 256, 160).tolist()
    plain = llm.score(ids)
    options = {"max_batch": 1, "max_batched_tokens": max_batched_tokens}
    with mlxserve.load(tiny_model_dir, kv_bits=8, **options) as packed:
        scores = packed.score(ids)
    error = np.abs(scores - plain).max(axis=1)
    assert (error[:64] == 0).all()
    assert (error[64:] > 0).all()
    assert error.max() < 0.05 * np.abs(plain).max()


def test_prompt_logprobs_are_those_of_the_scores(llm):
    ids = llm.tokenizer.encode("Once upon a time")
    rows = llm.score(ids).astype(np.float64)
    exact = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    for text in ("Once upon a time", ids, np.array(ids)):
        first, *others = llm.prompt_logprobs(text, top=3)
        assert first is None
        assert [found.token_id for found in others] == ids[1:]
        for found, row in zip(others, exact, strict=False):
            assert abs(found.logprob - row[found.token_id]) < 1e-5
            assert [token for token, _ in found.top] == np.argsort(-row)[:3].tolist()
    assert [found.top for found in llm.prompt_logprobs(ids)[1:]] == [()] * (len(ids) - 1)
    assert llm.prompt_logprobs([7]) == [None]


def test_a_text_to_read_may_fill_the_context_and_one_token_more(llm):
    ids = [1, 2] * (llm.context_tokens // 2) + [3]
    assert len(llm.prompt_logprobs(ids)) == llm.context_tokens + 1
    with pytest.raises(RequestError, match=f"{llm.context_tokens + 2} tokens, and this model"):
        llm.prompt_logprobs([*ids, 4])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("",), "the prompt is empty"),
        (([1, 260],), "prompt token id 260 is out of range"),
        (("a", 21), "top is 21; it must be between 0 and 20"),
        (("a", -1), "top is -1"),
        (("a", None), "top is None; it must be a whole number"),
    ],
)
def test_what_can_t_be_read_is_refused_by_name(llm, arguments, message):
    with pytest.raises(RequestError, match=message):
        llm.prompt_logprobs(*arguments)


def test_the_context_bounds_prompt_and_answer(llm):
    context = llm.context_tokens
    got = mlxserve.generate(llm, [1] * (context - 3), max_tokens=None, ignore_eos=True)
    assert (got.usage.completion_tokens, got.finish_reason) == (3, "length")
    with pytest.raises(RequestError, match=f"{context} tokens, and this model can take"):
        mlxserve.generate(llm, [1] * context)


@pytest.mark.parametrize("asked", [{"n": 2}, {"best_of": 2}])
def test_answers_that_would_be_equal_are_not_drawn(llm, asked):
    with pytest.raises(RequestError, match="is 2, and with temperature 0 all answers would be"):
        mlxserve.generate(llm, "x", max_tokens=1, **asked)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        ([""], {}, "the prompt is empty"),
        (["fine", ""], {}, "the prompt is empty"),
        ([1, "a"], {}, '"a" among token ids'),
        ([1, 2.5], {}, "2.5 among token ids"),
        ([260], {}, "prompt token id 260 is out of range; .* 0 to 259"),
        ([-1], {}, "prompt token id -1"),
        (np.array([1, 300]), {}, "prompt token id 300"),
        (None, {}, "a prompt is NoneType; it must be text, chat messages or token ids"),
        (7, {}, "a prompt is int"),
        ("a\ud800", {}, "half of a surrogate pair"),
        ([{"role": "user"}], {}, "content"),
        ("a", {"top_k": 261}, "top_k is 261, over the vocabulary of 260"),
        ("a", {"logit_bias": {999: 1.0}}, "logit_bias token id 999"),
        ("a", {"temperatur": 1.0}, "unknown sampling parameter 'temperatur'; did you mean temp"),
        ("a", {"temperature": float("nan")}, "temperature is nan"),
        ("a", {"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_bad_input_is_refused_by_name_before_any_work(llm, prompt, sampling, message):
    before = llm.stats().prompt_tokens
    for call in (mlxserve.generate, mlxserve.stream):
        if call is mlxserve.stream and isinstance(prompt, list) and "" in prompt:
            continue
        with pytest.raises(RequestError, match=message) as caught:
            call(llm, prompt, **sampling)
        assert "\n" not in str(caught.value)
    assert llm.stats().prompt_tokens == before


def test_stream_takes_one_prompt_and_gives_one_answer(llm, tiny_model_dir):
    with pytest.raises(RequestError, match="use generate for a list"):
        mlxserve.stream(llm, ["a", "b"])
    for model in (llm, tiny_model_dir):
        with pytest.raises(RequestError, match="n is 2, and stream takes one answer; use generate"):
            mlxserve.stream(model, "a", n=2, temperature=1.0)
        with pytest.raises(RequestError, match="best_of is 3, and stream takes one answer"):
            mlxserve.stream(model, "a", best_of=3, temperature=1.0)


def test_closing_a_stream_ends_its_answer(llm):
    pieces = mlxserve.stream(llm, "Once", max_tokens=None, ignore_eos=True)
    next(pieces)
    pieces.close()
    mlxserve.generate(llm, "next", max_tokens=1)
    assert llm.stats().running == 0


def test_several_threads_share_a_model(llm):
    expected = [mlxserve.generate(llm, f"text {i}", max_tokens=20).token_ids for i in range(6)]
    got = queue.SimpleQueue()

    def work(i):
        got.put((i, mlxserve.generate(llm, f"text {i}", max_tokens=20).token_ids))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dict(got.get() for _ in range(6)) == dict(enumerate(expected))


@pytest.mark.full
def test_a_name_instead_of_a_model_loads_it_for_the_call(tiny_model_dir, llm):
    expected = mlxserve.generate(llm, "Hello", max_tokens=3)
    assert mlxserve.generate(tiny_model_dir, "Hello", max_tokens=3).text == expected.text
    pieces = list(mlxserve.stream(str(tiny_model_dir), "Hello", max_tokens=3))
    assert pieces[-1].completion.token_ids == expected.token_ids


def test_a_closed_model_says_so(tiny_model_dir):
    llm = mlxserve.load(tiny_model_dir)
    llm.close()
    llm.close()
    with pytest.raises(EngineDead, match="closed"):
        mlxserve.generate(llm, "Hello")


def test_unknown_models_and_options_are_refused_by_name(tiny_model_dir):
    with pytest.raises(ModelError, match="no-such-model"):
        mlxserve.load("no-such-model")
    with pytest.raises(ModelError, match="a model is None; give a name or a path"):
        mlxserve.load(None)
    with pytest.raises(RequestError, match="unknown engine option 'max_batches'; did you mean"):
        mlxserve.load(tiny_model_dir, max_batches=3)
    with pytest.raises(RequestError, match="max_batch is 0"):
        mlxserve.load(tiny_model_dir, max_batch=0)


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    path = write_model_dir(tmp_path, tiny_llama(vocab_size=200))
    with pytest.raises(ModelError, match="tokenizer has 260 tokens and the model's embedding 200"):
        mlxserve.load(path)


def test_an_end_id_that_the_model_does_not_have_is_no_danger(tmp_path):
    """min_tokens forbids end ids by writing at their place in the logits."""
    path = write_model_dir(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": [END_ID, 10**8]}))
    with mlxserve.load(path) as llm:
        assert mlxserve.generate(llm, "a", max_tokens=3, min_tokens=2).usage.completion_tokens >= 3


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(tiny_model_dir):
    size = (tiny_model_dir / "model.safetensors").stat().st_size
    with pytest.raises(mlxserve.CapacityError, match=r"the weights take .* GiB"):
        mlxserve.load(tiny_model_dir, memory_limit_bytes=size // 2)


def test_too_little_memory_for_the_cache_is_refused_with_the_fix(tiny_model_dir):
    with pytest.raises(mlxserve.CapacityError, match="close other programs"):
        mlxserve.load(tiny_model_dir, memory_limit_bytes=1_000_000)


@pytest.mark.full
def test_ctrl_c_ends_the_answer_and_the_model_stays_usable(tiny_model_dir):
    """In a process of its own, as in a notebook: the interrupt is raised, the next call works."""
    script = textwrap.dedent(
        """
        import sys, mlxserve
        llm = mlxserve.load(sys.argv[1])
        try:
            for piece in mlxserve.stream(llm, "a", max_tokens=None, ignore_eos=True):
                print("running", flush=True)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        print(mlxserve.generate(llm, "b", max_tokens=3).usage.completion_tokens, flush=True)
        print(llm.stats().running, flush=True)
        """
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tiny_model_dir)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "running\n"
    child.send_signal(signal.SIGINT)
    rest = child.communicate(timeout=60)[0].split()
    assert rest[-3:] == ["interrupted", "3", "0"]
    assert child.returncode == 0


def test_a_forked_process_is_told_to_load_its_own(tiny_model_dir):
    script = textwrap.dedent(
        """
        import multiprocessing, sys, mlxserve
        llm = mlxserve.load(sys.argv[1])

        def work():
            try:
                mlxserve.generate(llm, "a", max_tokens=1)
            except mlxserve.EngineDead as error:
                print(error, flush=True)

        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        child.join(60)
        print(mlxserve.generate(llm, "a", max_tokens=1).finish_reason)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tiny_model_dir)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "was forked after the model was loaded" in done.stdout
    assert done.stdout.endswith("length\n")
    assert done.returncode == 0


@pytest.mark.real
@pytest.mark.parametrize("delay_s", [0.6, 1.0, 1.6])
def test_ctrl_c_while_loading_ends_without_an_abort(smollm2_gguf, delay_s):
    """Whenever it comes: also during the imports, or after the answer began."""
    how = "max_tokens=2000, ignore_eos=True"
    script = f"import sys, mlxserve; mlxserve.generate(sys.argv[1], 'a', {how})"
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(smollm2_gguf)], stderr=subprocess.PIPE, text=True
    )
    time.sleep(delay_s)
    child.send_signal(signal.SIGINT)
    stderr = child.communicate(timeout=120)[1]
    assert "KeyboardInterrupt" in stderr
    assert "terminate called" not in stderr
    assert child.returncode == -signal.SIGINT


@pytest.mark.full
def test_a_model_dropped_on_its_own_thread_just_ends(tiny_model_dir):
    """The garbage collector runs wherever memory is asked for, so also on the engine thread."""
    llm = mlxserve.load(tiny_model_dir)
    engine = llm._engine
    collected = threading.Event()

    class Collects:
        def put(self, delivery):
            dropped.wait(30)
            gc.collect()
            collected.set()

    dropped = threading.Event()
    cycle = [llm]
    cycle.append(cycle)
    request = Request(id="x", prompt_ids=(1,), params=SamplingParams(max_tokens=1))
    engine.submit([request], Collects())
    del llm, cycle
    dropped.set()
    assert collected.wait(30)
    engine._thread.join(30)
    assert not engine._thread.is_alive()
