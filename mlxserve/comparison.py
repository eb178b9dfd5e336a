"""Two models side by side on one text: how far apart what they expect next is.

Both read the same windows of tokens (`perplexity.windows`), and whole distributions are compared,
each in float64. A window's logits of both models are in memory at once, and nothing larger.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlxserve import device
from mlxserve.config import EngineConfig
from mlxserve.engine.footprint import footprint, loaded_bytes
from mlxserve.errors import CapacityError, RequestError
from mlxserve.kernels import matmul
from mlxserve.llm import LLM
from mlxserve.memory import device_limit_bytes
from mlxserve.models import registry
from mlxserve.perplexity import perplexity, windows
from mlxserve.report import count_binary, show
from mlxserve.sources.checkpoint import open_checkpoint
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.types import OnProgress

CONTEXT = 512
# One row of each model at a time would do; this many numbers stay in the processor's cache.
BLOCK_NUMBERS = 1 << 18


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a model predicts a text, beside a reference.

    reference_perplexity, perplexity: of either model. divergence: float64 `[tokens]`, for each
    token the Kullback-Leibler divergence of the model's distribution from the reference's, in nats.
    agreement: the share of tokens for which both find the same one likeliest. context, stride: of
    the windows.
    """

    reference_perplexity: float
    perplexity: float
    divergence: np.ndarray
    agreement: float
    context: int
    stride: int

    @property
    def tokens(self) -> int:
        """Tokens that were predicted: all but the first."""
        return len(self.divergence)

    @property
    def mean_divergence(self) -> float:
        """In nats."""
        return float(self.divergence.mean())

    @property
    def p95_divergence(self) -> float:
        """The 95th percentile: one token in 20 is further apart than that."""
        return float(np.percentile(self.divergence, 95))


def compare(
    reference: LLM,
    model: LLM,
    text: str,
    *,
    context: int | None = None,
    stride: int | None = None,
    on_progress: OnProgress | None = None,
) -> Comparison:
    """Have both models read a text.

    context: tokens that a model sees at most (default: CONTEXT, or what both can take). stride:
    tokens from window to window (default: the context, so that each token is computed once: short
    contexts are short for both). on_progress: told how many tokens are done. Raises RequestError
    for models whose vocabularies differ, and for a text that is a single token.
    """
    check_vocabularies(reference.tokenizer, model.tokenizer)
    ids = reference.tokenizer.encode(text)
    if len(ids) < 2:
        raise RequestError("the text is a single token; a comparison needs at least two")
    limit = min(reference.context_tokens, model.context_tokens)
    context = min(CONTEXT, limit) if context is None else context
    stride = context if stride is None else stride
    if not 1 <= context <= limit:
        raise RequestError(
            f"context is {context}, and these models can take 1 to {limit} tokens here",
            param="context",
        )
    if not 1 <= stride <= context:
        raise RequestError(
            f"stride is {stride}; it must be from 1 to the context of {context}, or tokens would "
            "be left out",
            param="stride",
        )
    judged = []
    done = 0
    if on_progress is not None:
        on_progress("compare", 0, len(ids) - 1)
    for start, end, scored_from in windows(len(ids), context, stride):
        rows = slice(scored_from - 1 - start, end - 1 - start)
        shown = ids[start : end - 1]
        pair = (reference.score(shown)[rows], model.score(shown)[rows])
        judged.append(_judge(*pair, np.array(ids[scored_from:end])))
        done += end - scored_from
        if on_progress is not None:
            on_progress("compare", done, len(ids) - 1)
    losses, other_losses, divergence, agree = (
        np.concatenate(column) for column in zip(*judged, strict=True)
    )
    return Comparison(
        perplexity(float(losses.mean())),
        perplexity(float(other_losses.mean())),
        divergence,
        float(agree.mean()),
        context,
        stride,
    )


def check_vocabularies(reference: Tokenizer, model: Tokenizer) -> None:
    """Raise RequestError unless every id stands for the same bytes in both."""
    sizes = reference.vocab_size, model.vocab_size
    if sizes[0] != sizes[1]:
        raise RequestError(
            f"the models have vocabularies of {sizes[0]} and {sizes[1]} tokens; only models that "
            "share one can be compared"
        )
    for token in range(sizes[0]):
        a, b = reference.token_bytes(token), model.token_bytes(token)
        if a != b:
            raise RequestError(
                f"token {token} is {show(a)} in one model and {show(b)} in the other; only models "
                "that share a vocabulary can be compared"
            )


def check_room(
    paths: Sequence[Path], *, context: int | None = None, config: EngineConfig | None = None
) -> None:
    """Raise CapacityError unless the two models fit in memory at once, with a window of each.

    Only headers are read. context: as of `compare`. config: of both engines. Raises ModelError for
    what can't be loaded.
    """
    config = config or EngineConfig(max_batch=1)
    limit = config.memory_limit_bytes or device_limit_bytes()
    found = [open_checkpoint(path) for path in paths]
    metal, form = device.has_metal(), matmul.form()
    models = [(c.config, loaded_bytes(c.config, c.size_bytes, form=form, elements=c.elements))
              for c in found]  # fmt: skip
    built = [registry.build(c.config) for c in found]
    context = min([context or CONTEXT, *(model.context_tokens for model in built)])
    logits = sum(4 * context * model.vocab_size for model in built)

    def alone(i: int, room: int):
        settings, weights = models[i]
        return footprint(
            settings, weights, room, metal=metal, context_tokens=context, engine=config
        )

    taken = [need.weight_bytes + need.cache_bytes for need in (alone(0, limit), alone(1, limit))]
    if not all(alone(i, limit - taken[1 - i] - logits).fits for i in (0, 1)):
        raise CapacityError(
            f"the two models take {count_binary(sum(taken) + logits)} with {context} tokens of "
            f"context, more than can be used of {count_binary(limit)} of memory"
        )


def _judge(
    reference: np.ndarray, model: np.ndarray, ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of each token: its loss in either model, the divergence, and whether both choose the same.

    reference, model: float32 logits `[T, V]`; where one is padded, the shorter V counts. ids: of
    the tokens that come `[T]`.
    """
    width = min(reference.shape[1], model.shape[1])
    losses, other_losses, divergence = (np.empty(len(ids)) for _ in range(3))
    agree = np.empty(len(ids), bool)
    step = max(1, BLOCK_NUMBERS // width)
    for at in range(0, len(ids), step):
        rows = slice(at, at + step)
        p, q = (_log_softmax(logits[rows, :width]) for logits in (reference, model))
        chosen = np.arange(len(p)), ids[rows]
        losses[rows], other_losses[rows] = -p[chosen], -q[chosen]
        agree[rows] = p.argmax(axis=1) == q.argmax(axis=1)
        q -= p
        divergence[rows] = -np.einsum("tv,tv->t", np.exp(p, out=p), q)
    # It is never negative; sums of rounded numbers may be.
    return losses, other_losses, np.maximum(divergence, 0), agree


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64."""
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    return x
