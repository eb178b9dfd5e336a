"""SentencePiece vocabularies as `tokenizers` backends: BPE by scores, and Unigram.

SentencePiece's BPE has no list of merges. It joins the two neighbours whose joint token scores
highest, the leftmost first; so the splits of every token into two tokens, best score first, are a
list of merges that does the same.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mlxserve.text.decoding import Decoding

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# What a token is for; GGUF has taken over SentencePiece's numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

SPACE = "▁"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """A SentencePiece model, as a .model file or GGUF metadata has it.

    tokens, scores, kinds: one each per id. unknown: the token for characters that have none.
    unigram: the most probable way to cut a text up, instead of merges.
    prefix: where a text gains a space that its decoding loses again: "never"; "always", at the
        start of every stretch between added tokens; "first", only where the text starts.
    charsmap: SentencePiece's compiled normalisation, or nothing.
    remove_extra_spaces: spaces at the ends are dropped, and runs of them become one.
    whole_user_defined: find the user-defined tokens in the normalised text, as SentencePiece does,
        so that what follows one gains no space. Otherwise the caller makes them added tokens.
    """

    tokens: list[str]
    scores: Sequence[float]
    kinds: list[int]
    unknown: str | None
    unigram: bool = False
    prefix: Literal["never", "always", "first"] = "never"
    charsmap: bytes = b""
    remove_extra_spaces: bool = False
    whole_user_defined: bool = False

    def of_kind(self, kind: int) -> list[str]:
        return [token for token, its in zip(self.tokens, self.kinds, strict=True) if its == kind]


def build(pieces: Pieces) -> tuple["Backend", Decoding]:
    """The backend, without added tokens, and how its tokens become bytes.

    Raises ValueError where not every text could be written, and whatever `tokenizers` raises for a
    model that it can't build.
    """
    from tokenizers import Tokenizer as Backend

    byte_fallback = BYTE in pieces.kinds
    if pieces.unknown is None and pieces.kinds.count(BYTE) < 256:
        raise ValueError("it has neither an unknown token nor one for each of the 256 bytes")
    backend = Backend((_unigram if pieces.unigram else _bpe)(pieces, byte_fallback))
    backend.normalizer = _normalizer(pieces)
    if (splitter := _pre_tokenizer(pieces)) is not None:
        backend.pre_tokenizer = splitter
    decoding = Decoding(
        byte_fallback=byte_fallback,
        replacements=((SPACE, " "),),
        stripped_at_start=0 if pieces.prefix == "never" else 1,
    )
    return backend, decoding


def _bpe(pieces: Pieces, byte_fallback: bool) -> Any:
    from tokenizers.models import BPE

    return BPE(
        vocab={token: i for i, token in enumerate(pieces.tokens)},
        merges=_merges(pieces),
        unk_token=pieces.unknown,
        fuse_unk=True,
        byte_fallback=byte_fallback,
        # A user-defined token has no merges; being cut out whole, it is looked up whole.
        ignore_merges=bool(_whole(pieces)),
    )


def _unigram(pieces: Pieces, byte_fallback: bool) -> Any:
    from tokenizers.models import Unigram

    unknown = None if pieces.unknown is None else pieces.tokens.index(pieces.unknown)
    vocabulary = list(zip(pieces.tokens, map(float, pieces.scores), strict=True))
    return Unigram(vocabulary, unknown, byte_fallback)


def _merges(pieces: Pieces) -> list[tuple[str, str]]:
    """Every split of a token into two, best score first; of equal scores, the smaller id first."""
    # Control, byte and user-defined tokens never come out of merges.
    plain = {
        token: i
        for i, (token, kind) in enumerate(zip(pieces.tokens, pieces.kinds, strict=True))
        if kind in (NORMAL, UNUSED)
    }
    ranked = sorted(plain, key=lambda token: -pieces.scores[plain[token]])
    # One comprehension, since a loop takes twice as long for a vocabulary of 262144.
    return [
        (left, right)
        for token in ranked
        for n in range(1, len(token))
        if (left := token[:n]) in plain and (right := token[n:]) in plain
    ]


def _normalizer(pieces: Pieces) -> Any:
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if pieces.charsmap:
        steps.append(normalizers.Precompiled(pieces.charsmap))
    if pieces.remove_extra_spaces:
        # Spaces alone: SentencePiece leaves newlines and tabs as they are.
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if pieces.prefix == "always":
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _pre_tokenizer(pieces: Pieces) -> Any:
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = []
    if pieces.prefix == "first":
        # Only a pre-tokenizer knows where the text starts.
        steps.append(pre_tokenizers.Metaspace(SPACE, "first", split=False))
    if whole := _whole(pieces):
        longest_first = sorted(whole, key=len, reverse=True)
        pattern = "|".join(re.escape(token) for token in longest_first)
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    return pre_tokenizers.Sequence(steps) if steps else None


def _whole(pieces: Pieces) -> list[str]:
    return pieces.of_kind(USER_DEFINED) if pieces.whole_user_defined else []


def add_special(
    backend: "Backend", tokens: list[str], kinds: list[int], *, user_defined: bool
) -> None:
    """Make added tokens of control and unknown tokens, and of user-defined ones if wanted.

    Those that are added tokens already stay as they are.
    """
    from tokenizers import AddedToken

    known = {token.content for token in backend.get_added_tokens_decoder().values()}

    def of_kinds(*wanted: int) -> list[AddedToken]:
        return [
            AddedToken(token, special=USER_DEFINED not in wanted, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in wanted and token not in known
        ]

    backend.add_special_tokens(of_kinds(UNKNOWN, CONTROL))
    if user_defined:
        backend.add_tokens(of_kinds(USER_DEFINED))
