"""Where a prompt ceases to agree with what is cached, as a caller is told (`Usage.diverged_at`)."""

import pytest

import mlxserve

# 200 characters, and a token each: three pages of 64 and a part of one.
TEXT = ("It was a dark and stormy night; the rain fell in torrents. " * 4)[:200]


def diverged(llm, prompt):
    return llm.generate(prompt, max_tokens=2, ignore_eos=True).usage.diverged_at


@pytest.fixture
def llm(tiny_model_dir):
    with mlxserve.load(tiny_model_dir, max_batched_tokens=128) as llm:  # a prompt takes two steps
        yield llm


def test_a_prompt_does_not_agree_with_its_own_chunks(llm):
    assert diverged(llm, TEXT) == 0


def test_the_same_prompt_again_agrees_as_a_whole(llm):
    diverged(llm, TEXT)
    assert diverged(llm, TEXT) is None
    assert diverged(llm, TEXT[:70]) is None
    assert diverged(llm, TEXT[:199] + "#") == 199  # the last token is compared, though never reused


def test_a_header_that_changes_is_found(llm):
    diverged(llm, "12:01 " + TEXT)
    assert diverged(llm, "12:47 " + TEXT) == 3


def test_a_prompt_that_diverges_in_a_page(llm):
    diverged(llm, TEXT)
    assert diverged(llm, TEXT[:150] + "#" + TEXT[151:]) == 150
    assert diverged(llm, "#" + TEXT) == 0


def test_a_prompt_that_goes_on_diverges_where_the_other_ended(llm):
    diverged(llm, TEXT[:100])
    got = llm.generate(TEXT[:100] + "#" * 300, max_tokens=2).usage
    assert (got.cached_tokens, got.diverged_at) == (100, 100)


@pytest.mark.full
@pytest.mark.parametrize("layers", ["full", "windows"])
def test_packed_pages_tell_it_by_token_too(layers, tiny_model_dir):
    options = {"kv_bits": 8, "max_kv_size": 80 if layers == "windows" else None}
    with mlxserve.load(tiny_model_dir, max_batched_tokens=128, **options) as llm:
        assert diverged(llm, TEXT) == 0
        usage = llm.generate(TEXT[:150] + "#" * 50, max_tokens=2).usage
        assert (usage.cached_tokens, usage.diverged_at) == (128, 150)
        # Only whole pages are kept, and less than one isn't said to differ.
        assert diverged(llm, TEXT) is None


def test_where_nothing_is_shared_nothing_is_told(tiny_model_dir):
    with mlxserve.load(tiny_model_dir, prefix_cache=False) as llm:
        for _ in range(2):
            assert diverged(llm, TEXT) is None
