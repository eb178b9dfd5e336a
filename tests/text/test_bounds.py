"""A text that is too long is refused before it is made into tokens, where that is certain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from mlxserve.text.bounds import NFC_CHARS, bound_of

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPACES = ["Ġ" * n for n in (2, 4, 8)]
MERGES = [(half, half) for half in ("Ġ", "ĠĠ", "ĠĠĠĠ")] + [("a", "b"), ("Ã", "©")]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(*, without="", normalizer=None, model=None, **options):
    """A byte-level BPE with tokens of up to eight characters."""
    words = [*ALPHABET, *SPACES, *("".join(merge) for merge in MERGES if "Ġ" not in merge[0])]
    vocabulary = {word: i for i, word in enumerate(words) if word not in without}
    made = Tokenizer(model or models.BPE(vocabulary, MERGES, **options))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def with_fallback(*, without=""):
    """A BPE over characters, which spells those that it lacks byte by byte."""
    words = [word for word in ("▁", "▁▁", "a", "b", "ab", *BYTES) if word not in without]
    vocabulary = {word: i for i, word in enumerate(words)}
    merges = [("▁", "▁"), ("a", "b")]
    made = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(steps)
    return made


def with_added(**options):
    made = byte_level()
    made.add_special_tokens([AddedToken("<mask>", **options)])
    return made


CERTAIN = {
    "bytes": (byte_level(), 8),
    "a special token": (with_added(), 8),
    "bytes that are missing": (byte_level(without="ĀĈñ"), 8),
    "composed": (byte_level(normalizer=normalizers.NFC()), 8 * NFC_CHARS),
    "fallback": (with_fallback(), 6),
}
TEXTS = st.text(
    st.sampled_from(" ab\0\x08é\u0301\u0345\u03b1\u0313漢▁\U00100000<")
    | st.characters(codec="utf-8")
)


@pytest.mark.full
@pytest.mark.parametrize("name", CERTAIN)
@given(text=TEXTS | st.sampled_from(["\0\x08" * 50, "<mask>" * 9, "  " * 40, "é" * 30, "ᾂ" * 30]))
def test_no_text_has_fewer_tokens(name, text):
    made, most_chars = CERTAIN[name]
    bound = bound_of(made)
    assert bound is not None
    assert bound.most_chars == most_chars
    decomposed = normalizers.NFD().normalize_str(text)
    for given_ in (text, decomposed):
        n = len(made.encode(given_, add_special_tokens=False).ids)
        assert bound.tokens_at_least(given_) <= n


def test_it_is_as_good_as_the_longest_token():
    assert bound_of(byte_level()).tokens_at_least(" " * 800) == 100
    assert bound_of(byte_level(without="Ā")).tokens_at_least("\0" * 800) == 0


UNCERTAIN = {
    "compatibility": byte_level(normalizer=normalizers.NFKC()),
    "stripped": byte_level(normalizer=normalizers.Strip()),
    "runs of spaces": byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
    "shortened": byte_level(normalizer=normalizers.Replace("ab", "b")),
    "within a sequence": byte_level(
        normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])
    ),
    "spaces around a token": with_added(lstrip=True),
    "spaces after a token": with_added(rstrip=True),
    "words": byte_level(model=models.WordLevel({"a": 0, "?": 1}, "?")),
    "pieces of words": byte_level(model=models.WordPiece({"a": 0, "?": 1}, unk_token="?")),
    "without fallback": Tokenizer(models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True)),
    "not every byte to fall back to": with_fallback(without="<0xE2>"),
    "parts of characters that are missing": byte_level(without="Ģ"),
}


@pytest.mark.parametrize("name", UNCERTAIN)
def test_nothing_is_certain_where_text_may_get_lost(name):
    assert bound_of(UNCERTAIN[name]) is None


@pytest.mark.parametrize("behavior", ["removed", "isolated"])
def test_a_split_may_drop_what_it_splits_at(behavior):
    made = byte_level()
    split = pre_tokenizers.Split(" ", behavior)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, made.pre_tokenizer])
    assert (bound_of(made) is None) == (behavior == "removed")
