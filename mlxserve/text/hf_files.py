"""A tokenizer from a directory in Hugging Face's layout.

tokenizer.json, or else SentencePiece's tokenizer.model, and the files around it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mlxserve.errors import ModelError
from mlxserve.files import inside, read_json, read_text
from mlxserve.report import one_line
from mlxserve.text.decoding import Decoding, parse_decoder
from mlxserve.text.parts import TokenizerParts
from mlxserve.text.spm import CONTROL, UNKNOWN, USER_DEFINED, Pieces, add_special, build
from mlxserve.text.spm_file import read_model

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# An added token: its id, text and flags.
_Declared: TypeAlias = tuple[int, str, Mapping[str, Any]]


def read_directory(path: Path) -> TokenizerParts:
    """Build the parts of a tokenizer. Raises ModelError for what is missing, damaged or unknown."""
    config = _optional_json(path, "tokenizer_config.json")
    special_tokens = _special_tokens(_optional_json(path, "special_tokens_map.json") | config)
    declared = _declared(config, path)
    add_bos = config.get("add_bos_token")
    if (path / "tokenizer.json").is_file():
        backend = _backend(path)
        decoding = _decoding(backend)
        _add_missing(backend, declared, special_tokens, path)
    elif (path / "tokenizer.model").is_file():
        backend, decoding, named = _sentencepiece(path, config, declared, special_tokens)
        special_tokens = named | special_tokens
        add_bos = True if add_bos is None else add_bos
    else:
        raise ModelError(
            f"{path} has no tokenizer.json and no tokenizer.model; a model directory needs one"
        )
    bos = _bos_id(backend, special_tokens)
    return TokenizerParts(
        backend=backend,
        decoding=decoding,
        bos_id=bos,
        eos_ids=_eos_ids(backend, special_tokens, path),
        prefix_ids=_prefix_ids(backend, bos, add_bos),
        special_tokens=special_tokens,
        chat_templates=_templates(config, path),
    )


def _backend(path: Path) -> "Backend":
    from tokenizers import Tokenizer as Backend

    file = inside(path, "tokenizer.json")
    text = read_text(file)
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # tokenizers raises the base class itself
        raise ModelError(f"{file} can't be read: {one_line(error)}; download it again") from error
    # A training run's limits may be saved in it; applied to a prompt they would cut or fill it.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _sentencepiece(
    path: Path,
    config: Mapping[str, Any],
    declared: list[_Declared],
    special_tokens: Mapping[str, str],
) -> "tuple[Backend, Decoding, dict[str, str]]":
    """The backend and decoding of a .model file, and the special tokens that it names."""
    pieces, named = _pieces(path, config, declared)
    try:
        backend, decoding = build(pieces)
    except Exception as error:  # tokenizers raises the base class itself
        raise ModelError(
            f"{path / 'tokenizer.model'} can't be used: {one_line(error)}; download it again"
        ) from error
    # In a normalised text the names would have to begin with a space.
    added = [
        (token_id, content, {**fields, "normalized": False})
        for token_id, content, fields in sorted(
            [*declared, *_legacy_added(path)], key=lambda entry: entry[0]
        )
    ]
    _add_missing(backend, added, named | dict(special_tokens), path)
    add_special(backend, pieces.tokens, pieces.kinds, user_defined=False)
    return backend, decoding, named


def _pieces(
    path: Path, config: Mapping[str, Any], declared: list[_Declared]
) -> tuple[Pieces, dict[str, str]]:
    """The .model file's pieces and named tokens, with what tokenizer_config.json changes."""
    pieces, named = read_model(inside(path, "tokenizer.model"))
    tokens, kinds = list(pieces.tokens), list(pieces.kinds)
    known, renamed = set(tokens), {}
    for token_id, content, fields in declared:
        # A placeholder that was given a name after training.
        if 0 <= token_id < len(tokens) and content not in known:
            renamed[tokens[token_id]] = content
            tokens[token_id] = content
            if kinds[token_id] != UNKNOWN:
                kinds[token_id] = CONTROL if fields.get("special") else USER_DEFINED
    prefix = pieces.prefix
    if (wanted := config.get("add_prefix_space")) is not None:
        prefix = "always" if wanted else "never"
    if prefix == "always" and not _is_legacy(config):
        prefix = "first"
    changed = replace(
        pieces,
        tokens=tokens,
        kinds=kinds,
        unknown=renamed.get(pieces.unknown, pieces.unknown),
        prefix=prefix,
        whole_user_defined=True,
    )
    return changed, {name: renamed.get(token, token) for name, token in named.items()}


def _is_legacy(config: Mapping[str, Any]) -> bool:
    """Whether text after an added token gains a space, too: transformers' defaults."""
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    return bool(config.get("legacy", kind != "LlamaTokenizer"))


def _legacy_added(path: Path) -> list[_Declared]:
    """Added tokens as transformers wrote them before tokenizer_config.json had them: text to id."""
    added = _optional_json(path, "added_tokens.json")
    if not all(type(token_id) is int for token_id in added.values()):
        raise ModelError(f"{path / 'added_tokens.json'} must map texts to ids; download it again")
    return [(token_id, text, {}) for text, token_id in added.items()]


def _decoding(backend: "Backend") -> Any:
    decoder = backend.decoder
    # A decoder's state is its JSON; writing out the whole tokenizer for it would take seconds.
    return parse_decoder(None if decoder is None else json.loads(decoder.__getstate__()))  # pyright: ignore


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens, as text: the variables that templates may use."""
    extra = config.get("extra_special_tokens")
    named = {**config, **extra} if isinstance(extra, dict) else config
    texts = {name: _text(value) for name, value in named.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def _text(token: object) -> str | None:
    """A token written as a string, or as a mapping with its content."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _add_missing(
    backend: "Backend",
    declared: Sequence[_Declared],
    special_tokens: Mapping[str, str],
    path: Path,
) -> None:
    """Add tokens that only other files declare, and mark the named ones as special."""
    from tokenizers import AddedToken

    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token_id, content, fields in declared:
        if content in added:
            continue
        flags = ("special", "lstrip", "rstrip", "single_word", "normalized")
        backend.add_tokens(
            [AddedToken(content, **{name: bool(fields.get(name)) for name in flags})]
        )
        added.add(content)
        if backend.token_to_id(content) != token_id:
            raise ModelError(
                f"{path}: tokenizer_config.json or added_tokens.json gives {content!r} the id "
                f"{token_id}, and the tokenizer has room for it at {backend.token_to_id(content)}; "
                "take all files from one version of the model"
            )
    named = sorted({text for text in special_tokens.values() if text not in added})
    known = [text for text in named if backend.token_to_id(text) is not None]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in known])


def _declared(config: Mapping[str, Any], path: Path) -> list[_Declared]:
    """The added tokens tokenizer_config.json declares: (id, text, flags), by id."""
    declared = config.get("added_tokens_decoder") or {}
    try:
        return sorted(
            (
                (int(token_id), str(fields["content"]), fields)
                for token_id, fields in declared.items()
            ),
            key=lambda entry: entry[0],
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{path}: added_tokens_decoder in tokenizer_config.json must map ids to mappings with "
            "content; download it again"
        ) from error


def _bos_id(backend: "Backend", special_tokens: Mapping[str, str]) -> int | None:
    text = special_tokens.get("bos_token")
    return None if text is None else backend.token_to_id(text)


def _eos_ids(backend: "Backend", special_tokens: Mapping[str, str], path: Path) -> frozenset[int]:
    ends = set()
    if (text := special_tokens.get("eos_token")) is not None:
        if (token_id := backend.token_to_id(text)) is None:
            raise ModelError(
                f"{path}: eos_token is {text!r} in tokenizer_config.json, and the tokenizer has "
                "no such token; take all files from one version of the model"
            )
        ends.add(token_id)
    for name in ("generation_config.json", "config.json"):
        value = _optional_json(path, name).get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise ModelError(
                    f"{path / name}: eos_token_id is {value!r}; it must be an id or a list of ids"
                )
            ends.add(token_id)
    return frozenset(ends)


def _prefix_ids(backend: "Backend", bos: int | None, add_bos: object) -> tuple[int, ...]:
    """What tokenizer.json puts before a prompt; `add_bos_token`, where given, has the last word.

    That is how such a directory becomes a GGUF file, too. (transformers 5 goes by tokenizer.json
    alone.) What tokenizer.json puts after a text, an end token, is left out.
    """
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    starts = range(len(full) - len(plain) + 1)
    at = next((i for i in starts if full[i : i + len(plain)] == plain), 0)
    prefix = tuple(full[:at])
    if add_bos is True and bos is not None and bos not in prefix:
        return (bos, *prefix)
    if add_bos is False:
        return tuple(token for token in prefix if token != bos)
    return prefix


def _templates(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Templates by name. Files of their own replace what tokenizer_config.json has."""
    templates = _named_templates(config.get("chat_template"), path / "tokenizer_config.json")
    older = "chat_template.json"
    templates |= _named_templates(_optional_json(path, older).get("chat_template"), path / older)
    files = [path / "chat_template.jinja"]
    files += sorted((path / "additional_chat_templates").glob("*.jinja"))
    for file in files:
        if file.is_file():
            name = "default" if file is files[0] else file.stem
            templates[name] = read_text(inside(path, str(file.relative_to(path))))
    return templates


def _named_templates(given: object, file: Path) -> dict[str, str]:
    """A template, or a list of templates with names."""
    if not given:  # absent, null, or empty: no template
        return {}
    if isinstance(given, str):
        return {"default": given}
    templates = {}
    for entry in given if isinstance(given, list) else [given]:
        match entry:
            case {"name": str(name), "template": str(source)}:
                templates[name] = source
            case _:
                raise ModelError(
                    f"{file}: chat_template must be a string or a list of mappings with name and "
                    "template; mend it or remove it"
                )
    return templates


def _optional_json(path: Path, name: str) -> dict[str, Any]:
    """A JSON object, or an empty one where there is no such file."""
    return read_json(inside(path, name)) if (path / name).is_file() else {}
