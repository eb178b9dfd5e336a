"""Matmul against a weight in whatever form this device computes with best.

A weight `[N, K]` is prepared once, at load: on a Mac it stays an array or as MLX packs it; on Linux
it becomes panels for the native kernels; without those, a float32 array. So is a stack `[E, N, K]`,
which `gathered.gathered_matmul` computes with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import mlx.core as mx

from mlxserve import device
from mlxserve.kernels import registry
from mlxserve.kernels.quantized import PackedWeight, dequantize, quantized_matmul

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


Weight = mx.array | PackedWeight | PanelWeight
Form = Literal["packed", "panels", "float32"]


def matmul(
    x: mx.array, weight: Weight, bias: mx.array | None = None, add: mx.array | None = None
) -> mx.array:
    """`x @ weight.T + bias + add`.

    x: `[T, K]`, floating; weight: `[N, K]`; bias: `[N]`; add: `[T, N]`. Returns `[T, N]` in x's
    dtype. The native kernels round x to 16 bits in groups of K where the weight is quantised.
    Raises ValueError if shapes don't fit.
    """
    if isinstance(weight, PanelWeight):
        return _native(x, [weight], [bias], add)[0]
    y = _reference(x, weight, bias)
    return y if add is None else y + add


def matmuls(
    x: mx.array, weights: Sequence[Weight], biases: Sequence[mx.array | None]
) -> list[mx.array]:
    """`matmul` of one x against several weights: one pass over x for the native kernels."""
    if all(isinstance(weight, PanelWeight) for weight in weights):
        return _native(x, weights, biases, None)
    return [matmul(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def rows(weight: Weight, ids: mx.array, dtype: mx.Dtype, scale: float = 1.0) -> mx.array:
    """Rows of a weight, times `scale`: an embedding.

    ids: integers `[T]`. Returns `[T, K]` in `dtype`. Rows of a plain array come in its own type, to
    which scale is rounded.
    """
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


def prepare(weight: mx.array | PackedWeight, dtype: mx.Dtype) -> Weight:
    """The form of a weight that this device computes with. dtype: of activations.

    weight: `[N, K]` for `matmul`, or `[E, N, K]` for `gathered_matmul`.
    """
    native = registry.native("gathered" if len(weight.shape) == 3 else "matmul")
    if native is not None and (panels := to_panels(native, weight)) is not None:
        return panels
    if isinstance(weight, PackedWeight) and form() != "packed":
        # MLX's CPU matmul over packed weights reads 0.7 GB/s, over float32 8 GB/s.
        return dequantize(weight, mx.float32)
    return as_packed(weight, dtype)


def as_packed(weight: mx.array | PackedWeight, dtype: mx.Dtype) -> mx.array | PackedWeight:
    """The form for MLX's own kernels: numbers in `dtype`, and packed ones as they are."""
    if isinstance(weight, mx.array):
        return weight.astype(dtype)
    w = weight
    if not mx.issubdtype(w.scales.dtype, mx.floating):  # the mx formats' 8-bit exponents
        return w
    biases = None if w.biases is None else w.biases.astype(dtype)
    return PackedWeight(w.weight, w.scales.astype(dtype), biases, w.bits, w.group_size, w.mode)


def to_panels(native: Any, weight: mx.array | PackedWeight) -> PanelWeight | None:
    """A weight for the native kernels; None for groups that they don't have."""
    if isinstance(weight, mx.array):
        dense = native.pack(weight, None, None, DENSE_CODECS[weight.dtype], 0)
        return PanelWeight(dense, weight.shape)
    affine = weight.mode == "affine"
    if weight.shape[-1] % 32 or (affine and weight.group_size not in AFFINE_GROUPS):
        return None
    codec = f"q{weight.bits}" if affine else weight.mode
    scales, biases = weight.scales, weight.biases
    if affine and _centred(weight):
        biases = None
    if scales.dtype == mx.float32 and (halves := _halves(scales, biases)) is not None:
        scales, biases = halves
    handle = native.pack(weight.weight, scales, biases, codec, weight.group_size)
    return PanelWeight(handle, weight.shape)


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


def _reference(x: mx.array, weight: mx.array | PackedWeight, bias: mx.array | None) -> mx.array:
    if len(weight.shape) != 2:
        raise ValueError(f"matmul: weight is {list(weight.shape)}, expected [N, K]")
    y = quantized_matmul(x, weight) if isinstance(weight, PackedWeight) else x @ weight.T
    return y if bias is None else y + bias


def _native(
    x: mx.array,
    weights: Sequence[Any],
    biases: Sequence[mx.array | None],
    add: mx.array | None,
) -> list[mx.array]:
    native: Any = registry.native("matmul")
    handles = [weight.handle for weight in weights]
    biases = [None if bias is None else bias.astype(mx.float32) for bias in biases]
    if x.ndim == 2 and x.dtype == mx.float32:
        return native.matmul(x, handles, biases, add)
    flat = x.reshape(-1, x.shape[-1]).astype(mx.float32)
    plus = None if add is None else add.reshape(-1, add.shape[-1]).astype(mx.float32)
    outs = native.matmul(flat, handles, biases, plus)
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
            together = native.matmul(x, [panels.handle], [None], None)[0]
            alone = native.matmul(x[:1], [panels.handle], [None], None)[0]
            registry.check_close("matmul", together, expected, 1e-4)
            registry.check_close("matmul of one row", alone, expected[:1], 1e-4)


def _three(parts: Sequence[mx.array]) -> tuple[mx.array, mx.array, mx.array | None]:
    return parts[0], parts[1], parts[2] if len(parts) > 2 else None


def _waves(n: int, k: int) -> mx.array:
    """Numbers without a pattern that a wrong order would leave unchanged; no random state."""
    i = mx.arange(n * k, dtype=mx.float32).reshape(n, k)
    return mx.sin(i * 0.7) * (1 + i / (n * k))
