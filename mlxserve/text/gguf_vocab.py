"""A tokenizer from GGUF metadata: vocabulary, merges, kinds of tokens, special ids, templates."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from mlxserve.errors import ModelError
from mlxserve.text.decoding import Decoding
from mlxserve.text.parts import TokenizerParts

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from tokenizers.pre_tokenizers import PreTokenizer

T = TypeVar("T")

_MODEL = "tokenizer.ggml.model"
_PRE = "tokenizer.ggml.pre"
_TOKENS = "tokenizer.ggml.tokens"
_TYPES = "tokenizer.ggml.token_type"
_MERGES = "tokenizer.ggml.merges"
_TEMPLATE = "tokenizer.chat_template"

# GGUF's token types. Control tokens, and the unknown token, never come out of ordinary text and are
# not shown; user-defined ones are ordinary text that is always one token.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

# A GGUF file has room for one end id, while many models have several (end of turn, of message, of
# document). The others are known by name, as llama.cpp does.
_END_NAMES = frozenset(
    {"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>"}
)

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


def read_gguf_vocab(metadata: Mapping[str, object]) -> TokenizerParts:
    """Build the parts of a tokenizer. Raises ModelError for what is missing, damaged or unknown."""
    model = _get(metadata, _MODEL, str)
    if model not in _MODELS:
        raise ModelError(
            f"{_MODEL} is {model!r}, a kind of tokenizer that isn't supported yet; "
            f"supported: {', '.join(sorted(_MODELS))}"
        )
    tokens = _strings(metadata, _TOKENS)
    if not tokens or len(set(tokens)) != len(tokens):
        raise ModelError(f"{_TOKENS} is empty or names a token twice; the GGUF file is damaged")
    backend = _MODELS[model](metadata, tokens)
    _add_special(backend, tokens, _types(metadata, len(tokens)))

    named = {name: _token_id(metadata, key, len(tokens)) for name, key in _NAMED_IDS.items()}
    ends = {_token_id(metadata, key, len(tokens)) for key in _END_IDS} - {None}
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    ends |= {i for i in special if tokens[i] in _END_NAMES}
    bos = named["bos_token"]
    adds_bos = _get(metadata, "tokenizer.ggml.add_bos_token", bool, False)
    return TokenizerParts(
        backend=backend,
        decoding=Decoding(byte_level=True),
        bos_id=bos,
        eos_ids=frozenset(i for i in ends if i is not None),
        prefix_ids=(bos,) if adds_bos and bos is not None else (),
        special_tokens={name: tokens[i] for name, i in named.items() if i is not None},
        chat_templates=_templates(metadata),
    )


def _byte_level_bpe(metadata: Mapping[str, object], tokens: list[str]) -> "Backend":
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE

    pre = _get(metadata, _PRE, str)
    if pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"{_PRE} is {pre!r}, a way of splitting text that isn't supported yet; "
            f"supported: {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    merges = []
    for merge in _strings(metadata, _MERGES):
        # Neither half is empty, and a half may not hold a space: the byte alphabet has none.
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise ModelError(f"{_MERGES} has {merge!r}, not two tokens; the GGUF file is damaged")
        merges.append((left, right))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        backend = Backend(BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # tokenizers raises the base class itself
        raise ModelError(
            f"{_MERGES} doesn't fit {_TOKENS}: {error}; the GGUF file is damaged"
        ) from error
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    return backend


def _gpt2_split() -> "PreTokenizer":
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_split() -> "PreTokenizer":
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_split()])


_MODELS: dict[str, Callable[[Mapping[str, object], list[str]], "Backend"]] = {
    "gpt2": _byte_level_bpe,
}
_PRE_TOKENIZERS: dict[str, Callable[[], "PreTokenizer"]] = {
    "gpt-2": _gpt2_split,
    "smollm": _smollm_split,
}


def _add_special(backend: "Backend", tokens: list[str], types: list[int]) -> None:
    from tokenizers import AddedToken

    for kind, special in ((_UNKNOWN, True), (_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, its_kind in zip(tokens, types, strict=True)
            if its_kind == kind
        ]
        if special:
            backend.add_special_tokens(added)
        else:
            backend.add_tokens(added)


def _types(metadata: Mapping[str, object], n: int) -> list[int]:
    types = _get(metadata, _TYPES, list, [_NORMAL] * n)
    if len(types) != n or not all(t in range(_NORMAL, _BYTE + 1) for t in types):
        raise ModelError(
            f"{_TYPES} must hold a number from {_NORMAL} to {_BYTE} for each of {n} tokens; "
            "the GGUF file is damaged"
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


def _token_id(metadata: Mapping[str, object], key: str, n: int) -> int | None:
    if metadata.get(key) is None:
        return None
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
