"""GGUF metadata and tensor names -> Hugging Face config keys and weight names.

Sources: the GGUF specification's list of keys, and what llama.cpp's converter writes for each
architecture. A key below `<architecture>.` that was neither read here nor has a value that changes
nothing is refused, so that no file runs with part of its mathematics left out.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxserve.errors import ModelError
from mlxserve.report import damaged, show, unsupported
from mlxserve.sources.gguf import GGUFFile, GGUFTensor

# Keys that may be there as long as they say "nothing special". A set holds every harmless value.
NEUTRAL: dict[str, set[object]] = {
    "attention.causal": {True},
    "attention.clamp_kqv": {0.0},
    "attention.max_alibi_bias": {0.0},
    "attn_logit_softcapping": {0.0},
    "final_logit_softcapping": {0.0},
    "expert_count": {0},
    "expert_used_count": {0},
    "expert_shared_count": {0},
    "nextn_predict_layers": {0},
    "pooling_type": {0},
    "rope.scale_linear": {1.0},
    "rope.scaling.factor": {1.0},
    "rope.scaling.attn_factor": {1.0},
    "rope.scaling.yarn_attn_factor": {1.0},
    "rope.scaling.yarn_ext_factor": {1.0},
    "tensor_data_layout": {"Meta AI original pth"},
    "use_parallel_residual": {False},
}

# Notes of the converter that change nothing.
HARMLESS = ("rope.scaling.finetuned", "rope.scaling.original_context_length", "vocab_size")

LLAMA_NAMES: dict[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

QWEN3_NAMES: dict[str, str] = LLAMA_NAMES | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}

GEMMA3_NAMES: dict[str, str] = LLAMA_NAMES | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

TOP_NAMES: dict[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor and its Hugging Face name, and what the converter did to it.

    heads: above 0, rows are interleaved within this many heads; `row_order` undoes it.
    plus_one: the file's values are the weight + 1.
    """

    name: str
    tensor: GGUFTensor
    heads: int = 0
    plus_one: bool = False


def row_order(n_rows: int, heads: int) -> np.ndarray:
    """Which file row becomes which row: `[N]`.

    llama.cpp rotates neighbouring rows of a head, Hugging Face row i with row i + D/2, so the
    converter stores row i and row i + D/2 next to each other.
    """
    return np.arange(n_rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def describe(file: GGUFFile) -> tuple[dict[str, Any], list[NamedTensor]]:
    """Config in Hugging Face's form, and the tensors under their Hugging Face names.

    Raises ModelError for an architecture, a key or a tensor that is not understood.
    """
    arch = file.metadata.get("general.architecture")
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise unsupported(
            file.path,
            f"this is one of {show(file.metadata['split.count'])} parts; merge them with "
            "`llama-gguf-split --merge` first",
        )
    keys = Keys(file, str(arch))
    match arch:
        case "llama":
            config, names = _llama(keys), LLAMA_NAMES
        case "gemma3":
            config, names = _gemma3(keys), GEMMA3_NAMES
        case "qwen2":
            config, names = _qwen(keys, "qwen2"), LLAMA_NAMES
        case "qwen3":
            config, names = _qwen(keys, "qwen3"), QWEN3_NAMES
        case _:
            raise unsupported(
                file.path,
                f"GGUF architecture {show(arch)} is not supported; gemma3, llama, qwen2 and qwen3 "
                "are. Other models load from a Hugging Face directory",
            )
    keys.finish()
    tensors = [
        _named(file, t, names, config)
        for t in file.tensors.values()
        if t.name != "rope_freqs.weight"
    ]
    return config, tensors


def _named(
    file: GGUFFile, tensor: GGUFTensor, names: dict[str, str], config: dict[str, Any]
) -> NamedTensor:
    layers, heads, kv_heads, head_dim = (
        config[k]
        for k in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    base, _, kind = tensor.name.rpartition(".")
    name = TOP_NAMES.get(base)
    if found := re.fullmatch(r"blk\.(\d{1,6})\.(\w+)", base):
        part = names.get(found[2])
        if part and int(found[1]) < layers:
            name = f"model.layers.{int(found[1])}.{part}"
    if name is None or kind not in ("weight", "bias"):
        raise unsupported(
            file.path,
            f"tensor {show(tensor.name)} is not part of a {config['model_type']} model of {layers} "
            "layers as this version knows it; convert the model again",
        )
    gemma = config["model_type"] == "gemma3_text"
    interleaved = config["model_type"] in ("llama", "mistral")
    if not interleaved or not name.endswith(("q_proj", "k_proj")):
        return NamedTensor(f"{name}.{kind}", tensor, plus_one=gemma and "norm" in name)
    count = heads if name.endswith("q_proj") else kv_heads
    if tensor.shape[0] != count * head_dim:
        raise damaged(
            file.path,
            f"tensor {show(tensor.name)} has {tensor.shape[0]} rows, {count} heads of {head_dim} "
            f"need {count * head_dim}",
        )
    return NamedTensor(f"{name}.{kind}", tensor, heads=count)


class Keys:
    """The metadata of one architecture; remembers what was read, to refuse the rest."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self.file = file
        self.arch = arch
        self.read: set[str] = set(HARMLESS)

    @property
    def path(self) -> Path:
        return self.file.path

    def get(self, key: str) -> object:
        self.read.add(key)
        return self.file.metadata.get(f"{self.arch}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if isinstance(value, list):  # one entry per layer: fine as long as all layers agree
            if not value or any(v != value[0] for v in value):
                raise self.refuse(key, value, "layers that differ are not supported")
            value = value[0]
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise self.wrong(key, value, "a positive whole number")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A float as its shortest decimal: 1e-05, and not float32's 9.999999747378752e-06."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise self.wrong(key, value, "a positive number")
        return float(str(np.float32(value)))

    def finish(self) -> None:
        """Raise ModelError for a key that nothing above has understood."""
        prefix = f"{self.arch}."
        for full, value in self.file.metadata.items():
            key = full.removeprefix(prefix)
            if key == full or key in self.read:
                continue
            if isinstance(value, list) or value not in NEUTRAL.get(key, ()):
                raise self.refuse(key, value, "this version does not know what that changes")

    def refuse(self, key: str, value: object, why: str) -> ModelError:
        return unsupported(
            self.path,
            f"metadata {show(f'{self.arch}.{key}')} is {show(value)}; {why}, use another file or a "
            "Hugging Face directory",
        )

    def wrong(self, key: str, value: object, what: str) -> ModelError:
        return damaged(
            self.path, f"metadata {show(f'{self.arch}.{key}')} is {show(value)}, it must be {what}"
        )


def _llama(keys: Keys) -> dict[str, Any]:
    tensors = keys.file.tensors
    config = _common(keys) | {
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_theta": keys.real("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }
    if keys.get("attention.sliding_window") not in (None, 0):
        # Llama with a window is what Hugging Face calls Mistral.
        config["model_type"] = "mistral"
        config["sliding_window"] = keys.integer("attention.sliding_window")
    return config


def _qwen(keys: Keys, model_type: str) -> dict[str, Any]:
    """Both Qwens. llama.cpp's have no sliding window, and no biases in Qwen 3."""
    return _common(keys) | {
        "model_type": model_type,
        "hidden_act": "silu",
        "rope_theta": keys.real("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys),
        "tie_word_embeddings": "output.weight" not in keys.file.tensors,
    }


def _gemma3(keys: Keys) -> dict[str, Any]:
    config = _common(keys)
    layers = config["num_hidden_layers"]
    pattern = keys.integer("attention.sliding_window_pattern", 6)
    # The 27B model, told by its 62 layers, scales queries by hidden size over heads.
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return config | {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if layers == 62 else config["head_dim"],
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)
        ],
        "rope_theta": keys.real("rope.freq_base", 1e6),
        "rope_local_base_freq": keys.real("rope.freq_base_swa", 10000.0),
        "rope_scaling": _rope_scaling(keys),
        "tie_word_embeddings": "output.weight" not in keys.file.tensors,
    }


def _common(keys: Keys) -> dict[str, Any]:
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", max(hidden // heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := keys.integer(key, head_dim)) != head_dim:
            raise keys.refuse(key, value, f"only the head size of {head_dim} is supported")
    if head_dim % 2:
        raise keys.wrong("attention.key_length", head_dim, "even")
    if (layers := keys.integer("block_count")) > len(keys.file.tensors):
        raise keys.wrong("block_count", layers, "at most the number of tensors")
    embedding = keys.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise damaged(keys.path, "there is no matrix 'token_embd.weight'")
    tokens = keys.file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
        raise damaged(
            keys.path,
            f"the vocabulary has {len(tokens)} tokens, the embedding {embedding.shape[0]} rows",
        )
    config: dict[str, Any] = {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
    }
    for name in ("bos_token_id", "eos_token_id"):
        value = keys.file.metadata.get(f"tokenizer.ggml.{name}")
        if isinstance(value, int):
            config[name] = value
    return config


def _rope_scaling(keys: Keys) -> dict[str, Any] | None:
    """Hugging Face's `rope_scaling`, or `gguf_factors` with what each frequency is divided by.

    Llama 3's converter writes the divisors out and not the numbers they came from.
    """
    factors = keys.file.tensors.get("rope_freqs.weight")
    kind = keys.get("rope.scaling.type")
    if factors is not None:
        if kind not in (None, "none"):
            raise keys.refuse(
                "rope.scaling.type", kind, "together with rope_freqs.weight it is not supported"
            )
        if factors.type != "F32" or len(factors.shape) != 1:
            raise damaged(keys.path, "tensor 'rope_freqs.weight' is no list of F32 numbers")
        values = keys.file.raw(factors).view("<f4")
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise damaged(keys.path, "tensor 'rope_freqs.weight' has values that divide nothing")
        return {"rope_type": "gguf_factors", "factors": values.tolist()}
    match kind:
        case None | "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": keys.real("rope.scaling.factor")}
        case "yarn":
            scaling: dict[str, Any] = {
                "rope_type": "yarn",
                "factor": keys.real("rope.scaling.factor"),
                "original_max_position_embeddings": keys.integer(
                    "rope.scaling.original_context_length"
                ),
            }
            for name in ("beta_fast", "beta_slow"):
                if keys.get(f"rope.scaling.yarn_{name}") is not None:
                    scaling[name] = keys.real(f"rope.scaling.yarn_{name}")
            return scaling
        case _:
            raise keys.refuse("rope.scaling.type", kind, "linear and yarn are supported")
