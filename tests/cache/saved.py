"""Small caches to write to files, with numbers by chance."""

from collections.abc import Iterator

import numpy as np

from mlxserve.cache.file import Tensors
from mlxserve.cache.file_header import DTYPES, Form, Group, Header

FINGERPRINT = {"model": "tiny", "dtype": "float32", "kv_bits": "0"}


def random_tensors(header: Header, seed: int = 0) -> dict[str, np.ndarray]:
    """All tensors that the header names, of random bits, with zeros after the last token."""
    rng = np.random.default_rng(seed)
    found = {"tokens": rng.integers(0, 50_000, header.tokens, np.int32)}
    for name, form in forms(header):
        dtype = DTYPES[form.dtype][1]
        size = int(np.prod(form.shape)) * dtype.itemsize
        found[name] = np.frombuffer(rng.bytes(size), dtype).reshape(form.shape).copy()
    used = header.tokens % header.page_tokens
    for group in header.groups:
        if used and group.pages and group.pages[-1] == header.tokens // header.page_tokens:
            for layer in group.layers:
                for part in {"k", "v"} & group.parts.keys():
                    found[f"layers.{layer}.{part}"][-1, :, used:] = 0
    return found


def forms(header: Header) -> Iterator[tuple[str, Form]]:
    """The names and whole forms of the layers' tensors."""
    for group in header.groups:
        for layer in group.layers:
            for part, form in group.parts.items():
                pages = () if group.pages is None else (len(group.pages),)
                yield f"layers.{layer}.{part}", Form(form.dtype, (*pages, *form.shape))


def small(tokens: int = 7, fingerprint: dict[str, str] = FINGERPRINT) -> Header:
    """Full layers, a window's last pages, and a recurrent layer; pages of 2 tokens."""
    page = Form("float32", (1, 2, 1))
    half = Form("bfloat16", (2, 2, 1))
    pages = tuple(range(-(-tokens // 2)))
    return Header(
        fingerprint,
        tokens,
        2,
        (
            Group((0, 3), pages, {"k": page, "v": page}),
            Group((1,), (0, *pages[-2:]), {"k": half, "v": half}),
            Group((2,), None, {"state.0": Form("bfloat16", (3,)), "state.1": Form("float32", ())}),
        ),
    )


def small_tensors(header: Header, seed: int = 0) -> Tensors:
    """What `file.write` asks for a header's tensors."""
    return random_tensors(header, seed).__getitem__
