"""From a token's written form to its bytes: the alphabets and marks that tokenizers use."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxserve.errors import ModelError


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 stands for itself, and U+0100 onwards for the other bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
"""The byte that a letter of that alphabet stands for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """How one tokenizer's tokens turn into bytes.

    byte_level: a token is spelled in GPT-2's byte alphabet.
    byte_fallback: a token such as `<0xE2>` is that byte.
    replacements: (written, meant) pairs, applied to every other token in order.
    dropped_at_start: a mark for a space that the first token of a text loses ("" for none).
    stripped_at_start: how many leading `strip_byte`s a text loses.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    dropped_at_start: str = ""
    stripped_at_start: int = 0
    strip_byte: bytes = b" "

    def token_bytes(self, written: str, *, added: bool = False, first: bool = False) -> bytes:
        """The bytes of a token.

        added: it was added to the vocabulary as plain text, and isn't spelled in the byte alphabet.
        first: it opens the text.
        """
        if self.byte_level:
            if added:
                return written.encode()
            try:
                return bytes([BYTE_OF[char] for char in written])
            except KeyError:  # not spelled in the alphabet, so meant literally
                return written.encode()
        if self.byte_fallback and (byte := _fallback_byte(written)) is not None:
            return byte
        if first and self.dropped_at_start:
            written = written.replace(self.dropped_at_start, "")
        for mark, meant in self.replacements:
            written = written.replace(mark, meant)
        return written.encode()


def _fallback_byte(written: str) -> bytes | None:
    if len(written) != 6 or not written.startswith("<0x") or not written.endswith(">"):
        return None
    try:
        return bytes.fromhex(written[3:5])
    except ValueError:
        return None


def parse_decoder(decoder: Mapping[str, Any] | None) -> Decoding:
    """Read the `decoder` of a tokenizer.json. Raises ModelError for a kind not understood.

    A sequence may strip leading characters only once its tokens are fused, and must do everything
    else before: any other order means something per token that this reading would get wrong.
    """
    if decoder is None:
        raise ModelError(
            "tokenizer.json has no decoder, so its tokens can't be turned into text; "
            "use a tokenizer whose decoder is ByteLevel, Metaspace or a ByteFallback sequence"
        )
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    if [step.get("type") for step in steps if step.get("type") != "Fuse"] == ["ByteLevel"]:
        return Decoding(byte_level=True)
    found: dict[str, Any] = {"replacements": ()}
    fused = False
    for step in steps:
        match step:
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Replace", "pattern": {"String": str(mark)}, "content": str(meant)} if (
                mark and not fused
            ):
                found["replacements"] += ((mark, meant),)
            case {"type": "Metaspace", "replacement": str(mark)} if not fused:
                found["replacements"] += ((mark, " "),)
                if step.get("prepend_scheme", "always") != "never":
                    found["dropped_at_start"] = mark
            case {"type": "ByteFallback"} if not fused:
                found["byte_fallback"] = True
            case {"type": "Strip", "content": str(char), "start": int(start), "stop": 0} if (
                fused and len(char) == 1 and char.isascii()
            ):
                found |= {"stripped_at_start": start, "strip_byte": char.encode()}
            case _:
                raise ModelError(
                    f"tokenizer.json has a decoder step that isn't supported here: {step!r}; "
                    "supported are ByteLevel, Metaspace, Replace, ByteFallback, Fuse and then Strip"
                )
    return Decoding(**found)


def make_decoder(decoding: Decoding) -> Any:
    """The `decoder` of a tokenizer.json that `parse_decoder` reads as `decoding`.

    Raises ValueError for a mark that the first token alone loses, which needs a Metaspace.
    """
    from tokenizers import decoders

    if decoding.byte_level:
        return decoders.ByteLevel()
    if decoding.dropped_at_start:
        raise ValueError(f"a decoder that drops {decoding.dropped_at_start!r} can't be made")
    steps: list[Any] = [decoders.Replace(*pair) for pair in decoding.replacements]
    if decoding.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if decoding.stripped_at_start:
        steps.append(decoders.Strip(decoding.strip_byte.decode(), decoding.stripped_at_start, 0))
    return decoders.Sequence(steps)
