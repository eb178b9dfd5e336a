"""A tokenizer from GGUF metadata: vocabulary, merges, kinds of tokens, special ids, templates."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from mlxserve.errors import ModelError
from mlxserve.text.decoding import Decoding
from mlxserve.text.parts import TokenizerParts
from mlxserve.text.pretokenizers import PRE_TOKENIZERS
from mlxserve.text.spm import BYTE, CONTROL, NORMAL, UNKNOWN, Pieces, add_special, build

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

T = TypeVar("T")

_MODEL = "tokenizer.ggml.model"
_PRE = "tokenizer.ggml.pre"
_TOKENS = "tokenizer.ggml.tokens"
_TYPES = "tokenizer.ggml.token_type"
_MERGES = "tokenizer.ggml.merges"
_SCORES = "tokenizer.ggml.scores"
_TEMPLATE = "tokenizer.chat_template"

# A GGUF file has room for one end id, while many models have several (end of turn, of message, of
# document). The others are known by name, as llama.cpp does, whatever kind the file gives them.
_END_NAMES = frozenset(
    {
        "<EOT>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<turn|>",
        "<|call|>",
        "<|end|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|im_end|>",
        "<|return|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "[EOT]",
    }
)
# Where there are these, "<|end|>" ends a part of an answer only.
_HARMONY_ENDS = frozenset({"<|return|>", "<|call|>"})

_NAMED_IDS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_END_IDS = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What the kind of tokenizer settles: how it works, and what holds where the file is silent."""

    backend: "Backend"
    decoding: Decoding
    adds_bos: bool


def read_gguf_vocab(metadata: Mapping[str, object]) -> TokenizerParts:
    """Build the parts of a tokenizer. Raises ModelError for what is missing, damaged or unknown."""
    model = _get(metadata, _MODEL, str)
    if model not in _MODELS:
        raise ModelError(
            f"{_MODEL} is {model!r}, a kind of tokenizer that isn't supported yet; "
            f"supported: {', '.join(sorted(_MODELS))}"
        )
    tokens = _tokens(metadata)
    kinds = _types(metadata, len(tokens))
    end_names = _END_NAMES.intersection(tokens)
    if end_names >= _HARMONY_ENDS:
        end_names -= {"<|end|>"}
    kinds = [
        CONTROL if token in end_names else kind for token, kind in zip(tokens, kinds, strict=True)
    ]
    defaults = {
        name: token
        for name, token in _DEFAULT_IDS.get(model, {}).items()
        if token < len(tokens) and kinds[token] in (UNKNOWN, CONTROL)
    }
    named = {
        name: _token_id(metadata, key, len(tokens), defaults.get(name))
        for name, key in _NAMED_IDS.items()
    }
    kind = _MODELS[model](metadata, tokens, kinds, named["unk_token"])
    add_special(kind.backend, tokens, kinds, user_defined=True)

    ends = {_token_id(metadata, key, len(tokens)) for key in _END_IDS} | {named["eos_token"]}
    ends |= {i for i, token in enumerate(tokens) if token in end_names}
    bos = named["bos_token"]
    adds_bos = _get(metadata, "tokenizer.ggml.add_bos_token", bool, kind.adds_bos)
    return TokenizerParts(
        backend=kind.backend,
        decoding=kind.decoding,
        bos_id=bos,
        eos_ids=frozenset(i for i in ends if i is not None),
        prefix_ids=(bos,) if adds_bos and bos is not None else (),
        special_tokens={name: tokens[i] for name, i in named.items() if i is not None},
        chat_templates=_templates(metadata),
    )


def _byte_level_bpe(
    metadata: Mapping[str, object], tokens: list[str], kinds: list[int], unknown: int | None
) -> _Kind:
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE

    pre = _get(metadata, _PRE, str)
    if pre not in PRE_TOKENIZERS:
        raise ModelError(
            f"{_PRE} is {pre!r}, a way of splitting text that isn't supported yet; "
            f"supported: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    how = PRE_TOKENIZERS[pre]
    merges = []
    for merge in _strings(metadata, _MERGES):
        # Neither half is empty, and a half may not hold a space: the byte alphabet has none.
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise ModelError(f"{_MERGES} has {merge!r}, not two tokens; the GGUF file is damaged")
        merges.append((left, right))
    merges = list(dict.fromkeys(merges))  # of a merge named twice, the first place counts
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        backend = Backend(BPE(vocabulary, merges, ignore_merges=how.ignore_merges))
    except Exception as error:  # tokenizers raises the base class itself
        raise ModelError(
            f"{_MERGES} doesn't fit {_TOKENS}: {error}; the GGUF file is damaged"
        ) from error
    how.apply_to(backend)
    return _Kind(backend=backend, decoding=Decoding(byte_level=True), adds_bos=how.adds_bos)


def _sentencepiece(
    metadata: Mapping[str, object], tokens: list[str], kinds: list[int], unknown: int | None
) -> _Kind:
    scores = _get(metadata, _SCORES, list)
    if len(scores) != len(tokens) or not all(_is_number(score) for score in scores):
        raise ModelError(
            f"{_SCORES} must hold a number for each of {len(tokens)} tokens, and has "
            f"{len(scores)} values; the GGUF file is damaged"
        )
    prefix = _get(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
    pieces = Pieces(
        tokens=tokens,
        scores=scores,
        kinds=kinds,
        unknown=None if unknown is None else tokens[unknown],
        prefix="always" if prefix else "never",
    )
    try:
        backend, decoding = build(pieces)
    except Exception as error:  # tokenizers raises the base class itself
        raise ModelError(f"{_TOKENS} can't be used: {error}; convert the model again") from error
    return _Kind(backend=backend, decoding=decoding, adds_bos=True)


_MODELS: dict[str, Callable[[Mapping[str, object], list[str], list[int], int | None], _Kind]] = {
    "gpt2": _byte_level_bpe,
    "llama": _sentencepiece,
}
# SentencePiece's own, which files made long ago don't repeat.
_DEFAULT_IDS = {"llama": {"unk_token": 0, "bos_token": 1, "eos_token": 2}}


def _tokens(metadata: Mapping[str, object]) -> list[str]:
    tokens = _strings(metadata, _TOKENS)
    if not tokens:
        raise ModelError(f"{_TOKENS} is empty; the GGUF file is damaged")
    if len(set(tokens)) != len(tokens):
        twice = next(token for token, n in Counter(tokens).items() if n > 1)
        raise ModelError(f"{_TOKENS} has {twice!r} twice; the GGUF file is damaged")
    return tokens


def _is_number(value: object) -> bool:
    return isinstance(value, float | int) and not math.isnan(value)


def _types(metadata: Mapping[str, object], n: int) -> list[int]:
    types = _get(metadata, _TYPES, list, [NORMAL] * n)
    valid = range(NORMAL, BYTE + 1)
    if len(types) != n or not all(isinstance(t, int) and t in valid for t in types):
        raise ModelError(
            f"{_TYPES} must hold a number from {NORMAL} to {BYTE} for each of {n} tokens, and has "
            f"{len(types)} values; the GGUF file is damaged"
        )
    return types


def _templates(metadata: Mapping[str, object]) -> dict[str, str]:
    templates = {}
    for key in metadata:
        if key == _TEMPLATE:
            templates["default"] = _get(metadata, key, str)
        elif key.startswith(f"{_TEMPLATE}."):
            templates[key.removeprefix(f"{_TEMPLATE}.")] = _get(metadata, key, str)
    return templates


def _token_id(
    metadata: Mapping[str, object], key: str, n: int, default: int | None = None
) -> int | None:
    if metadata.get(key) is None:
        return default
    token = _get(metadata, key, int)
    if not 0 <= token < n:
        raise ModelError(f"{key} is {token}, outside the {n} tokens; the GGUF file is damaged")
    return token


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    values = _get(metadata, key, list)
    if not all(isinstance(value, str) for value in values):
        raise ModelError(f"{key} must be a list of strings; the GGUF file is damaged")
    return values


def _get(metadata: Mapping[str, object], key: str, kind: type[T], default: T | None = None) -> T:
    value = metadata.get(key, default)
    if value is None:
        raise ModelError(f"{key} is missing from the GGUF metadata; convert the model again")
    if not isinstance(value, kind):
        raise ModelError(
            f"{key} is a {type(value).__name__}, not a {kind.__name__}; the GGUF file is damaged"
        )
    return value
