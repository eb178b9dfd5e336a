"""Matmul against a weight in whatever form this device computes with best.

A weight `[N, K]` is prepared once, at load: on a Mac it stays an array or as MLX packs it, where it
is with our Metal kernel if that is right and faster; on Linux it becomes panels for the native
kernels; without those, a float32 array. So is a stack `[E, N, K]`,
which `gathered.gathered_matmul` computes with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import mlx.core as mx

from mlxserve import device
from mlxserve.kernels import registry
from mlxserve.kernels.metal.launch import Runner, runner
from mlxserve.kernels.metal.quantized_matmul import MAX_ROWS, quantized_rows
from mlxserve.kernels.pages import dtype_name
from mlxserve.kernels.quantized import PackedWeight, dequantize, quantized_matmul
from mlxserve.kernels.uses import MatmulUse

DENSE_CODECS = {mx.float32: "f32", mx.float16: "f16", mx.bfloat16: "bf16"}
AFFINE_GROUPS = (32, 64, 128)


@dataclass(frozen=True, eq=False, slots=True)
class PanelWeight:
    """A matrix `[N, K]`, or a stack `[E, N, K]`, in the native kernels' layout (cpu/panels.h).

    handle: their own object, which holds the memory.
    """

    handle: Any
    shape: tuple[int, ...]

    @property
    def data(self) -> mx.array:
        """uint8, the whole of it."""
        return self.handle.data


@dataclass(frozen=True, eq=False, slots=True)
class KernelWeight:
    """A packed matrix `[N, K]` with our Metal kernel.

    rows: numbers of rows for which `run` launches that; None: all, and then a row of x has the same
    bits in every batch.
    """

    packed: PackedWeight
    run: Runner
    rows: range | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.packed.shape


Stack = mx.array | PackedWeight | PanelWeight
Weight = Stack | KernelWeight
Form = Literal["packed", "panels", "float32"]


def matmul(x: mx.array, weight: Weight, bias: mx.array | None = None) -> mx.array:
    """`x @ weight.T + bias`.

    x: `[T, K]`, floating; weight: `[N, K]`; bias: `[N]`. Returns `[T, N]` in x's dtype. The native
    kernels round x to 16 bits in groups of K where the weight is quantised. Native kernels, and
    Metal's where it serves all numbers of rows, give a row of x the same bits in every batch.
    Raises ValueError if shapes don't fit.
    """
    if isinstance(weight, PanelWeight):
        return _native(x, [weight], [bias])[0]
    return _reference(x, weight, bias)


def matmuls(
    x: mx.array, weights: Sequence[Weight], biases: Sequence[mx.array | None]
) -> list[mx.array]:
    """`matmul` of one x against several weights: one pass over x for the native kernels."""
    if all(isinstance(weight, PanelWeight) for weight in weights):
        return _native(x, weights, biases)
    return [matmul(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def rows(weight: Weight, ids: mx.array, dtype: mx.Dtype, scale: float = 1.0) -> mx.array:
    """Rows of a weight, times `scale`: an embedding.

    ids: integers `[T]`. Returns `[T, K]` in `dtype`. Rows of a plain array come in its own type, to
    which scale is rounded.
    """
    if isinstance(weight, KernelWeight):
        weight = weight.packed
    if isinstance(weight, PanelWeight):
        native: Any = registry.native("matmul")
        if dtype == mx.float32:
            return native.rows(weight.handle, ids.astype(mx.int32), scale)
        found = native.rows(weight.handle, ids.astype(mx.int32)).astype(dtype)
    elif isinstance(weight, mx.array):
        found = weight[ids]
    else:
        w = weight
        biases = None if w.biases is None else w.biases[ids]
        packed = (w.weight[ids], w.scales[ids], biases, w.bits, w.group_size, w.mode)
        found = dequantize(PackedWeight(*packed), dtype)
    return found if scale == 1 else found * scale


def form() -> Form:
    """How this device keeps quantised matrices: as MLX packs them, in native panels, or widened."""
    if registry.native("matmul") is not None:
        return "panels"
    return "packed" if device.has_metal() else "float32"


def use(weight: PackedWeight, dtype: mx.Dtype, *, deterministic: bool) -> MatmulUse:
    """What a layer with this weight `[N, K]` asks of the op. dtype: of activations."""
    outputs, inputs = weight.shape
    how = dtype_name(dtype), weight.mode, deterministic
    return MatmulUse(outputs, inputs, weight.bits, weight.group_size, *how)


def varies(weight: mx.array | PackedWeight, dtype: mx.Dtype) -> str:
    """Why a row's result may depend on the batch, though `prepare` is asked for `deterministic`.

    "" where it doesn't. weight: `[N, K]`; dtype: of activations.
    """
    if runner() is None:
        if registry.native("matmul") is None:
            return "MLX's own matmul sums in another order for each number of rows"
        packed = isinstance(weight, PackedWeight)
        return "the native kernels don't take its groups" if packed and not _fits(weight) else ""
    if not isinstance(weight, PackedWeight):
        return "it isn't quantised, and MLX's own matmul sums in another order for more rows"
    (choice,) = registry.choose([use(weight, dtype, deterministic=True)])
    return "" if choice.implementation == "metal" else choice.reason


def prepare(
    weight: mx.array | PackedWeight, dtype: mx.Dtype, *, deterministic: bool = False
) -> Weight:
    """The form of a weight that this device computes with. dtype: of activations.

    weight: `[N, K]` for `matmul`, or `[E, N, K]` for `gathered_matmul`. deterministic: give a row
    the same bits in every batch, where `varies` has no reason against it. Our Metal kernel is taken
    where `registry.choose` has decided so for the weight's `use`.
    """
    ours = _with_kernel(weight, dtype, deterministic)
    if ours is not None:
        return ours
    native = registry.native("gathered" if len(weight.shape) == 3 else "matmul")
    if native is not None and (panels := to_panels(native, weight)) is not None:
        return panels
    if isinstance(weight, PackedWeight) and form() != "packed":
        # MLX's CPU matmul over packed weights reads 0.7 GB/s, over float32 8 GB/s.
        return dequantize(weight, mx.float32)
    return as_packed(weight, dtype)


def _with_kernel(
    weight: mx.array | PackedWeight, dtype: mx.Dtype, deterministic: bool
) -> KernelWeight | None:
    if not isinstance(weight, PackedWeight) or len(weight.shape) != 2:
        return None
    asked = use(weight, dtype, deterministic=deterministic)
    run, choice = registry.metal(asked), registry.chosen(asked)
    if run is None or choice is None:
        return None
    most = choice.verdict.faster_up_to if choice.verdict else MAX_ROWS
    # MLX's own kernel for one row is as fast as memory, so that one wasn't timed.
    rows = None if deterministic else range(2, most + 1)
    return KernelWeight(_cast(weight, dtype), run, rows)


def as_packed(weight: mx.array | PackedWeight, dtype: mx.Dtype) -> mx.array | PackedWeight:
    """The form for MLX's own kernels: numbers in `dtype`, and packed ones as they are."""
    return weight.astype(dtype) if isinstance(weight, mx.array) else _cast(weight, dtype)


def _cast(w: PackedWeight, dtype: mx.Dtype) -> PackedWeight:
    if not mx.issubdtype(w.scales.dtype, mx.floating):  # the mx formats' 8-bit exponents
        return w
    biases = None if w.biases is None else w.biases.astype(dtype)
    return PackedWeight(w.weight, w.scales.astype(dtype), biases, w.bits, w.group_size, w.mode)


def to_panels(native: Any, weight: mx.array | PackedWeight) -> PanelWeight | None:
    """A weight for the native kernels; None for groups that they don't have."""
    if isinstance(weight, mx.array):
        dense = native.pack(weight, None, None, DENSE_CODECS[weight.dtype], 0)
        return PanelWeight(dense, weight.shape)
    if not _fits(weight):
        return None
    affine = weight.mode == "affine"
    codec = f"q{weight.bits}" if affine else weight.mode
    scales, biases = weight.scales, weight.biases
    if affine and _centred(weight):
        biases = None
    if scales.dtype == mx.float32 and (halves := _halves(scales, biases)) is not None:
        scales, biases = halves
    handle = native.pack(weight.weight, scales, biases, codec, weight.group_size)
    return PanelWeight(handle, weight.shape)


def _fits(weight: PackedWeight) -> bool:
    """Whether the native kernels have its groups."""
    return not weight.shape[-1] % 32 and (
        weight.mode != "affine" or weight.group_size in AFFINE_GROUPS
    )


def _halves(scales: mx.array, biases: mx.array | None) -> tuple[mx.array, mx.array | None] | None:
    """float32 scales (of a GGUF's K types) in float16, where that keeps them to 0.05%.

    A step of a quantised weight moves by a thousandth, and every weight takes a bit less to read.
    """
    both = [scales] if biases is None else [scales, biases]
    rounded = [a.astype(mx.float16) for a in both]
    for exact, near in zip(both, rounded, strict=True):
        off = mx.abs(near.astype(mx.float32) - exact)
        # What is small beside a group's own step may be rounded to nothing.
        if not bool(mx.all(off <= mx.maximum(mx.abs(exact), mx.abs(scales)) * 2.0**-11)):
            return None
    return rounded[0], rounded[1] if biases is not None else None


def _centred(weight: PackedWeight) -> bool:
    """Whether 0 lies in the middle of every group's numbers: then biases needn't be stored."""
    if weight.biases is None:
        return False
    middle = weight.scales.astype(mx.float32) * -(2.0 ** (weight.bits - 1))
    return bool(mx.array_equal(weight.biases.astype(mx.float32), middle))


def _reference(
    x: mx.array, weight: mx.array | PackedWeight | KernelWeight, bias: mx.array | None
) -> mx.array:
    if len(weight.shape) != 2:
        raise ValueError(f"matmul: weight is {list(weight.shape)}, expected [N, K]")
    if isinstance(weight, KernelWeight):
        y = _metal(x, weight)
    else:
        y = quantized_matmul(x, weight) if isinstance(weight, PackedWeight) else x @ weight.T
    return y if bias is None else y + bias


def _metal(x: mx.array, weight: KernelWeight) -> mx.array:
    """By the kernel, or MLX's own for other numbers of rows."""
    packed = weight.packed
    if x.shape[-1] != packed.shape[-1]:
        raise ValueError(f"x has K={x.shape[-1]}, the weight has K={packed.shape[-1]}")
    flat = x.reshape(-1, x.shape[-1]).astype(packed.scales.dtype)
    if weight.rows is not None and len(flat) not in weight.rows:
        return quantized_matmul(x, packed)
    (out,) = weight.run(quantized_rows(flat, packed))
    return out.reshape(*x.shape[:-1], -1).astype(x.dtype)


def _native(
    x: mx.array, weights: Sequence[Any], biases: Sequence[mx.array | None]
) -> list[mx.array]:
    native: Any = registry.native("matmul")
    handles = [weight.handle for weight in weights]
    biases = [None if bias is None else bias.astype(mx.float32) for bias in biases]
    if x.ndim == 2 and x.dtype == mx.float32:
        return native.matmul(x, handles, biases)
    flat = x.reshape(-1, x.shape[-1]).astype(mx.float32)
    outs = native.matmul(flat, handles, biases)
    return [out.reshape(*x.shape[:-1], -1).astype(x.dtype) for out in outs]


def check(native: ModuleType) -> None:
    """Compare the native kernels with the reference. Raises ArithmeticError where they differ."""
    with mx.stream(mx.cpu):
        w = _waves(21, 256)
        half = w.astype(mx.float16)  # 16-bit scales, as checkpoints have
        forms: list[mx.array | PackedWeight] = [w.astype(dtype) for dtype in DENSE_CODECS]
        forms += [
            PackedWeight(*_three(mx.quantize(half, group, bits, mode=mode)), bits, group, mode)
            for mode, bits, group in (
                ("affine", 4, 64), ("affine", 8, 32), ("affine", 6, 128), ("affine", 3, 32),
                ("affine", 5, 32), ("affine", 2, 32), ("mxfp4", 4, 32), ("mxfp8", 8, 32),
                ("nvfp4", 4, 16),
            )
        ]  # fmt: skip
        x = _waves(7, 256) + 0.25
        for form in forms:
            panels: Any = to_panels(native, form)
            dense = form if isinstance(form, mx.array) else dequantize(form, mx.float32)
            expected = x @ dense.astype(mx.float32).T
            together = native.matmul(x, [panels.handle], [None])[0]
            alone = native.matmul(x[:1], [panels.handle], [None])[0]
            registry.check_close("matmul", together, expected, 1e-4)
            registry.check_close("matmul of one row", alone, expected[:1], 1e-4)


def _three(parts: Sequence[mx.array]) -> tuple[mx.array, mx.array, mx.array | None]:
    return parts[0], parts[1], parts[2] if len(parts) > 2 else None


def _waves(n: int, k: int) -> mx.array:
    """Numbers without a pattern that a wrong order would leave unchanged; no random state."""
    i = mx.arange(n * k, dtype=mx.float32).reshape(n, k)
    return mx.sin(i * 0.7) * (1 + i / (n * k))
