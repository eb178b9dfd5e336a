"""Answers over HTTP are those of `mlxserve.generate`, streamed or not."""

import openai
import pytest

import mlxserve
from tests.support.serving import NAME

CHAT = [{"role": "user", "content": "Tell me"}]
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 1.3, "seed": 11, "top_p": 0.95}
LONG = {"ignore_eos": True}


def joined(stream):
    """Text, finish reason and the chunks of a streamed answer."""
    chunks = list(stream)
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    reasons = [c.finish_reason for c in choices if c.finish_reason]
    assert len(reasons) == 1
    return "".join(text_of(c) for c in choices), reasons[0], chunks


def text_of(choice):
    return choice.text if hasattr(choice, "text") else choice.delta.content or ""


@pytest.mark.parametrize("how", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_chat(llm, client, how):
    expected = mlxserve.generate(llm, CHAT, max_tokens=40, **how)
    ask = {"model": NAME, "messages": CHAT, "max_tokens": 40, **how}
    got = client.chat.completions.create(**ask)
    assert got.choices[0].message.content == expected.text
    assert got.choices[0].message.role == "assistant"
    assert got.choices[0].finish_reason == expected.finish_reason
    assert got.choices[0].logprobs is None
    assert (got.object, got.model) == ("chat.completion", NAME)
    assert got.usage.prompt_tokens == expected.usage.prompt_tokens
    assert got.usage.completion_tokens == len(expected.token_ids)
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens
    text, reason, chunks = joined(client.chat.completions.create(**ask, stream=True))
    assert (text, reason) == (expected.text, expected.finish_reason)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("how", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_completions(llm, client, how):
    expected = mlxserve.generate(llm, "Once upon", max_tokens=40, **how)
    ask = {"model": NAME, "prompt": "Once upon", "max_tokens": 40, **how}
    got = client.completions.create(**ask)
    assert got.choices[0].text == expected.text
    assert got.choices[0].finish_reason == expected.finish_reason
    assert got.usage.completion_tokens == len(expected.token_ids)
    text, reason, chunks = joined(client.completions.create(**ask, stream=True))
    assert (text, reason) == (expected.text, expected.finish_reason)
    assert all(chunk.object == "text_completion" for chunk in chunks)


def test_the_defaults_are_openais(llm, client):
    got = client.completions.create(model=NAME, prompt="Go", seed=3, extra_body=LONG)
    expected = mlxserve.generate(llm, "Go", seed=3, temperature=1.0, max_tokens=16, **LONG)
    assert got.choices[0].text == expected.text
    assert got.usage.completion_tokens == 16
    chat = client.chat.completions.create(model=NAME, messages=CHAT, temperature=0, extra_body=LONG)
    assert chat.usage.total_tokens == llm.context_tokens  # without max_tokens, all there is
    assert chat.choices[0].finish_reason == "length"


def test_null_is_as_left_out(server):
    fields = (
        *("model", "stream", "stream_options", "max_tokens", "min_tokens", "top_p", "top_k"),
        *("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
        *("n", "stop", "stop_token_ids", "ignore_eos", "priority", "cache_salt", "ttft_budget_s"),
        *("metadata", "user", "logprobs", "tools", "tool_choice", "response_format", "suffix"),
    )
    ask = {"seed": 5, "temperature": 1.1}
    plain = server.complete(prompt="ab", **ask).json()
    nulls = server.complete(prompt="ab", best_of=None, echo=None, **dict.fromkeys(fields), **ask)
    assert nulls.status_code == 200
    assert "x-mlxserve-ignored" not in nulls.headers
    assert nulls.json()["choices"] == plain["choices"]
    assert server.chat("ab", max_tokens=4, top_logprobs=None, **ask).status_code == 200


def test_max_completion_tokens_goes_before_max_tokens(server):
    got = server.chat(max_tokens=9, max_completion_tokens=4, **LONG).json()
    assert got["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_each_of_n_answers_is_the_one_of_its_seed(llm, client, stream):
    expected = mlxserve.generate(llm, CHAT, n=3, max_tokens=12, **SEEDED)
    got = client.chat.completions.create(
        model=NAME, messages=CHAT, n=3, max_tokens=12, stream=stream, **SEEDED
    )
    texts = ["", "", ""]
    if stream:
        for chunk in got:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        for choice in got.choices:
            texts[choice.index] = choice.message.content
        assert got.usage.prompt_tokens == expected[0].usage.prompt_tokens  # once for all
        assert got.usage.completion_tokens == sum(len(one.token_ids) for one in expected)
    assert texts == [one.text for one in expected]


def test_best_of(llm, client):
    expected = mlxserve.generate(llm, "Poem", n=2, best_of=5, max_tokens=12, **SEEDED)
    got = client.completions.create(
        model=NAME, prompt="Poem", n=2, best_of=5, max_tokens=12, **SEEDED
    )
    assert [choice.text for choice in got.choices] == [one.text for one in expected]
    assert all(choice.logprobs is None for choice in got.choices)
    with pytest.raises(openai.BadRequestError, match="can't be streamed"):
        client.completions.create(model=NAME, prompt="Poem", best_of=2, stream=True)


def test_several_prompts(llm, client):
    prompts = ["one", "two", "three"]
    expected = mlxserve.generate(llm, prompts, max_tokens=9, n=2, **SEEDED)
    got = client.completions.create(model=NAME, prompt=prompts, n=2, max_tokens=9, **SEEDED)
    assert [choice.index for choice in got.choices] == list(range(6))
    assert [c.text for c in got.choices] == [one.text for group in expected for one in group]
    assert got.usage.prompt_tokens == 3 + 3 + 5
    texts = [""] * 6
    for chunk in client.completions.create(
        model=NAME, prompt=prompts, n=2, max_tokens=9, stream=True, **SEEDED
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in got.choices]


def test_token_ids_are_prompts(llm, client):
    ids = llm.tokenizer.encode("Hello there")
    by_text = client.completions.create(model=NAME, prompt="Hello there", **GREEDY)
    by_ids = client.completions.create(model=NAME, prompt=ids, **GREEDY)
    both = client.completions.create(model=NAME, prompt=[ids, ids[:3]], **GREEDY)
    assert by_ids.choices[0].text == both.choices[0].text == by_text.choices[0].text
    assert both.usage.prompt_tokens == len(ids) + 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer(llm, client, stream):
    free = mlxserve.generate(llm, "Once", max_tokens=60, ignore_eos=True).text
    stop = free[20:23]
    ask = {"model": NAME, "prompt": "Once", "max_tokens": 60, "stop": stop, "logprobs": 0}
    got = client.completions.create(**ask, **GREEDY, stream=stream, extra_body=LONG)
    if not stream:
        assert (got.choices[0].text, got.choices[0].finish_reason) == (
            free[: free.index(stop)],
            "stop",
        )
        return
    text, reason, chunks = joined(got)
    assert (text, reason) == (free[: free.index(stop)], "stop")
    whole = client.completions.create(**ask, **GREEDY, extra_body=LONG)
    streamed = [p for c in chunks for p in c.choices[0].logprobs.token_logprobs]
    assert streamed == whole.choices[0].logprobs.token_logprobs  # none of what came after it


def test_chat_logprobs_are_the_models_own(llm, client):
    expected = mlxserve.generate(
        llm, CHAT, max_tokens=30, ignore_eos=True, top_logprobs=3, **SEEDED
    )
    ask = {"model": NAME, "messages": CHAT, "max_tokens": 30, "logprobs": True, "top_logprobs": 3}
    got = client.chat.completions.create(**ask, **SEEDED, extra_body=LONG)
    found = got.choices[0].logprobs.content
    assert [one.logprob for one in found] == [one.logprob for one in expected.logprobs]
    assert [len(one.top_logprobs) for one in found] == [3] * 30
    best = [one.top_logprobs[0].logprob for one in found]
    assert best == [one.top[0][1] for one in expected.logprobs]
    data = b"".join(bytes(one.bytes) for one in found)
    specials = [t for t in expected.token_ids if t in llm.tokenizer.special_ids]
    assert specials or data.decode(errors="replace") == got.choices[0].message.content
    assert data == b"".join(llm.tokenizer.token_bytes(t) for t in expected.token_ids)
    _, _, chunks = joined(
        client.chat.completions.create(**ask, **SEEDED, stream=True, extra_body=LONG)
    )
    streamed = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert streamed == found


@pytest.mark.parametrize("stream", [False, True])
def test_echo_tells_how_likely_the_prompt_is(llm, client, stream):
    ids = llm.tokenizer.encode("The sea is blue")
    expected = llm.prompt_logprobs(ids, 2)
    answer = mlxserve.generate(llm, ids, max_tokens=5, top_logprobs=2, ignore_eos=True)
    ask = {"model": NAME, "prompt": "The sea is blue", "max_tokens": 5, "echo": True, "logprobs": 2}
    got = client.completions.create(**ask, **GREEDY, stream=stream, extra_body=LONG)
    choices = [chunk.choices[0] for chunk in got] if stream else [got.choices[0]]
    assert "".join(choice.text for choice in choices) == "The sea is blue" + answer.text
    values = [v for choice in choices for v in choice.logprobs.token_logprobs]
    assert values[0] is None
    of_answer = [one.logprob for one in answer.logprobs]
    assert values[1:] == pytest.approx([one.logprob for one in expected[1:]] + of_answer, abs=1e-4)
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    assert tokens[: len(ids)] == list("The sea is blue")
    offsets = [at for choice in choices for at in choice.logprobs.text_offset]
    assert offsets[: len(ids)] == list(range(len(ids)))
    tops = [top for choice in choices for top in choice.logprobs.top_logprobs]
    assert tops[0] is None
    assert all(1 <= len(top) <= 2 for top in tops[1:])


ODD = "Hello a🙂b 世界 <|user|>é xyz"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [ODD, "🙂"])
def test_each_token_begins_where_its_text_does(llm, client, prompt, stream):
    ask = {"model": NAME, "prompt": prompt, "max_tokens": 4, "echo": True, "logprobs": 20}
    got = client.completions.create(**ask, **GREEDY, stream=stream, extra_body=LONG)
    choices = [chunk.choices[0] for chunk in got] if stream else got.choices
    text = "".join(choice.text for choice in choices)
    reports = [choice.logprobs for choice in choices]
    tokens = [token for report in reports for token in report.tokens]
    offsets = [at for report in reports for at in report.text_offset]
    assert text.startswith(prompt)
    ids = llm.tokenizer.encode(prompt)
    data = [llm.tokenizer.token_bytes(token) for token in ids]
    whole = b"".join(data)
    at = 0
    for token, offset, named in zip(data, offsets, tokens, strict=False):
        assert offset == len(whole[:at].decode(errors="ignore"))
        name = f"bytes:\\x{token[0]:02x}" if token[0] > 127 else token.decode()
        assert named == name
        at += len(token)
    assert offsets[len(ids)] == len(prompt)
    tops = [top for report in reports for top in report.top_logprobs if top is not None]
    assert min(map(len, tops)) >= 20  # none hides another


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["The sea", "T"])
def test_a_prompt_is_scored_without_an_answer(llm, client, prompt, stream):
    ids = llm.tokenizer.encode(prompt)
    expected = [one and one.logprob for one in llm.prompt_logprobs(ids, 1)]
    got = client.completions.create(
        model=NAME, prompt=prompt, max_tokens=0, echo=True, logprobs=1, stream=stream
    )
    choices = [chunk.choices[0] for chunk in got] if stream else got.choices
    assert "".join(choice.text for choice in choices) == prompt
    assert [v for choice in choices for v in choice.logprobs.token_logprobs] == expected
    assert choices[-1].finish_reason == "length"
    if not stream:
        assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(ids), 0)


def test_several_answers_at_temperature_0_are_equal(llm, client):
    got = client.completions.create(model=NAME, prompt="Go", n=2, max_tokens=8, **GREEDY)
    expected = mlxserve.generate(llm, "Go", max_tokens=8).text
    assert [choice.text for choice in got.choices] == [expected] * 2


def test_a_negative_seed_is_one_of_its_own(client):
    ask = {"model": NAME, "prompt": "Go", "max_tokens": 12, "temperature": 1.3}
    told = [
        client.completions.create(**ask, seed=seed).choices[0].text for seed in (-1, -1, -2, 2**63)
    ]
    assert told[0] == told[1]
    assert len(set(told)) == 3


def test_echo_without_logprobs(server):
    plain = server.complete(prompt="ab", max_tokens=5, **GREEDY).json()["choices"][0]["text"]
    got = server.complete(prompt="ab", max_tokens=5, echo=True, **GREEDY).json()["choices"][0]
    assert (got["text"], got["logprobs"]) == ("ab" + plain, None)


def test_a_stream_ends_with_its_usage_if_asked(client):
    ask = {"model": NAME, "messages": CHAT, "max_tokens": 6, **GREEDY}
    whole = client.chat.completions.create(**ask)
    *chunks, last = client.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    )
    assert last.choices == []
    assert last.usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )
    assert all(chunk.usage is None for chunk in chunks)
    *_, last = client.completions.create(
        model=NAME, prompt="x", max_tokens=6, stream=True, stream_options={"include_usage": True},
        extra_body=LONG,
    )  # fmt: skip
    assert (last.choices, last.usage.completion_tokens) == ([], 6)


def test_a_stream_is_framed_as_server_sent_events(server):
    got = server.complete(prompt="x", max_tokens=3, stream=True, **GREEDY)
    assert got.headers["content-type"].startswith("text/event-stream")
    assert got.headers["cache-control"] == "no-cache"
    events = got.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])


def test_a_prompt_that_came_before_is_cached(llm, server):
    prompt = "A long prompt, which fills more than one page of the cache. " * 4
    first = server.complete(prompt=prompt, max_tokens=4, **GREEDY).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = server.complete(prompt=prompt, max_tokens=4, **GREEDY).json()
    assert again["choices"] == first["choices"]
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == len(prompt) - 1  # all but the last, which the next is predicted from
    salted = server.complete(prompt=prompt, max_tokens=4, cache_salt="mine", **GREEDY).json()
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_the_template_gets_its_variables(server):
    plain = server.http.post("/tokenize", json={"messages": CHAT}).json()
    body = {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}}
    assert server.http.post("/tokenize", json=body).json() == plain
    got = server.chat(
        max_tokens=2, chat_template_kwargs={"x": [1, {"y": None}]}, reasoning_effort="low"
    )
    assert got.status_code == 200
    for name in ("messages", "tools", "add_generation_prompt", "self", "template_name"):
        for path in ("/v1/chat/completions", "/tokenize"):
            body = {"messages": CHAT, "chat_template_kwargs": {name: []}}
            got = server.http.post(path, json=body)
            assert got.status_code == 400, (path, name)
            assert got.json()["error"]["param"] == "chat_template_kwargs"


def test_models(client, llm):
    listed = client.models.list().data
    assert [model.id for model in listed] == [NAME, "alias"]
    assert listed[0].max_model_len == llm.context_tokens
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"
    got = client.completions.create(model="alias", prompt="x", max_tokens=1)
    assert got.model == "alias"


def test_tokenize_and_back(llm, server):
    text = "Größe ☃ <|end|>"
    got = server.http.post("/tokenize", json={"prompt": text}).json()
    assert got["tokens"] == llm.tokenizer.encode(text)
    assert (got["count"], got["max_model_len"]) == (len(got["tokens"]), llm.context_tokens)
    back = server.http.post("/detokenize", json={"tokens": got["tokens"]}).json()
    assert back == {"prompt": "Größe ☃ "}
    chat = server.http.post("/tokenize", json={"messages": CHAT}).json()
    assert chat["tokens"] == llm.encode(CHAT)


def test_what_a_server_fills_in(llm):
    from tests.support.serving import serving

    with serving(llm, sampling={"temperature": 0.0, "max_tokens": 5}) as other:
        got = other.complete(prompt="Go", **LONG).json()
        assert got["choices"][0]["text"] == mlxserve.generate(llm, "Go", max_tokens=5, **LONG).text
        assert other.chat(**LONG).json()["usage"]["completion_tokens"] == 5
        assert other.chat(max_tokens=3, **LONG).json()["usage"]["completion_tokens"] == 3
