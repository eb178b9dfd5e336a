"""How few tokens a text can have, without making it into tokens."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxserve.text.decoding import BYTE_OF

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

NFC_CHARS = 4
"""Characters that Unicode's composed form may make one of: those of its longest decomposition."""

_KEEPS = frozenset({"ByteLevel", "Metaspace", "Digits"})
_CONTINUATION = range(0x80, 0xC0)


@dataclass(frozen=True, slots=True)
class Bound:
    """most_chars: of a text that one token can stand for; lost: characters that become no token."""

    most_chars: int
    lost: str

    def tokens_at_least(self, text: str) -> int:
        """So many tokens a text has for sure."""
        kept = len(text) - sum(map(text.count, self.lost))
        return -(-kept // self.most_chars)


def bound_of(backend: "Backend") -> Bound | None:
    """None where nothing is certain: where a step before the vocabulary drops or shortens text, or
    one token stands for any number of characters, as one for unknown words does."""
    shrinks, steps = _shrinks(_parts(backend.normalizer)), _parts(backend.pre_tokenizer)
    if shrinks is None or not all(map(_keeps, steps)):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # these take any number of spaces with them
    vocabulary = backend.get_vocab(with_added_tokens=True)
    lost = _lost(backend.model, vocabulary, any(step["type"] == "ByteLevel" for step in steps))
    if lost is None:
        return None
    # Each other character is part of some token's written form.
    return Bound(shrinks * max(map(len, vocabulary)), lost)


def _lost(model: Any, vocabulary: dict[str, int], byte_level: bool) -> str | None:
    """The characters that no token is made of; None if they can't be told."""
    from tokenizers.models import BPE

    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if byte_level:
        missing = {byte for char, byte in BYTE_OF.items() if char not in vocabulary}
        # Of a character beyond ASCII something is left, if no byte after its first is missing.
        known = missing.isdisjoint(_CONTINUATION)
        return "".join(chr(byte) for byte in sorted(missing) if byte < 0x80) if known else None
    spelled = model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return "" if spelled else None


def _parts(step: Any) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as the parts that tokenizer.json has of it."""
    return [] if step is None else _flat(json.loads(step.__getstate__()))


def _flat(part: dict[str, Any]) -> list[dict[str, Any]]:
    if part["type"] != "Sequence":
        return [part]
    parts = part.get("normalizers") or part.get("pretokenizers") or []
    return [inner for one in parts for inner in _flat(one)]


def _shrinks(normalizers: list[dict[str, Any]]) -> int | None:
    """How many characters may become one; None: any number."""
    factor = 1
    for step in normalizers:
        match step:
            case {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(
                old
            ) == len(new):
                pass
            case {"type": "NFC"}:
                factor *= NFC_CHARS
            case _:
                return None
    return factor


def _keeps(pre_tokenizer: dict[str, Any]) -> bool:
    """Whether it cuts a text up and drops nothing of it."""
    kind = pre_tokenizer["type"]
    return kind in _KEEPS or (kind == "Split" and pre_tokenizer["behavior"] != "Removed")
