"""Reads SentencePiece's `.model` files: a protocol buffer of pieces, trainer and normalizer.

The schema is sentencepiece_model.proto's; only what encoding needs is read.
"""

import math
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mlxserve.errors import ModelError
from mlxserve.text.spm import BYTE, NORMAL, UNKNOWN, Pieces

MAX_FILE_BYTES = 256 * 1024 * 1024

# Field numbers.
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _SUFFIX_SPACE = 3, 24
_SPECIAL_IDS = {"unk_token": (40, 0), "bos_token": (41, 1), "eos_token": (42, 2)}
_CHARSMAP, _DUMMY_PREFIX, _REMOVE_EXTRA, _ESCAPE = 2, 3, 4, 5

_UNIGRAM, _BPE = 1, 2
_TYPE_NAMES = {3: "WORD", 4: "CHAR"}


def read_model(file: Path) -> tuple[Pieces, dict[str, str]]:
    """The pieces, and the tokens it names: unk_token, bos_token, eos_token where there are any.

    Raises ModelError for a file that isn't such a model, or is of a kind not supported.
    """
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ModelError(
                f"{file} is over {MAX_FILE_BYTES} bytes, no tokenizer; download it again"
            )
        data = file.read_bytes()
    except OSError as error:
        raise ModelError(f"{file} can't be read: {error}; download it again") from error
    try:
        return _parse(data, file)
    except (ValueError, LookupError, struct.error, TypeError, AttributeError) as error:
        raise ModelError(
            f"{file} isn't a SentencePiece model; download it again, or save the model with its "
            "tokenizer.json"
        ) from error


def _parse(data: bytes, file: Path) -> tuple[Pieces, dict[str, str]]:
    tokens, scores, kinds = [], [], []
    trainer: dict[int, object] = {}
    normalizer: dict[int, object] = {}
    for number, value in _fields(data):
        if number == _PIECE:
            piece = dict(_fields(_bytes(value)))
            tokens.append(_bytes(piece[1]).decode())
            scores.append(piece.get(2, 0.0))
            kinds.append(piece.get(3, NORMAL))
        elif number == _TRAINER:
            trainer = dict(_fields(_bytes(value)))
        elif number == _NORMALIZER:
            normalizer = dict(_fields(_bytes(value)))
    if not tokens or not all(kind in range(NORMAL, BYTE + 1) for kind in kinds):
        raise ValueError("no pieces, or pieces of unknown kinds")
    if len(set(tokens)) != len(tokens):
        twice = next(token for token, n in Counter(tokens).items() if n > 1)
        raise ModelError(f"{file} has {twice!r} twice; download it again")
    if any(map(math.isnan, scores)):
        raise ModelError(f"{file} has a score that isn't a number; download it again")
    _check(trainer, normalizer, file)
    named = {
        name: tokens[i]
        for name, (number, default) in _SPECIAL_IDS.items()
        if 0 <= (i := _signed(trainer.get(number, default))) < len(tokens)
    }
    pieces = Pieces(
        tokens=tokens,
        scores=scores,
        kinds=kinds,
        unknown=next((t for t, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None),
        unigram=trainer.get(_MODEL_TYPE, _UNIGRAM) == _UNIGRAM,
        prefix="always" if normalizer.get(_DUMMY_PREFIX, 1) else "never",
        charsmap=_bytes(normalizer.get(_CHARSMAP, b"")),
        remove_extra_spaces=bool(normalizer.get(_REMOVE_EXTRA, 1)),
    )
    return pieces, named


def _check(trainer: dict[int, object], normalizer: dict[int, object], file: Path) -> None:
    kind = trainer.get(_MODEL_TYPE, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise ModelError(
            f"{file} is a SentencePiece model of type {_TYPE_NAMES.get(kind, kind)}; "  # pyright: ignore
            "supported are BPE and UNIGRAM"
        )
    if trainer.get(_SUFFIX_SPACE, 0) or not normalizer.get(_ESCAPE, 1):
        raise ModelError(
            f"{file} marks spaces in a way that isn't supported "
            "(treat_whitespace_as_suffix, or escape_whitespaces off); use a tokenizer.json"
        )


def _fields(data: bytes) -> Iterator[tuple[int, object]]:
    """A message's fields: (number, int | float | bytes). Raises ValueError or IndexError."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        match key & 7:
            case 0:
                value, at = _varint(data, at)
            case 1:
                value, at = data[at : at + 8], at + 8
            case 2:
                n, at = _varint(data, at)
                value, at = data[at : at + n], at + n
            case 5:
                value, at = struct.unpack_from("<f", data, at)[0], at + 4
            case kind:
                raise ValueError(f"wire type {kind}")
        if at > end:
            raise ValueError("a field runs over the end")
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 128:  # nearly all are this short
        return byte, at + 1
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where text should be")
    return value


def _signed(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError("text where a number should be")
    return value - (1 << 64) if value >> 63 else value
