"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and the ways to stretch it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxserve.errors import ModelError
from mlxserve.kernels.rope import rotate
from mlxserve.models.base import ConfigReader, positive
from mlxserve.models.layers import RMSNorm


class Rope:
    """Turns pair (i, i + D/2) of a head by `position / periods[i]` radians and scales it by `gain`.

    periods: float32 `[D / 2]`, the inverse of the angular frequencies.
    """

    def __init__(self, frequencies: list[float], gain: float = 1.0) -> None:
        self.periods = mx.array([1.0 / f for f in frequencies], dtype=mx.float32)
        self.gain = gain

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        positions: mx.array,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Queries `[T, Hq, D]` and keys `[T, Hk, D]` of tokens at positions, int32 `[T]`.

        q_norm, k_norm: both or none; of each head, before it is turned. Returns q and k in their
        dtypes.
        """
        if q_norm is None or k_norm is None:
            return rotate(q, k, positions, self.periods, self.gain)
        weights = {"q_norm": q_norm.weight, "k_norm": k_norm.weight}
        return rotate(q, k, positions, self.periods, self.gain, **weights, eps=q_norm.eps)


def rope_from_config(
    reader: ConfigReader,
    *,
    head_dim: int,
    context_tokens: int,
    layer_type: str | None = None,
    theta_key: str = "rope_theta",
    default_theta: float = 10_000.0,
) -> Rope:
    """The rotation a config asks for, in either spelling.

    Old: `rope_theta` beside `rope_scaling: {type or rope_type, ...}`. New (transformers 5):
    `rope_parameters: {rope_type, rope_theta, ...}`, nested by layer type where a model has several.
    theta_key: the old name of this layer type's base; only `rope_theta` goes with `rope_scaling`.

    Raises ModelError for an unknown type, an unknown, missing or bad parameter, and spellings that
    contradict each other.
    """
    old = _dictionary(reader, "rope_scaling") if theta_key == "rope_theta" else {}
    new = _dictionary(reader, "rope_parameters")
    if layer_type is not None:
        new = _nested(reader, new, layer_type)
    theta = reader.get(theta_key)
    params = _agreed(reader, _named(reader, old), _named(reader, new))
    if theta is not None:
        params = _agreed(reader, {"rope_theta": theta}, params)
    params.setdefault("rope_theta", default_theta)
    return make_rope(params, head_dim=head_dim, context_tokens=context_tokens)


def make_rope(params: dict[str, Any], *, head_dim: int, context_tokens: int) -> Rope:
    """The rotation of `{rope_type, rope_theta, ...}`; `context_tokens` is the config's own maximum.

    Raises ModelError as `rope_from_config` does.
    """
    params = {key: value for key, value in params.items() if value is not None}
    name = params.pop("rope_type", "default")
    if name not in ROPE_TYPES:
        raise ModelError(
            f"rope_type {name!r} isn't supported; supported: {', '.join(sorted(ROPE_TYPES))}"
        )
    kind = ROPE_TYPES[name]
    known = kind.required | kind.optional | {"rope_theta"}
    for key in sorted(params.keys() - known):
        # 1 rotates the whole head, as these models do anyway.
        if key == "partial_rotary_factor" and params[key] == 1:
            continue
        raise ModelError(
            f"rope_type {name}: {key}={params[key]!r} isn't supported; "
            f"known: {', '.join(sorted(known))}"
        )
    if missing := sorted(kind.required - params.keys()):
        raise ModelError(f"rope_type {name}: {missing[0]} is missing; add it to the config")
    if head_dim % 2:
        raise ModelError(f"head_dim is {head_dim}; rotary embeddings need an even one")
    settings = _Settings(name, params, head_dim, context_tokens)
    return kind.make(settings)


@dataclass(frozen=True, slots=True)
class _Settings:
    name: str
    params: dict[str, Any]
    head_dim: int
    context_tokens: int

    def number(self, key: str, default: float | None = None) -> float:
        return positive(self.params.get(key, default), key, f"rope_type {self.name}")

    @property
    def theta(self) -> float:
        theta = self.number("rope_theta")
        if theta <= 1:
            raise ModelError(f"rope_theta is {theta:g}; it must be above 1")
        return theta

    @property
    def trained_tokens(self) -> float:
        return self.number("original_max_position_embeddings", self.context_tokens)

    def frequencies(self) -> list[float]:
        """Radians per token of each pair."""
        return [self.theta ** (-i / self.head_dim) for i in range(0, self.head_dim, 2)]


def _default(s: _Settings) -> Rope:
    return Rope(s.frequencies())


def _linear(s: _Settings) -> Rope:
    """Positions divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""
    factor = s.number("factor")
    return Rope([f / factor for f in s.frequencies()])


def _llama3(s: _Settings) -> Rope:
    """Llama 3.1: long waves slowed by `factor`, short ones kept, a linear blend between."""
    factor, low, high = (s.number(k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise ModelError(
            f"rope_type llama3: high_freq_factor is {high:g}; "
            f"it must be above low_freq_factor ({low:g})"
        )
    frequencies = []
    for f in s.frequencies():
        turns = s.trained_tokens * f / (2 * math.pi)
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        frequencies.append(f * (keep + (1 - keep) / factor))
    return Rope(frequencies)


def _yarn(s: _Settings) -> Rope:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): a blend by turns, and warmer attention."""
    if s.params.keys().isdisjoint({"factor", "original_max_position_embeddings"}):
        raise ModelError("rope_type yarn: factor is missing; add it to the config")
    factor = s.number("factor", s.context_tokens / s.trained_tokens)
    truncate = s.params.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ModelError(f"rope_type yarn: truncate is {truncate!r}; it must be true or false")

    def pair_with(turns: float) -> float:
        """Index of the pair that makes so many turns over the trained context."""
        period = s.trained_tokens / (turns * 2 * math.pi)
        return s.head_dim * math.log(period) / (2 * math.log(s.theta))

    low, high = pair_with(s.number("beta_fast", 32)), pair_with(s.number("beta_slow", 1))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, s.head_dim - 1)
    if low == high:
        high += 0.001
    frequencies = []
    for i, f in enumerate(s.frequencies()):
        slow = min(max((i - low) / (high - low), 0.0), 1.0)
        frequencies.append(f * ((1 - slow) + slow / factor))
    return Rope(frequencies, _yarn_gain(s, factor))


def _yarn_gain(s: _Settings, factor: float) -> float:
    if "attention_factor" in s.params:
        return s.number("attention_factor")

    def warmth(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    # Both or none: with only one of them (or a zero) the reference takes the paper's default.
    if s.params.get("mscale") and s.params.get("mscale_all_dim"):
        return warmth(s.number("mscale")) / warmth(s.number("mscale_all_dim"))
    return warmth(1.0)


def _gguf_factors(s: _Settings) -> Rope:
    """llama.cpp's `rope_freqs` tensor: a divisor for each frequency, `[D / 2]`."""
    factors = s.params["factors"]
    pairs = s.head_dim // 2
    if not isinstance(factors, list | tuple) or len(factors) != pairs:
        raise ModelError(f"rope_type gguf_factors: factors must be {pairs} numbers (head_dim / 2)")
    divisors = [positive(d, "a factor", "rope_type gguf_factors") for d in factors]
    return Rope([f / d for f, d in zip(s.frequencies(), divisors, strict=True)])


@dataclass(frozen=True, slots=True)
class _Kind:
    make: Callable[[_Settings], Rope]
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()


ROPE_TYPES = {
    "default": _Kind(_default),
    "linear": _Kind(_linear, frozenset({"factor"})),
    "llama3": _Kind(
        _llama3,
        frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
        frozenset({"original_max_position_embeddings"}),
    ),
    "yarn": _Kind(
        _yarn,
        optional=frozenset({
            "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
            "beta_slow", "mscale", "mscale_all_dim", "truncate",
            "finetuned",  # a remark in published files; nothing computes with it
        }),
    ),
    "gguf_factors": _Kind(_gguf_factors, frozenset({"factors"})),
}  # fmt: skip


def _dictionary(reader: ConfigReader, key: str) -> dict[str, Any]:
    value = reader.get(key, {})
    if not isinstance(value, dict):
        raise reader.error(key, value, "an object")
    return value


def _nested(reader: ConfigReader, new: dict[str, Any], layer_type: str) -> dict[str, Any]:
    layer_types = {"full_attention", "sliding_attention"}
    if unknown := sorted(new.keys() - layer_types):
        raise reader.error("rope_parameters", new, f"keyed by layer type, and {unknown[0]} is none")
    params = new.get(layer_type) or {}
    if not isinstance(params, dict):
        raise reader.error(f"rope_parameters.{layer_type}", params, "an object")
    return params


def _named(reader: ConfigReader, params: dict[str, Any]) -> dict[str, Any]:
    """A copy in which the older key `type` has become `rope_type`."""
    params = dict(params)
    legacy = params.pop("type", None)
    if legacy is None:
        return params
    return _agreed(reader, {"rope_type": legacy}, params)


def _agreed(reader: ConfigReader, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Both together. Raises ModelError where they give one parameter two values."""
    for key in a.keys() & b.keys():
        if a[key] != b[key]:
            raise reader.error(key, a[key], f"the same wherever it is given ({b[key]!r} elsewhere)")
    return {**a, **b}
