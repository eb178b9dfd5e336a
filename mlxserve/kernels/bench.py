"""How fast the ops are on this device, beside MLX's own path and what the device can do.

Sizes are those of a layer of Llama 3.2 1B. An op is measured as a model uses it: on one array after
another, which together are larger than the caches.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from mlxserve import device
from mlxserve.kernels import registry, select
from mlxserve.kernels.append import append
from mlxserve.kernels.attention import PagedRows, paged_attention
from mlxserve.kernels.gates import gated
from mlxserve.kernels.matmul import PanelWeight, matmul, prepare
from mlxserve.kernels.norm import add_rms_norm
from mlxserve.kernels.pages import PAGE_TOKENS, PoolSides, Sides, arrays_of, dtype_name, empty_pool
from mlxserve.kernels.quantized import PackedWeight
from mlxserve.kernels.rope import rotate
from mlxserve.kernels.uses import AttentionUse, ChunkUse, MatmulUse, NormUse, RopeUse, Use

WIDTH, INNER, VOCAB = 2048, 8192, 128_256
Q_HEADS, KV_HEADS, DIM = 32, 8, 64
GROUP = 64
CONTEXT = 4096
SEALED = 4  # pages at once
SPREAD_BYTES = 128 << 20  # of the arrays of one kind, more than caches hold
MAX_LAYERS = 16
PEAK_SIDE = 2048  # of the matmul that shows what the device can compute

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """An op at a size. moved: bytes that it must read and write at least; flops: its operations.

    make: called with a number, makes the arrays of one layer, and returns the call. use: of the
    Metal kernel that it may have.
    """

    op: str
    size: str
    moved: int
    flops: int
    make: Callable[[int], Call]
    use: Use | None = None

    @property
    def layers(self) -> int:
        """How many are measured one after another."""
        return min(MAX_LAYERS, math.ceil(SPREAD_BYTES / self.moved))

    @property
    def from_memory(self) -> bool:
        """Whether their arrays are larger than the caches."""
        return self.layers * self.moved >= SPREAD_BYTES


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured of a case. own_s: seconds of MLX's own path; None where that is all."""

    case: Case
    implementation: str
    seconds: float
    own_s: float | None

    @property
    def bytes_per_s(self) -> float:
        return self.case.moved / self.seconds

    @property
    def flops_per_s(self) -> float:
        return self.case.flops / self.seconds


def cases() -> list[Case]:
    """All of them."""
    return [
        *(_matmul(rows, bits) for bits in (4, 8) for rows in (1, 4, 16)),
        _matmul(128, 4),
        *(_attention(rows, bits) for bits in (0, 8, 4) for rows in (1, 8)),
        _chunk(512),
        *(_seal(bits) for bits in (0, 8, 4)),
        *map(_norm, (1, 16)),
        *map(_rope, (1, 16)),
        *map(_gated, (1, 16)),
        *map(_greedy, (1, 16)),
    ]


def measure(case: Case, budget_s: float) -> Figures:
    """As the registry chose, and as MLX would. budget_s: for each of the two, if one call is less.

    Raises RequestError for overrides that can't be followed.
    """
    if case.use is not None:
        implementation = registry.choose([case.use])[0].implementation
    else:
        chosen = {choice.op: choice.implementation for choice in registry.report()}
        implementation = chosen[case.op]
    seconds = _seconds(case, budget_s)
    if implementation == "reference":
        return Figures(case, implementation, seconds, None)
    with registry.references():
        return Figures(case, implementation, seconds, _seconds(case, budget_s))


def peak_flops_per_s() -> float:
    """What a large dense matmul reaches: MLX's in 16 bits on a GPU, NumPy's in float32 on a CPU."""
    shape = PEAK_SIDE, PEAK_SIDE
    if device.has_metal():
        on_gpu = mx.full(shape, 0.5, mx.float16)
        seconds = [_timed(lambda: mx.eval(on_gpu @ on_gpu.T)) for _ in range(4)]
    else:
        on_cpu = np.full(shape, 0.5, np.float32)
        seconds = [_timed(lambda: on_cpu @ on_cpu.T) for _ in range(4)]
    return 2 * PEAK_SIDE**3 / min(seconds)


def _seconds(case: Case, budget_s: float) -> float:
    """Of one call: of the fastest round over several layers that the budget allows."""
    calls = [case.make(0)]

    def round_() -> None:
        mx.eval([call() for call in calls])

    first = _timed(round_)  # compiles, too
    if first >= budget_s:
        return first
    layers = min(case.layers, math.ceil(budget_s / first))
    calls += [case.make(number) for number in range(1, layers)]
    best, end_s = math.inf, time.perf_counter() + budget_s
    while best == math.inf or time.perf_counter() < end_s:
        best = min(best, _timed(round_))
    return best / layers


def _timed(run: Call) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def _compute_dtype() -> mx.Dtype:
    return mx.float16 if device.has_metal() else mx.float32


def _random(number: int, *shape: int) -> mx.array:
    x = mx.random.normal(shape, key=mx.random.key(number)).astype(_compute_dtype())
    mx.eval(x)
    return x


def _matmul(rows: int, bits: int) -> Case:
    def make(number: int) -> Call:
        key = mx.random.key(number)
        words = mx.random.randint(0, 1 << 31, (INNER, WIDTH * bits // 32), key=key)
        words = words.astype(mx.uint32)
        scales = mx.full((INNER, WIDTH // GROUP), 0.01, mx.float16)
        packed = PackedWeight(words, scales, scales, bits, GROUP)
        weight = prepare(packed, _compute_dtype())
        match weight:  # made here, not in the first call
            case PanelWeight():
                mx.eval(weight.data)
            case mx.array():
                mx.eval(weight)
            case _:
                mx.eval(words, scales)
        return partial(matmul, _random(number, rows, WIDTH), weight)

    width = _compute_dtype().size
    weights = INNER * WIDTH * bits // 8 + 2 * 2 * INNER * WIDTH // GROUP
    moved = weights + rows * (WIDTH + INNER) * width
    size = f"{rows} x {WIDTH} -> {INNER}, {bits} bits"
    use = MatmulUse(INNER, WIDTH, bits, GROUP, dtype_name(_compute_dtype()))
    return Case("matmul", size, moved, 2 * rows * INNER * WIDTH, make, use)


def _pool(pages: int, bits: int) -> PoolSides:
    shape = pages, KV_HEADS, PAGE_TOKENS, DIM
    return tuple(empty_pool(side, shape, mx.float16, bits) for side in ("keys", "values"))


def _hot(pages: int) -> Sides:
    return tuple(mx.full((pages * PAGE_TOKENS, KV_HEADS, DIM), 0.5, mx.float16) for _ in "kv")


def _page_bytes(sides: PoolSides) -> int:
    return sum(array.nbytes for side in sides for array in arrays_of(side))


def _attention(rows: int, bits: int) -> Case:
    pages = CONTEXT // PAGE_TOKENS

    def make(number: int) -> Call:
        ids = np.random.default_rng(number).permutation(rows * pages).reshape(rows, pages)
        ids[:, -1] = range(rows)  # of the hot page, where a row's last tokens are
        table = [(i, 1, CONTEXT - 1, 0, pages - 1, i * pages, 0) for i in range(rows)]
        described = PagedRows(np.array(table), ids.ravel())
        hot, pool, q = _hot(rows), _pool(rows * pages, bits), _random(number, rows, Q_HEADS, DIM)
        mx.eval(hot, [arrays_of(side) for side in pool])
        return partial(paged_attention, q, hot, pool, described, scale=DIM**-0.5)

    moved = rows * (pages * _page_bytes(_pool(1, bits)) + 2 * Q_HEADS * DIM * _compute_dtype().size)
    use = AttentionUse(Q_HEADS, KV_HEADS, DIM, "float16", key_bits=bits, value_bits=bits)
    size = f"{rows} x {CONTEXT} tokens, {bits or 16} bits"
    return Case("attention", size, moved, 4 * rows * CONTEXT * Q_HEADS * DIM, make, use)


def _chunk(tokens: int) -> Case:
    """A prompt's last tokens, whole pages of them, which are sealed as they are complete."""
    pages = CONTEXT // PAGE_TOKENS

    def make(number: int) -> Call:
        ids = np.random.default_rng(number).permutation(pages)
        described = PagedRows(np.array([(0, tokens, CONTEXT - tokens, 0, pages, 0, 0)]), ids)
        hot, pool, q = _hot(1), _pool(pages, 0), _random(number, tokens, Q_HEADS, DIM)
        mx.eval(hot, pool, q)
        return partial(paged_attention, q, hot, pool, described, scale=DIM**-0.5)

    moved = pages * _page_bytes(_pool(1, 0)) + 2 * tokens * Q_HEADS * DIM * _compute_dtype().size
    seen = tokens * (CONTEXT - tokens) + tokens * (tokens + 1) // 2  # by all queries
    use = ChunkUse(Q_HEADS, KV_HEADS, DIM, "float16")
    size = f"last {tokens} of {CONTEXT} tokens"
    return Case("attention", size, moved, 4 * seen * Q_HEADS * DIM, make, use)


def _seal(bits: int) -> Case:
    """Full pages go from the newest tokens' place to where they stay; no token is new."""

    def make(number: int) -> Call:
        held = [_hot(SEALED), _pool(SEALED, bits)]
        mx.eval(held[0], [arrays_of(side) for side in held[1]])
        moves = mx.array([(i, SEALED - 1 - i) for i in range(SEALED)], mx.int32)
        none = mx.zeros((0, KV_HEADS, DIM), mx.float16), mx.zeros((0,), mx.int32)

        def call() -> object:  # nobody else has the arrays, so they are written in place
            held[:] = append(held[0], held[1], none[1], none[0], none[0], moves)
            return [held[0], [arrays_of(side) for side in held[1]]]

        return call

    moved = SEALED * (_page_bytes(_pool(1, 0)) + _page_bytes(_pool(1, bits)))
    size = f"{SEALED} pages to {bits or 16} bits"
    return Case("append", size, moved, 0, make)


def _row_wise(
    op: str, rows: int, numbers: int, make: Callable[[int], Call], use: Use | None = None
) -> Case:
    """An op that takes and gives so many numbers of a row in all."""
    return Case(op, f"{rows} rows", rows * numbers * _compute_dtype().size, 0, make, use)


def _norm(rows: int) -> Case:
    def make(number: int) -> Call:
        x, stream = (_random(number + i, rows, WIDTH) for i in range(2))
        return partial(add_rms_norm, x, stream, _random(number, WIDTH), 1e-6)

    use = NormUse(WIDTH, dtype_name(_compute_dtype()))
    return _row_wise("norm", rows, 4 * WIDTH, make, use)


def _rope(rows: int) -> Case:
    def make(number: int) -> Call:
        q, k = (_random(number, rows, heads, DIM) for heads in (Q_HEADS, KV_HEADS))
        periods = mx.exp(mx.arange(DIM // 2) / DIM)
        return partial(rotate, q, k, mx.arange(rows, dtype=mx.int32), periods)

    use = RopeUse(Q_HEADS, KV_HEADS, DIM, dtype_name(_compute_dtype()))
    return _row_wise("rope", rows, 2 * (Q_HEADS + KV_HEADS) * DIM, make, use)


def _gated(rows: int) -> Case:
    def make(number: int) -> Call:
        gate, up = (_random(number + i, rows, INNER) for i in range(2))
        return partial(gated, gate, up, "silu")

    return _row_wise("gated", rows, 3 * INNER, make)


def _greedy(rows: int) -> Case:
    def make(number: int) -> Call:
        return partial(select.greedy, _random(number, rows, VOCAB).astype(mx.float32))

    return Case("select", f"{rows} x {VOCAB}", rows * VOCAB * 4, 0, make)
