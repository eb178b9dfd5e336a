"""MLX's quantised layout in a directory: which tensors are quantised, and how.

`config.json` has `quantization` (mlx-lm writes a copy as `quantization_config`): `group_size`,
`bits` and `mode` for all layers, and entries under a layer's path for those that differ, `false`
for those left alone. A quantised `X.weight` is uint32 and comes with `X.scales` and, in affine
mode, `X.biases`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxserve.report import damaged, show, unsupported
from mlxserve.sources.safetensors import Entry

# Mode -> group sizes and bits that MLX has kernels for, default first.
MODES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((64, 32, 128), (4, 2, 3, 5, 6, 8)),
    "mxfp4": ((32,), (4,)),
    "mxfp8": ((32,), (8,)),
    "nvfp4": ((16,), (4,)),
}
FLOATS = ("F16", "BF16", "F32")
KEYS = ("group_size", "bits", "mode")  # of a scheme


@dataclass(frozen=True, slots=True)
class Quantised:
    """How one matrix is stored: `X.weight`, `X.scales`, and `X.biases` in affine mode."""

    bits: int
    group_size: int
    mode: str


def quantised_layers(
    path: Path, config: Mapping[str, Any], entries: Mapping[str, Entry]
) -> dict[str, Quantised]:
    """Layer path X -> how `X.weight` is quantised; empty for a model that is not.

    path: of the config, for errors. Raises ModelError for another tool's quantisation, values that
    MLX has no kernels for, a missing or needless `scales` or `biases`, and shapes that don't fit.
    """
    settings = _settings(path, config)
    default = _scheme(path, "quantization", settings)
    layers: dict[str, Quantised] = {}
    names = {n.rpartition(".")[0] for n in entries if n.endswith((".weight", ".scales"))}
    if unknown := sorted(settings.keys() - names - set(KEYS)):
        raise unsupported(
            path,
            f"quantization has {show(unknown[0])}, which is no layer of the model and none of "
            f"{', '.join(KEYS)}; download the model again, all files from one version",
        )
    for layer in sorted(names):
        own = settings.get(layer)
        if isinstance(own, dict) and (unknown := sorted(own.keys() - set(KEYS))):
            raise unsupported(
                path,
                f"the quantization of {show(layer)} has {show(unknown[0])}; only "
                f"{', '.join(KEYS)} are known, take another conversion",
            )
        scheme = default if own is None or own is True else _scheme(path, layer, own)
        weight = entries.get(f"{layer}.weight")
        if f"{layer}.scales" not in entries:
            if weight and (weight.dtype == "U32" or isinstance(own, dict)):
                raise damaged(
                    weight.path,
                    f"tensor {show(f'{layer}.weight')} is quantised, and {show(f'{layer}.scales')} "
                    "is missing",
                )
            continue
        if scheme is None:
            raise damaged(
                path,
                f"tensor {show(f'{layer}.scales')} is there, and no quantization entry says how "
                "it is used",
            )
        _check(path, layer, scheme, entries)
        layers[layer] = scheme
    return layers


def _settings(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    settings = config.get("quantization")
    other = config.get("quantization_config")
    method = other.get("quant_method") if isinstance(other, dict) else None
    if settings is None and method is not None:
        raise unsupported(
            path,
            f"it is quantised with {show(method)}; only MLX's own quantisation is supported, take "
            "the unquantised model or an MLX conversion of it",
        )
    if settings is not None and other is not None and settings != other:
        raise unsupported(
            path, "quantization and quantization_config differ; delete the one that is wrong"
        )
    settings = other if settings is None else settings
    if settings is None:
        return {}
    if not isinstance(settings, dict) or not settings:
        raise damaged(path, f"quantization is {show(settings)}")
    return settings


def _scheme(path: Path, where: str, settings: Any) -> Quantised | None:
    """The scheme that a quantization entry describes; None for `false` and for no entry at all."""
    if settings is False or settings == {}:
        return None
    if not isinstance(settings, dict):
        raise damaged(path, f"the quantization of {show(where)} is {show(settings)}")
    mode = settings.get("mode", "affine")
    if not isinstance(mode, str) or mode not in MODES:
        raise unsupported(
            path,
            f"the quantization of {show(where)} has mode {show(mode)}; {', '.join(MODES)} work",
        )
    sizes, widths = MODES[mode]
    size, bits = settings.get("group_size", sizes[0]), settings.get("bits", widths[0])
    for name, value, known in (("group_size", size, sizes), ("bits", bits, widths)):
        if type(value) is not int or value not in known:
            raise unsupported(
                path,
                f"the quantization of {show(where)} has {name} {show(value)}; {mode} takes "
                f"{', '.join(map(str, sorted(known)))}",
            )
    return Quantised(bits, size, mode)


def _check(path: Path, layer: str, scheme: Quantised, entries: Mapping[str, Entry]) -> None:
    """Shapes and dtypes of one layer's tensors against its scheme."""
    affine = scheme.mode == "affine"
    weight, scales = entries.get(f"{layer}.weight"), entries[f"{layer}.scales"]
    biases = entries.get(f"{layer}.biases")
    if weight is None or (affine and biases is None):
        missing = f"{layer}.weight" if weight is None else f"{layer}.biases"
        raise damaged(scales.path, f"tensor {show(missing)} is missing beside its scales")
    if biases and not affine:
        raise damaged(path, f"tensor {show(f'{layer}.biases')} has no place in {scheme.mode}")
    if len(weight.shape) != 2:
        raise unsupported(
            weight.path,
            f"tensor {show(f'{layer}.weight')} has shape {weight.shape}; only quantised matrices "
            "are supported so far",
        )
    rows, words = weight.shape
    columns, rest = divmod(words * 32, scheme.bits)
    if weight.dtype != "U32" or rest or not columns or not rows or columns % scheme.group_size:
        raise damaged(
            weight.path,
            f"tensor {show(f'{layer}.weight')} ({weight.dtype}, shape {weight.shape}) is not "
            f"{scheme.bits} bits in groups of {scheme.group_size}",
        )
    want = (rows, columns // scheme.group_size)
    dtypes = FLOATS if affine else ("U8",)
    for name, entry in (("scales", scales), ("biases", biases)):
        if entry and (entry.shape != want or entry.dtype not in dtypes):
            raise damaged(
                entry.path,
                f"tensor {show(f'{layer}.{name}')} is {entry.dtype} of shape {entry.shape}, "
                f"{' or '.join(dtypes)} of shape {want} is needed",
            )
    if biases and biases.dtype != scales.dtype:
        raise damaged(path, f"{show(layer)} has scales in {scales.dtype}, biases in {biases.dtype}")
