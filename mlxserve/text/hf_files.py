"""A tokenizer from a directory in Hugging Face's layout: tokenizer.json and the files around it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxserve.errors import ModelError
from mlxserve.text.decoding import parse_decoder
from mlxserve.text.parts import TokenizerParts

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


def read_directory(path: Path) -> TokenizerParts:
    """Build the parts of a tokenizer. Raises ModelError for what is missing, damaged or unknown."""
    backend = _backend(path)
    config = _read_json(path / "tokenizer_config.json")
    special_tokens = _special_tokens(_read_json(path / "special_tokens_map.json") | config)
    _add_missing(backend, config, special_tokens, path)

    bos = _bos_id(backend, special_tokens)
    return TokenizerParts(
        backend=backend,
        decoding=_decoding(backend),
        bos_id=bos,
        eos_ids=_eos_ids(backend, special_tokens, path),
        prefix_ids=_prefix_ids(backend, bos, config.get("add_bos_token")),
        special_tokens=special_tokens,
        chat_templates=_templates(config, path),
    )


def _backend(path: Path) -> "Backend":
    from tokenizers import Tokenizer as Backend

    file = path / "tokenizer.json"
    if not file.is_file():
        if (path / "tokenizer.model").is_file():
            raise ModelError(
                f"{path} has only a tokenizer.model, which isn't supported yet; "
                "save the model with its tokenizer.json"
            )
        raise ModelError(f"{path} has no tokenizer.json; a model directory needs one")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # tokenizers raises the base class itself
        raise ModelError(f"{file} can't be read: {_one_line(error)}; download it again") from error
    # A training run's limits may be saved in it; applied to a prompt they would cut or fill it.
    backend.no_truncation()
    backend.no_padding()
    return backend


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
    backend: "Backend", config: Mapping[str, Any], special_tokens: Mapping[str, str], path: Path
) -> None:
    """Add tokens that only tokenizer_config.json declares, and mark the named ones as special."""
    from tokenizers import AddedToken

    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token_id, content, fields in _declared(config, path):
        if content in added:
            continue
        flags = ("special", "lstrip", "rstrip", "single_word", "normalized")
        backend.add_tokens(
            [AddedToken(content, **{name: bool(fields.get(name)) for name in flags})]
        )
        added.add(content)
        if backend.token_to_id(content) != token_id:
            raise ModelError(
                f"{path}: tokenizer_config.json gives {content!r} the id {token_id}, and "
                f"tokenizer.json has room for it at {backend.token_to_id(content)}; "
                "take both files from one version of the model"
            )
    named = sorted({text for text in special_tokens.values() if text not in added})
    known = [text for text in named if backend.token_to_id(text) is not None]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in known])


def _declared(config: Mapping[str, Any], path: Path) -> list[tuple[int, str, Mapping[str, Any]]]:
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
                f"{path}: eos_token is {text!r} in tokenizer_config.json, and isn't in "
                "tokenizer.json; take both files from one version of the model"
            )
        ends.add(token_id)
    for name in ("generation_config.json", "config.json"):
        value = _read_json(path / name).get("eos_token_id")
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
    templates: dict[str, str] = {}
    given = config.get("chat_template")
    if isinstance(given, str):
        templates["default"] = given
    elif given is not None:
        for entry in given if isinstance(given, list) else [given]:
            match entry:
                case {"name": str(name), "template": str(source)}:
                    templates[name] = source
                case _:
                    raise ModelError(
                        f"{path}: chat_template in tokenizer_config.json must be a string or a "
                        "list of mappings with name and template"
                    )
    files = {"default": path / "chat_template.jinja"}
    files |= {f.stem: f for f in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    return templates | {name: _read(file) for name, file in files.items() if file.is_file()}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} can't be read: {_one_line(error)}; download it again") from error


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} isn't valid JSON: {error}; download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object; download it again")
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
