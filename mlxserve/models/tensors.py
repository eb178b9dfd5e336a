"""What a config says about a checkpoint: which tensors there must be, and which are matrices."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxserve.errors import ModelError
from mlxserve.models.base import Model
from mlxserve.models.layers import Embedding, Linear

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
SHOWN = 3  # tensors named in an error before "and n more"

Shape = tuple[int, ...]


class Found(NamedTuple):
    """A tensor of a checkpoint. not_floating: its dtype where that is no floating type."""

    shape: Shape
    not_floating: str = ""


def expected(model: Model) -> dict[str, Shape]:
    """Every tensor of the model by name, in the order of its layers."""
    parameters = cast(nn.Module, model).parameters()
    return {name: tuple(a.shape) for name, a in cast(list, tree_flatten(parameters))}


def matrices(model: Model) -> list[str]:
    """The modules whose `weight` may be quantised: linear layers and embeddings."""
    modules = model.named_modules()
    found = {name for name, module in modules if isinstance(module, Linear | Embedding)}
    order = (name.removesuffix(".weight") for name in expected(model) if name.endswith(".weight"))
    return [name for name in order if name in found]


def multiplied(model: Model) -> list[str]:
    """Of `matrices` those that x is multiplied with: not an embedding beside a head of its own."""
    tied = HEAD not in expected(model)
    return [name for name in matrices(model) if tied or f"{name}.weight" != EMBEDDING]


def names(originals: Iterable[str]) -> dict[str, str]:
    """A model's names for tensors -> the names that a checkpoint has for them.

    Buffers that old files carry along are left out. Raises ModelError for two tensors of one name.
    """
    found: dict[str, str] = {}
    for original in originals:
        name = original.removeprefix("language_model.")
        if name.startswith(("layers.", "embed_tokens.", "norm.")):  # saved without its output head
            name = f"model.{name}"
        if name.endswith("rotary_emb.inv_freq"):
            continue
        if name in found:
            raise ModelError(f"two tensors are named {name}; remove one ({original})")
        found[name] = original
    return found


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor or a module belongs to; None outside of them."""
    found = _LAYER.search(name)
    return None if found is None else int(found[1])


def untied() -> ModelError:
    """The error for a head of its own where the config says that there is none."""
    return ModelError(
        f"tie_word_embeddings is true but {HEAD} differs from {EMBEDDING}; set it to false"
    )


def check(wanted: Mapping[str, Shape], found: Mapping[str, Found]) -> None:
    """Raise ModelError, naming tensors that are missing, unexpected, misshapen or not floating."""
    problems = []
    if missing := [f"{n} {list(s)}" for n, s in wanted.items() if n not in found]:
        problems.append(f"missing {_listed(missing)}")
    if unexpected := [f"{n} {list(t.shape)}" for n, t in found.items() if n not in wanted]:
        problems.append(f"unexpected {_listed(unexpected)}")
    wrong = []
    for name, tensor in found.items():
        if name in wanted and (fault := _fault(wanted[name], tensor)):
            wrong.append(f"{name} {fault}")
    if wrong:
        problems.append(f"wrong {_listed(wrong)}")
    if problems:
        raise ModelError(f"the weights don't fit the config: {'; '.join(problems)}")


def _fault(shape: Shape, tensor: Found) -> str:
    if tuple(tensor.shape) != shape:
        return f"is {list(tensor.shape)}, expected {list(shape)}"
    if tensor.not_floating:
        return f"is {tensor.not_floating}, expected a floating type"
    return ""


def _listed(items: list[str]) -> str:
    more = f" (and {len(items) - SHOWN} more)" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more
