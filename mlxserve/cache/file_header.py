"""What a prompt-cache file says of itself, and where its bytes lie. Integers only, no data.

It is a safetensors file (huggingface/safetensors, README): eight bytes with the header's length, a
JSON object from names to dtype, shape and byte range, then the data, without gaps. Tensors:

    checksums             CRC-32 of the header, the tokens, each group's pages or states, itself
    tokens                int32 `[tokens]`
    layers.I.k, .v        pages `[pages, Hk, P, D]`; of latent layers only k
    layers.I.k.codes, .k.scales, .k.biases, and of v: pages in 8 or 4 bits (kernels/pages.py)
    layers.I.state.J      an array of a recurrent layer's state after the last token

A page's checksum runs over the page in all tensors of its group, in the file's order. The first
eight bytes and the JSON follow from a `Header` alone. So a reader trusts none of it: it writes them
anew and wants the same bytes. In every version, FORMAT comes early in the JSON, the version with
it, and the header's checksum first in the data.
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

FORMAT = "mlxserve-prompt-cache"
VERSION = 1
MAX_HEADER_BYTES = 4 << 20  # half a million pages
MAX_DIMS = 8
ALIGNMENT = 64
CHECKSUM = np.dtype("<u4")
SIDES = ("k", "v")
PACKED = ("codes", "scales", "biases")

# Name -> safetensors' word, and NumPy's type, which for bfloat16 is that of its bits.
DTYPES: dict[str, tuple[str, np.dtype]] = {
    "float32": ("F32", np.dtype("<f4")),
    "uint32": ("U32", CHECKSUM),
    "int32": ("I32", np.dtype("<i4")),
    "float16": ("F16", np.dtype("<f2")),
    "bfloat16": ("BF16", np.dtype("<u2")),
}


@dataclass(frozen=True, slots=True)
class Form:
    """An array's dtype, a name of `DTYPES`, and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1].itemsize


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that keep the same: pages of the same numbers, or states of the same shapes.

    layers, pages: ascending; page g holds tokens g * P to g * P + P - 1. pages is None for states.
    parts: what each layer has, `k`, `v.codes`, `state.0`, ..., and the form of one page or state.
    Layers may come in two groups: packed pages, and a last one that isn't packed.
    """

    layers: tuple[int, ...]
    pages: tuple[int, ...] | None
    parts: dict[str, Form]

    @property
    def rows(self) -> int:
        """Pages, or 1 for a state: how many checksums a tensor counts for."""
        return 1 if self.pages is None else len(self.pages)


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds.

    fingerprint: what the numbers depend on (model, dtype, ...), names to values, in order. tokens:
    how many; the last page holds fewer than page_tokens (P) where they don't come out even.
    """

    fingerprint: dict[str, str]
    tokens: int
    page_tokens: int
    groups: tuple[Group, ...]


class Entry(NamedTuple):
    """A tensor's place. checksum: index of the first of its `rows`; offset: in the file.

    blank: tokens of its last page, `[Hk, P, D]`, that come after the prompt's end.
    """

    form: Form
    checksum: int
    rows: int = 1
    blank: int = 0
    offset: int = 0


class Layout(NamedTuple):
    """A file's first bytes, up to the data, its tensors in order, and its whole size."""

    prefix: bytes
    entries: dict[str, Entry]
    size_bytes: int


def layout(header: Header) -> Layout:
    """Where everything lies. Raises ValueError for a header that can't be."""
    check(header)
    last_page, used = divmod(header.tokens, header.page_tokens)
    entries = {"tokens": Entry(Form("int32", (header.tokens,)), checksum=1)}
    checksum = 2
    for group in header.groups:
        partial = group.pages is not None and group.pages[-1] == last_page
        for layer, (part, form) in itertools.product(group.layers, group.parts.items()):
            if (name := f"layers.{layer}.{part}") in entries:
                raise ValueError(f"layer {layer} has {part} in two groups")
            shape = form.shape if group.pages is None else (len(group.pages), *form.shape)
            blank = header.page_tokens - used if partial and part in ("k", "v") else 0
            entries[name] = Entry(Form(form.dtype, shape), checksum, group.rows, blank)
            checksum += group.pages is None
        checksum += len(group.pages or ())
    # Wider types first, so that each tensor starts at a multiple of its element's size.
    ordered = sorted(entries.items(), key=lambda x: -DTYPES[x[1].form.dtype][1].itemsize)
    entries = {"checksums": Entry(Form("uint32", (checksum + 1,)), checksum=0), **dict(ordered)}
    ends = list(itertools.accumulate(entry.form.nbytes for entry in entries.values()))
    prefix = _prefix(header, entries, ends)
    if len(prefix) > MAX_HEADER_BYTES:
        raise ValueError(f"the header has {len(prefix)} bytes, over {MAX_HEADER_BYTES}")
    starts = [len(prefix) + end for end in (0, *ends)]
    entries = {
        name: entry._replace(offset=at)
        for (name, entry), at in zip(entries.items(), starts, strict=False)
    }
    return Layout(prefix, entries, starts[-1])


def _prefix(header: Header, tensors: dict[str, Entry], ends: list[int]) -> bytes:
    contents = {
        "fingerprint": header.fingerprint,
        "tokens": header.tokens,
        "page_tokens": header.page_tokens,
        "groups": [
            {
                "layers": group.layers,
                "pages": group.pages,
                "parts": {name: [form.dtype, form.shape] for name, form in group.parts.items()},
            }
            for group in header.groups
        ],
    }
    metadata = {"format": FORMAT, "version": str(VERSION), "contents": json.dumps(contents)}
    listed: dict[str, Any] = {"__metadata__": metadata}
    for (name, (form, *_)), end in zip(tensors.items(), ends, strict=True):
        listed[name] = {
            "dtype": DTYPES[form.dtype][0],
            "shape": form.shape,
            "data_offsets": [end - form.nbytes, end],
        }
    text = json.dumps(listed, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def decode(text: str, tensors: int) -> Header:
    """The header whose `contents` these are. Raises ValueError, also for another count of tensors.

    That count bounds the work of `layout`, which a few short lists could make long otherwise.
    """
    match json.loads(text):
        case {
            "fingerprint": dict(fingerprint),
            "tokens": int(tokens),
            "page_tokens": int(page_tokens),
            "groups": list(groups),
        }:
            header = Header(fingerprint, tokens, page_tokens, tuple(map(_group, groups)))
        case _:
            raise ValueError("its contents aren't described")
    if 2 + sum(len(group.layers) * len(group.parts) for group in header.groups) != tensors:
        raise ValueError(f"it has {tensors} tensors, and its contents are others")
    return header


def _group(value: Any) -> Group:
    match value:
        case {"layers": list(layers), "pages": list() | None as pages, "parts": dict(parts)}:
            forms = {name: _form(form) for name, form in parts.items()}
            return Group(tuple(layers), None if pages is None else tuple(pages), forms)
    raise ValueError("a group of layers isn't described")


def _form(value: Any) -> Form:
    match value:
        case [str(dtype), list(shape)]:
            return Form(dtype, tuple(shape))
    raise ValueError("an array isn't described")


def check(header: Header) -> None:
    """Raises ValueError, with what is wrong, unless everything in the header fits together."""
    for name, value in header.fingerprint.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise ValueError(f"fingerprint has {name!r}: {value!r}, expected texts")
    for name in ("tokens", "page_tokens"):
        if not _whole(getattr(header, name), 1):
            raise ValueError(f"{name} is {getattr(header, name)!r}, expected 1 or more")
    pages = -(-header.tokens // header.page_tokens)
    for group in header.groups:
        _check_ascending("layers", group.layers)
        for form in group.parts.values():
            if form.dtype not in DTYPES:
                raise ValueError(f"dtype is {form.dtype!r}, expected one of {', '.join(DTYPES)}")
            if len(form.shape) > MAX_DIMS or not all(_whole(n, 1) for n in form.shape):
                raise ValueError(f"a shape is {form.shape}")
        if group.pages is None:
            if list(group.parts) != [f"state.{j}" for j in range(len(group.parts))]:
                raise ValueError(f"a state has parts {list(group.parts)}, expected state.0, ...")
            continue
        _check_ascending("pages", group.pages)
        if group.pages[-1] >= pages:
            raise ValueError(f"page {group.pages[-1]} lies after the {header.tokens} tokens")
        _check_sides(group.parts, header.page_tokens)
        packed = not group.parts.keys() <= {"k", "v"}
        if packed and group.pages[-1] * header.page_tokens > header.tokens - header.page_tokens:
            raise ValueError(f"page {group.pages[-1]} isn't full, so it can't be packed")


def _whole(n: Any, least: int) -> bool:
    return type(n) is int and least <= n < 2**31


def _check_ascending(what: str, numbers: Sequence[Any]) -> None:
    if not (numbers and all(_whole(n, 0) for n in numbers)):
        raise ValueError(f"{what} are {numbers}, expected one or more whole numbers")
    if any(a >= b for a, b in itertools.pairwise(numbers)):
        raise ValueError(f"{what} are {numbers}, expected them ascending")


def _check_sides(parts: dict[str, Form], page_tokens: int) -> None:
    """Keys, and values of as many heads; each plain, or packed in arrays that fit together."""
    sides = [_side(side, parts) for side in SIDES]
    heads = {form.shape[:1] for form in parts.values()}
    if list(parts) != sides[0] + sides[1] or not sides[0] or len(heads) != 1:
        raise ValueError(f"a page has parts {parts}, expected k and v, plain or packed")
    for names in sides:
        match [parts[name] for name in names]:
            case []:
                continue
            case [Form(shape=(_, tokens, _))] if tokens == page_tokens:
                continue
            case [
                Form("uint32", (_, rows, _)),
                Form("float16", (_, same, *_)) as scales,
                biases,
            ] if rows == same and scales == biases:
                continue
        raise ValueError(f"a page has parts {parts}, which don't fit together")


def _side(side: str, parts: dict[str, Form]) -> list[str]:
    """The parts of keys or values."""
    forms = (side_parts(side, packed=packed) for packed in (False, True))
    return next((names for names in forms if names[0] in parts), [])


def side_parts(side: str, *, packed: bool) -> list[str]:
    """What the arrays of keys (`k`) or values (`v`) are called, in order."""
    return [f"{side}.{part}" for part in PACKED] if packed else [side]
