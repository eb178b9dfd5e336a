"""Run language models on Apple silicon, natively, on MLX.

    import mlxserve

    llm = mlxserve.load("smollm2-135m")
    print(mlxserve.generate(llm, [{"role": "user", "content": "What is a prime?"}]).text)
    for piece in mlxserve.stream(llm, "Once upon a time", temperature=0.8, seed=1):
        print(piece.text, end="")

Importing this costs little: MLX is loaded with the first model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from mlxserve.checks import from_names
from mlxserve.errors import (
    CapacityError,
    ContextError,
    DamagedError,
    EngineDead,
    InvariantError,
    MlxserveError,
    ModelError,
    RequestError,
)
from mlxserve.grammar import Grammar
from mlxserve.types import Completion, Piece, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

    from mlxserve.llm import LLM
    from mlxserve.types import Batch, OnProgress, Prompt

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CapacityError",
    "Completion",
    "ContextError",
    "DamagedError",
    "EngineDead",
    "Grammar",
    "InvariantError",
    "MlxserveError",
    "ModelError",
    "Piece",
    "RequestError",
    "SamplingParams",
    "generate",
    "load",
    "stream",
]


def load(
    model: str | PathLike[str], *, on_progress: OnProgress | None = None, **options: Any
) -> LLM:
    """Load a model and start its engine.

    model: an alias such as "smollm2-135m" (fetched once, then kept), a directory of safetensors,
    a .gguf file, or a name of the Hugging Face Hub: owner/name, owner/name@revision,
    owner/name:Q4_K_M. options: fields of `mlxserve.config.EngineConfig`, such as max_batch, and
    gguf_q6_k ("8bit" or "16bit"), what a GGUF's Q6_K, Q3_K and Q2_K tensors become. on_progress is
    called with (stage, done, total). Raises ModelError if it can't be found, read or run, and
    CapacityError if memory is short.
    """
    from mlxserve.llm import LLM

    return LLM(model, on_progress=on_progress, **options)


@overload
def generate(
    llm: LLM | str | PathLike[str], prompt: Batch, *, n: Literal[1] = 1, **sampling: Any
) -> list[Completion]: ...
@overload
def generate(
    llm: LLM | str | PathLike[str], prompt: Prompt, *, n: Literal[1] = 1, **sampling: Any
) -> Completion: ...
@overload
def generate(
    llm: LLM | str | PathLike[str], prompt: Batch, *, n: int, **sampling: Any
) -> list[list[Completion]]: ...
@overload
def generate(
    llm: LLM | str | PathLike[str], prompt: Prompt, *, n: int, **sampling: Any
) -> list[Completion]: ...
def generate(
    llm: LLM | str | PathLike[str], prompt: Prompt | Batch, **sampling: Any
) -> Completion | list[Completion] | list[list[Completion]]:
    """Continue a prompt: text, chat messages, or token ids. A list of prompts runs as one batch.

    sampling: fields of `SamplingParams`; with `n` over 1, each prompt has a list of n answers in
    place of its answer. Given a name instead of an LLM, the model is loaded for
    this call alone; load it once for more. Raises RequestError for bad input, before any work
    starts.
    """
    from mlxserve.llm import LLM

    if isinstance(llm, LLM):
        return llm.generate(prompt, **sampling)
    from_names(SamplingParams, "sampling parameter", sampling)  # wrong ones before the model loads
    with load(llm) as model:
        return model.generate(prompt, **sampling)


def stream(llm: LLM | str | PathLike[str], prompt: Prompt, **sampling: Any) -> Iterator[Piece]:
    """Continue one prompt, piece by piece as text arrives; the last piece carries the Completion.

    Arguments and errors are those of `generate`. Closing the iterator ends the answer.
    """
    from mlxserve.llm import LLM

    if isinstance(llm, LLM):
        return llm.stream(prompt, **sampling)
    from_names(SamplingParams, "sampling parameter", sampling).check_single("stream")
    return _stream_once(llm, prompt, sampling)


def _stream_once(
    model: str | PathLike[str], prompt: Prompt, sampling: dict[str, Any]
) -> Iterator[Piece]:
    with load(model) as llm:
        yield from llm.stream(prompt, **sampling)


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from mlxserve.llm import LLM

        return LLM
    raise AttributeError(f"module 'mlxserve' has no attribute {name!r}")
