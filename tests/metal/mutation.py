"""Mutants of a kernel's text: each barrier deleted, each bound moved both ways, parts swapped."""

import re

import numpy as np

from mlxserve.kernels import attention
from tests.support.metal import KernelError

BARRIER = re.compile(r"(?:threadgroup|simdgroup)_barrier\([^;]*\);")
BOUND = re.compile(r"(?<=[\w)\]]) < (?=[\w(])")


def mutants_of(text, swapped):
    """What each is, and its text. swapped: (old, new), of which the first old is replaced."""
    for found in BARRIER.finditer(text):
        yield f"without {_place(text, found)}", _replaced(text, found, "")
    for found in BOUND.finditer(text):
        yield f"<= at {_place(text, found)}", _replaced(text, found, " <= ")
        yield f"+ 1 < at {_place(text, found)}", _replaced(text, found, " + 1 < ")
    for old, new in swapped:
        found = re.search(re.escape(old), text)
        assert found, f"{old!r} isn't in the kernel"
        yield f"{old} -> {new}", _replaced(text, found, new)


def kernel_mutants(kernel, swapped, headers):
    """What each is, and the kernel's source and header. headers: by name, (text, swapped)."""
    for what, text in mutants_of(kernel.source, swapped):
        yield what, text, kernel.header
    for name, (part, swapped_there) in headers.items():
        for what, text in mutants_of(part, swapped_there):
            yield f"{name}: {what}", kernel.source, kernel.header.replace(part, text)


def _place(text, found):
    line = text.count("\n", 0, found.start())
    begin = text.rfind("\n", 0, found.start()) + 1
    return f"{text.splitlines()[line].strip()} [{found.start() - begin}]"


def _replaced(text, found, new):
    return text[: found.start()] + new + text[found.end() :]


def attends_rightly(run, q, cache, how, expected):
    """Whether attention through `run` has no fault that the emulator finds, and is right."""
    try:
        out = attention._metal(run, q, cache.hot, cache.pool, cache.described, how)
    except KernelError:
        return False
    return np.allclose(np.array(out, np.float64), expected, atol=2e-3)
