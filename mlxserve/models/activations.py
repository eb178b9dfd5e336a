"""How much a model makes of each token, read off its parts and a token traced through it."""

from collections import Counter

import mlx.core as mx

from mlxserve.memory import StepShape
from mlxserve.models.base import Group, Model
from mlxserve.models.layers import Embedding, GatedMLP, Linear, RMSNorm
from mlxserve.models.tensors import layer_of
from mlxserve.models.uses import Trace, trace

# MLX makes room for a result when it queues the operation, and queues about a hundred pieces of
# work ahead of the CPU that computes them. Measured with the native kernels, results of 4.9 layers
# of 10 parts (llama, qwen3, gemma3) exist at once.
AHEAD_LAYERS, AHEAD_PARTS = 5, 50


def step_shape(model: Model, dtype: mx.Dtype) -> StepShape:
    """What a step makes for each token. dtype: of activations.

    A layer makes the outputs of its linear layers and norms, the product in a gated MLP, rotated
    queries and keys, and what they attend to. Nothing is computed, and placeholders do for weights.
    Raises ModelError where a layer asks for another cache than it declared.
    """
    view = Trace(model.layer_specs(), dtype)
    trace(model, view)
    made, parts = Counter(view.made), Counter[int]()
    outside = 0
    for name, part in model.named_modules():
        width = _width(part)
        if (layer := layer_of(name)) is not None:
            if width and not _of_heads(part, view.dims.get(layer)):
                made[layer] += width
                parts[layer] += 1
        elif not isinstance(part, Linear):  # an output head's results are logits
            outside += width
    return StepShape(
        ahead=_ahead([(made[layer], parts[layer]) for layer in range(len(view.specs))]),
        heads=tuple(view.heads.get(layer, 0) for layer in range(len(view.specs))),
        outside=outside,
        vocab_size=model.vocab_size,
        itemsize=dtype.size,
    )


def _of_heads(part: object, dim: int | None) -> bool:
    """Whether it is a norm of heads, which is part of the rotation."""
    return isinstance(part, RMSNorm) and part.weight.shape[0] == dim


def _width(part: object) -> int:
    """Numbers per token that a part makes, besides those that its own parts do."""
    match part:
        case Linear():
            return part.weight.shape[0] * _arrays(part.group)
        case RMSNorm():  # the sum that it is of, too
            return 2 * part.weight.shape[0]
        case GatedMLP():
            return part.gate_proj.weight.shape[0]
        case Embedding():
            return part.weight.shape[1] * _arrays(part.group)
        case _:
            return 0


def _arrays(group: Group) -> int:
    """Of results that are added up over a group: at the most every rank's, and the sum."""
    return 1 if group.size == 1 else group.size + 1


def _ahead(layers: list[tuple[int, int]]) -> int:
    """Numbers per token that exist at once, of (numbers, parts) of each layer."""
    total, left = 0.0, float(AHEAD_PARTS)
    for made, parts in sorted(layers, reverse=True)[:AHEAD_LAYERS]:
        total += made * min(1, left / max(parts, 1))
        left = max(0, left - parts)
    return int(total)
