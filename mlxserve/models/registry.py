"""Which module implements a config's `model_type`. Each has `build(config, shard) -> Model`."""

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from mlxserve.errors import ModelError
from mlxserve.models.base import Model
from mlxserve.models.tensor_parallel import Shard

MODULES = {
    "gemma3_text": "mlxserve.models.gemma3_text",
    "llama": "mlxserve.models.llama",
    "mistral": "mlxserve.models.llama",
    "qwen2": "mlxserve.models.qwen",
    "qwen3": "mlxserve.models.qwen",
}


def build(config: Mapping[str, Any], shard: Shard | None = None) -> Model:
    """The model that `config` (a config.json) describes, with placeholders for weights.

    shard: the part of it to build; None: all.
    Raises ModelError for an unsupported model_type and for a config the model refuses.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"config: model_type is {model_type!r}; it must name an architecture")
    if model_type not in MODULES:
        close = difflib.get_close_matches(model_type, MODULES, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        supported = ", ".join(sorted(MODULES))
        raise ModelError(f"model_type {model_type!r} isn't supported{hint}; supported: {supported}")
    return importlib.import_module(MODULES[model_type]).build(config, shard)
