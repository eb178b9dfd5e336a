"""Two models on one text: against transformers and torch, and what is refused."""

import json
import math

import mlx.core as mx
import numpy as np
import pytest
import torch

import mlxserve
from mlxserve.comparison import check_room, check_vocabularies, compare
from mlxserve.config import EngineConfig
from mlxserve.errors import CapacityError, RequestError
from mlxserve.perplexity import windows
from tests.support.model_dir import END_ID, VOCAB_SIZE, byte_tokenizer, write_model_dir
from tests.support.tiny import reference_logits, tiny_llama

SIZES = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 600, "eos_token_id": END_ID}
TEXT = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 🥊\n" * 3


def make(path, **overrides):
    """A tiny model's directory, and transformers' model of the same weights."""
    tiny = tiny_llama(**{**SIZES, **overrides})
    path.mkdir()
    return write_model_dir(path, tiny), tiny.reference


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A model, and one whose weights are a little off: loaded, and transformers'."""
    folder = tmp_path_factory.mktemp("pair")
    path, reference = make(folder / "a")
    (folder / "b").mkdir()
    tiny = tiny_llama(**SIZES)
    rng = np.random.default_rng(0)
    off = {name: np.array(w) for name, w in tiny.weights.items()}
    off = {name: w + rng.normal(size=w.shape) * w.std() / 5 for name, w in off.items()}
    off = {name: w.astype(np.float32) for name, w in off.items()}
    tiny.reference.load_state_dict({name: torch.from_numpy(w) for name, w in off.items()})
    tiny = tiny._replace(weights={name: mx.array(w) for name, w in off.items()})
    other = write_model_dir(folder / "b", tiny)
    with mlxserve.load(path) as a, mlxserve.load(other) as b:
        yield (a, b), (reference, tiny.reference)


def judged(references, ids, context, stride):
    """Losses of both, divergences and agreement by torch, in float64."""
    losses, divergence, same = ([], []), [], []
    for start, end, scored_from in windows(len(ids), context, stride):
        rows = slice(scored_from - 1 - start, end - 1 - start)
        p, q = (
            torch.from_numpy(reference_logits(r, np.array(ids[start : end - 1]))[rows])
            .double()
            .log_softmax(-1)
            for r in references
        )
        targets = torch.tensor(ids[scored_from:end])
        for found, logprobs in zip(losses, (p, q), strict=True):
            found.append(torch.nn.functional.nll_loss(logprobs, targets, reduction="none"))
        each = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True)
        divergence.append(each.sum(-1))
        same.append((p.argmax(-1) == q.argmax(-1)).double())
    return [torch.cat(found).numpy() for found in (*losses, divergence, same)]


@pytest.mark.parametrize(("context", "stride"), [(512, None), (64, 64), (50, 7)])
def test_numbers_are_torch_s(pair, context, stride):
    models, references = pair
    ids = byte_tokenizer().encode(TEXT).ids
    got = compare(*models, TEXT, context=context, stride=stride)
    a, b, divergence, same = judged(references, ids, context, stride or context)
    assert math.log(got.reference_perplexity) == pytest.approx(a.mean(), abs=1e-4)
    assert math.log(got.perplexity) == pytest.approx(b.mean(), abs=1e-4)
    np.testing.assert_allclose(got.divergence, divergence, atol=1e-4)
    assert divergence.mean() > 0.01
    assert got.mean_divergence == pytest.approx(divergence.mean(), abs=1e-4)
    assert got.p95_divergence == pytest.approx(np.percentile(divergence, 95), abs=1e-4)
    assert got.agreement == pytest.approx(same.mean(), abs=2 / len(same))
    assert 0 < same.mean() < 1
    assert got.tokens == len(ids) - 1
    assert (got.context, got.stride) == (context, stride or context)


def test_a_model_beside_itself(pair):
    (a, _), _ = pair
    seen = []
    got = compare(a, a, TEXT, context=64, on_progress=lambda *args: seen.append(args))
    assert got.perplexity == got.reference_perplexity
    assert got.mean_divergence == got.p95_divergence == 0
    assert got.agreement == 1
    assert seen[-1] == ("compare", got.tokens, got.tokens)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_it_tells_which_one_is_the_reference(pair):
    (a, b), _ = pair
    there, back = compare(a, b, TEXT), compare(b, a, TEXT)
    assert there.perplexity == back.reference_perplexity
    assert there.mean_divergence != pytest.approx(back.mean_divergence, rel=1e-3)


def test_a_padded_embedding_is_no_other_vocabulary(pair, tmp_path):
    """Rows that no token has; the text's tokens have the numbers they had."""
    (a, _), _ = pair
    tiny = tiny_llama(**SIZES)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = tiny.weights[name]
        tiny.weights[name] = mx.concatenate([rows, mx.full((12, rows.shape[1]), 0.5)])
    tiny.config["vocab_size"] += 12
    (tmp_path / "padded").mkdir()
    with mlxserve.load(write_model_dir(tmp_path / "padded", tiny)) as padded:
        got = compare(a, padded, TEXT)
    assert got.mean_divergence < 1e-8
    assert got.agreement == 1


def test_other_vocabularies_are_refused(pair, tmp_path):
    (a, _), _ = pair
    path, _ = make(tmp_path / "other", vocab_size=VOCAB_SIZE + 1)
    backend = byte_tokenizer()
    backend.add_tokens(["more"])
    backend.save(str(path / "tokenizer.json"))
    with mlxserve.load(path) as other, pytest.raises(RequestError) as error:
        compare(a, other, TEXT)
    assert f"vocabularies of {VOCAB_SIZE} and {VOCAB_SIZE + 1} tokens" in str(error.value)

    path, _ = make(tmp_path / "renamed")
    text = (path / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(text.replace("<|user|>", "<|human|>"))
    with mlxserve.load(path) as other, pytest.raises(RequestError) as error:
        check_vocabularies(a.tokenizer, other.tokenizer)
    assert f"token {END_ID + 1} is b'<|user|>' in one model and b'<|human|>'" in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 601}, "context is 601, and these models can take 1 to 600"),
        ({"context": 0}, "context is 0"),
        ({"context": 40, "stride": 41}, "stride is 41; it must be from 1 to the context of 40"),
        ({"stride": 0}, "stride is 0"),
    ],
)
def test_wrong_windows_are_refused(pair, options, words):
    with pytest.raises(RequestError, match=words):
        compare(*pair[0], TEXT, **options)


def test_a_single_token_is_no_text(pair):
    with pytest.raises(RequestError, match="single token"):
        compare(*pair[0], "a")


def test_room_for_both_at_once(pair):
    (a, b), _ = pair
    paths = [a.path, b.path]
    check_room(paths)
    enough = EngineConfig(max_batch=1, memory_limit_bytes=64 << 20)
    check_room(paths, config=enough)
    config = json.loads((a.path / "config.json").read_text())
    logits = 2 * 4 * 512 * config["vocab_size"]
    for little in (1 << 20, logits):
        small = EngineConfig(max_batch=1, memory_limit_bytes=little)
        with pytest.raises(CapacityError, match=r"the two models take .* of memory"):
            check_room(paths, config=small)
