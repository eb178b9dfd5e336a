"""The seam between models and the engine, and the strict reading of a model's config.

A model sees flat tokens `[T, D]` and a `View`: no pages, no masks, no rows, no batch dimension.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import mlx.core as mx

from mlxserve.cache.spec import LayerSpec
from mlxserve.errors import ModelError
from mlxserve.kernels.quantized import PackedWeight

Weights = dict[str, mx.array | PackedWeight]


class LayerView(Protocol):
    """One layer's keys and values of every sequence in the step."""

    def attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """Store k and v of the new tokens, then attend: a query sees its sequence up to itself.

        q: `[T, Hq, D]`; k, v: `[T, Hk, D]`, Hq a multiple of Hk; positions already encoded.
        A windowed layer (`WindowKV`) lets a query at position p see keys p - window < j <= p.
        scale multiplies `q @ k.T`; softcap c then maps a score s to `c * tanh(s / c)`.
        sinks: `[Hq]`, a logit per head that takes part in the softmax and carries no value.
        Returns `[T, Hq, D]` in q's dtype.
        """
        ...

    def attend_latent(self, q: mx.array, latent: mx.array, *, scale: float) -> mx.array:
        """The same for a layer that keeps one vector per token (`Latent`).

        q: `[T, Hq, rank + rope_dim]`, in the latents' space; latent: `[T, rank + rope_dim]`, with
        its rotated part last. Returns `[T, Hq, rank]`: sums of the latents' first channels.
        """
        ...

    def states(self) -> tuple[mx.array, ...]:
        """A recurrent layer's states (`State`) as the step finds them, float32 `[R, ...]` each.

        One for each of the view's spans, in their order; zeros where a sequence begins.
        """
        ...

    def set_states(self, states: Sequence[mx.array]) -> None:
        """The states after each span's last token, in the same form."""
        ...


class View(Protocol):
    """What a step shows to a model.

    positions: int32 `[T]`, each token's place in its sequence. spans: (first, n) of each sequence's
    tokens in the step, in order: only recurrent layers need to know them.
    """

    @property
    def positions(self) -> mx.array: ...

    @property
    def spans(self) -> Sequence[tuple[int, int]]: ...

    def layer(self, index: int) -> LayerView: ...


class Group(Protocol):
    """Several processes that compute one model together, each as its rank, from 0 on.

    Both operations are lazy, and all ranks must come to the same ones in the same order.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: mx.array) -> mx.array:
        """x added up over all ranks, in their order, so that all have the same bits."""
        ...

    def gather(self, x: mx.array, widths: Sequence[int]) -> mx.array:
        """Each rank's `[..., widths[rank]]` side by side: `[..., sum(widths)]`."""
        ...


class Alone:
    """The group of one process that has the whole model."""

    rank, size = 0, 1

    def sum(self, x: mx.array) -> mx.array:
        return x

    def gather(self, x: mx.array, widths: Sequence[int]) -> mx.array:
        return x


ALONE = Alone()


class Sizes(Protocol):
    """What a model's matrices are divided by among processes. inner: of the MLP."""

    @property
    def heads(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def inner(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def layers(self) -> int: ...


class Model(Protocol):
    """A language model, or a part of it, as the engine sees it: lazy functions without state.

    own_layers: those that are here, of the whole model's; only the part with the first one embeds
    tokens and makes logits. dtype: of activations, and so of keys and values; set when the weights
    are.
    float16_safe: whether its activations stay within float16's 65,504.
    """

    vocab_size: int
    context_tokens: int
    dtype: mx.Dtype
    float16_safe: bool
    own_layers: range

    @property
    def config(self) -> Sizes:
        """Of the whole model."""
        ...

    def layer_specs(self) -> list[LayerSpec]:
        """What each layer of the whole model keeps, with the heads that this process has."""
        ...

    def named_modules(self) -> Any:
        """Its parts by name, `mlx.nn.Module`'s; those of a layer under `layers.<index>.`."""
        ...

    def __call__(self, x: mx.array, view: View) -> mx.array:
        """Hidden states after the final norm, or the stream where the last layer isn't here.

        x: ids, integers `[T]`, or where the first layer isn't here, the stream, `[T, D]`. Returns
        `[T, D]`.
        """
        ...

    def logits(self, h: mx.array) -> mx.array:
        """Scores of the next token. h: `[..., D]` from `__call__`. Returns `[..., V]`."""
        ...

    def sanitize(self, weights: Weights) -> Weights:
        """The checkpoint's tensors under this model's names and conventions."""
        ...


# Keys that can't change what a trained model computes for a given prompt, as found in published
# config files (llama, SmolLM2, mistral, gemma3): provenance, training, generation, formats.
HARMLESS_KEYS = frozenset({
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path",
    "_commit_hash", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation",
    "unsloth_version",
    "_flash_attn_2_enabled", "license", "tokenizer_type", "model_max_length",
    "unsloth_fixed", "is_llama_config", "transformers.js_config", "cache_implementation",
    "quantization", "quantization_config", "tokenizer_class", "max_sequence_length",
    "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop",
    "use_cache", "output_attentions", "output_hidden_states", "output_scores", "return_dict",
    "return_dict_in_generate", "chunk_size_feed_forward", "id2label", "label2id", "problem_type",
    "task_specific_params", "torchscript", "use_bfloat16", "is_decoder", "do_sample",
    "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "num_return_sequences",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "max_length", "min_length",
    "max_new_tokens", "bad_words_ids", "begin_suppress_tokens", "suppress_tokens",
    "exponential_decay_length_penalty",
})  # fmt: skip
HARMLESS_SUFFIXES = ("_token_id", "_token_index")
HARMLESS_VALUES = {"pretraining_tp": 1}


def _inactive(value: Any) -> bool:
    return value is None or value is False or value in ([], {}, "")


class ConfigReader:
    """Reads a model's config.json key by key, then refuses the keys that nobody read.

    The keys that a model reads are the ones it declares to understand. A null counts as absent.
    Every method raises ModelError, naming the key, its value and what was expected.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._known: set[str] = set()
        self.model_type = config.get("model_type")

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands in the file, or `default`."""
        self._known.add(key)
        value = self._config.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, value, "a whole number of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        return positive(self._required(key, default), key, f"{self.model_type} config")

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def only(self, key: str, supported: str) -> None:
        """Accept one value only, also when the key is absent."""
        value = self.get(key, supported)
        if value != supported:
            raise self.error(key, value, f"{supported!r}, the only one supported")

    def heads(self, kv_default: int | None) -> tuple[int, int]:
        """Query and key heads; `kv_default` None means as many key heads as query heads."""
        heads = self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", kv_default or heads)
        if heads % kv_heads:
            raise self.error("num_key_value_heads", kv_heads, f"a divisor of the {heads} heads")
        return heads, kv_heads

    def finish(self) -> None:
        """Refuse a key that wasn't read, isn't known to be harmless and has a live value."""
        for key, value in self._config.items():
            if key in self._known or key in HARMLESS_KEYS or key.endswith(HARMLESS_SUFFIXES):
                continue
            if _inactive(value) or (key in HARMLESS_VALUES and value == HARMLESS_VALUES[key]):
                continue
            raise ModelError(
                f"{self.model_type} config has {key}={_short(value)}, which mlxserve doesn't know "
                "and which may change the result; remove the key if it doesn't"
            )

    def error(self, key: str, value: Any, expected: str) -> ModelError:
        where = f"{self.model_type} config"
        return ModelError(f"{where}: {key} is {_short(value)}; it must be {expected}")

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ModelError(f"{self.model_type} config has no {key}; add it to config.json")
        return value


def positive(value: Any, key: str, where: str) -> float:
    """`value` as a finite float above 0. Raises ModelError that names `key` in `where`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ModelError(f"{where}: {key} is {_short(value)}; it must be a finite number above 0")
    return float(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
