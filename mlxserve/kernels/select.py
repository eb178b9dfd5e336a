"""Choosing the next token of each row from its logits."""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import mlx.core as mx

from mlxserve.kernels.registry import check_close, native


class Choice(NamedTuple):
    """How one row's token is drawn.

    key: two words of 32 bits, the state of the random numbers. temperature: above 0. top_k, top_p,
    min_p: applied in this order; 0, 1 and 0 turn them off.
    """

    key_high: int
    key_low: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def greedy(logits: mx.array) -> tuple[mx.array, mx.array]:
    """The likeliest token of each row, the lowest of equal ones, and whether all logits are finite.

    logits: float32 `[B, V]`. Returns int32 `[B]` and bool `[B]`. Raises ValueError for other shapes
    and dtypes.
    """
    kernels = native("select")
    if kernels is None:
        return _greedy(logits)
    ids, finite = kernels.greedy(logits)
    return ids, finite


def draw(logits: mx.array, rows: Sequence[Choice]) -> mx.array:
    """One token per row from `softmax(filtered(logits, rows))`.

    logits: float32 `[B, V]`. Returns int32 `[B]`. A row's token doesn't depend on the other rows:
    it is the maximum after adding Gumbel noise, which is mx.random's for the row's key. Raises
    ValueError for other shapes and dtypes, and parameters out of range.
    """
    kernels = native("select")
    if kernels is not None:
        return kernels.draw(logits, rows)
    return _draw(_filtered(logits, rows), rows)


def filtered(logits: mx.array, rows: Sequence[Choice]) -> mx.array:
    """Logits over temperature, the likeliest at 0, and -infinity for tokens that are filtered out.

    logits: float32 `[B, V]`. Returns float32 `[B, V]`. Of the tokens in order of likelihood, equal
    ones by id, top_k keeps the first k, top_p the smallest set whose probability reaches p
    (Holtzman et al. 2020, arXiv:1904.09751), and min_p those at least min_p times as likely as the
    likeliest (Nguyen et al. 2024, arXiv:2407.01082). The likeliest always stays. Raises ValueError
    as `draw`.
    """
    kernels = native("select")
    return _filtered(logits, rows) if kernels is None else kernels.filtered(logits, rows)


def allowed(logits: mx.array, bits: mx.array) -> mx.array:
    """The logits of the tokens whose bit is set, and -infinity for the others.

    logits: float32 `[B, V]`; bits: uint32 `[B, ceil(V / 32)]`, token 0 the lowest bit of the first.
    Raises ValueError for other shapes and dtypes.
    """
    kernels = native("select")
    return _allowed(logits, bits) if kernels is None else kernels.allowed(logits, bits)


def _allowed(logits: mx.array, bits: mx.array) -> mx.array:
    rows, vocab = logits.shape
    if bits.shape != (rows, -(-vocab // 32)) or bits.dtype != mx.uint32:
        raise ValueError(f"allowed: {bits.dtype} {bits.shape} for {rows} rows of {vocab} tokens")
    each = (bits[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    return mx.where(each.reshape(rows, -1)[:, :vocab].astype(mx.bool_), logits, -mx.inf)


def _greedy(logits: mx.array) -> tuple[mx.array, mx.array]:
    return mx.argmax(logits, axis=-1).astype(mx.int32), mx.isfinite(logits).all(axis=-1)


def _filtered(logits: mx.array, rows: Sequence[Choice]) -> mx.array:
    if len(rows) != logits.shape[0]:
        raise ValueError(f"filtered: {len(rows)} filters for {logits.shape[0]} rows of logits")
    vocab = logits.shape[-1]
    # The likeliest at 0, so that no temperature overflows float32.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / _column(r.temperature for r in rows)
    if not any(row.filters for row in rows):
        return scaled
    order = mx.argsort(-scaled, axis=-1)
    x = mx.take_along_axis(scaled, order, axis=-1)
    x = mx.where(mx.arange(vocab) < _column(row.top_k or vocab for row in rows), x, -mx.inf)
    probs = mx.softmax(x, axis=-1)
    top_p = _column(row.top_p for row in rows)
    before = mx.cumsum(probs, axis=-1) - probs
    # A sum that rounds to just over 1 must not cut the tail where top_p is off.
    x = mx.where((before < top_p) | (top_p >= 1), x, -mx.inf)
    probs = mx.softmax(x, axis=-1)
    x = mx.where(probs >= _column(row.min_p for row in rows) * probs[:, :1], x, -mx.inf)
    return mx.put_along_axis(scaled, order, x, axis=-1)


def _draw(kept: mx.array, rows: Sequence[Choice]) -> mx.array:
    keys = mx.array([(row.key_high, row.key_low) for row in rows], mx.uint32)
    ids = mx.vmap(lambda row, key: mx.random.categorical(row, key=key))(kept, keys)
    return ids.astype(mx.int32)


def _column(values) -> mx.array:
    return mx.array(list(values), mx.float32)[:, None]


def check(kernels: ModuleType) -> None:
    """Kernels against references on a vocabulary that fills no vector. Raises ArithmeticError."""
    logits = mx.random.normal((6, 203), key=mx.random.key(0)) * 3.0
    rows = [
        Choice(1, 2),
        Choice(3, 4, 0.7, top_k=20),
        Choice(5, 6, 1.3, top_p=0.9),
        Choice(7, 8, 1.0, min_p=0.05),
        Choice(9, 10, 2.0, 50, 0.8, 0.02),
        Choice(11, 12, 0.01, top_k=1),
    ]
    expected, got = _filtered(logits, rows), kernels.filtered(logits, rows)
    if not mx.array_equal(mx.isinf(got), mx.isinf(expected)):
        raise ArithmeticError("filtered keeps other tokens than its reference")
    check_close("filtered", mx.exp(got), mx.exp(expected), 1e-6)
    if not mx.array_equal(kernels.draw(logits, rows), _draw(expected, rows)):
        raise ArithmeticError("draw gives other tokens than its reference")
    bits = mx.random.randint(0, 1 << 31, (6, 7), key=mx.random.key(1)).astype(mx.uint32)
    bits[:, 2:4] = mx.array([0, 0xFFFFFFFF], mx.uint32)
    if not mx.array_equal(kernels.allowed(logits, bits), _allowed(logits, bits)):
        raise ArithmeticError("allowed keeps other tokens than its reference")
    for a, b in zip(kernels.greedy(logits), _greedy(logits), strict=True):
        if not mx.array_equal(a, b):
            raise ArithmeticError("greedy differs from its reference")
