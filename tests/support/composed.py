"""Tiny random models of any kinds of layers, each with a cache of its own kind.

Not of any architecture: their attention and recurrences are as plain as can be, so that what is
tested is the cache. Every operation gives a row the same bits in any batch. Those of attention over
keys and values have native kernels, so that steps are recorded as a user's are.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxserve.cache.spec import FullKV, Latent, LayerSpec, State, WindowKV
from mlxserve.kernels import matmul
from mlxserve.models.base import View, Weights
from mlxserve.models.layers import Embedding, Linear, RMSNorm, project
from mlxserve.models.rope import Rope

WIDTH, HEADS, KV_HEADS, DIM = 48, 4, 2, 16
RANK, ROPE = 24, 8
VOCAB = 61


@dataclass(frozen=True)
class Kind:
    """A layer: "full", "window" (of so many tokens, with `keep`), "latent" or "state".

    sinks: whether each head has a learned logit that takes part in the softmax (GPT-OSS).
    """

    name: str
    window: int = 0
    keep: int = 0
    sinks: bool = False

    @property
    def spec(self) -> LayerSpec:
        match self.name:
            case "full":
                return FullKV(KV_HEADS, DIM)
            case "window":
                return WindowKV(KV_HEADS, DIM, self.window, self.keep)
            case "latent":
                return Latent(RANK, ROPE)
            case _:
                return State(((WIDTH,), (2, WIDTH)))


class ComposedModel(nn.Module):
    """See `models.base.Model`."""

    def __init__(self, kinds: tuple[Kind, ...], seed: int = 0, context_tokens: int = 4096) -> None:
        super().__init__()
        self.kinds = kinds
        self.vocab_size = VOCAB
        self.context_tokens = context_tokens
        self.dtype = mx.float32
        self.float16_safe = True
        self._random = np.random.default_rng(seed)
        self.embedding = Embedding(VOCAB, WIDTH)
        self.embedding.weight = matmul.prepare(self._draw(VOCAB, WIDTH, gain=1.5), mx.float32)
        self.rope = Rope([0.1 * 0.7**i for i in range(DIM // 2)])
        self.norm = RMSNorm(WIDTH, 1e-5)
        self.own_layers = range(len(kinds))
        self.layers = [self._layer(kind) for kind in kinds]
        self.head = self._linear(WIDTH, VOCAB, gain=2.0)
        self.sinks = mx.array(self._random.standard_normal(HEADS).astype(np.float32) + 1)

    def layer_specs(self) -> list[LayerSpec]:
        return [kind.spec for kind in self.kinds]

    def sanitize(self, weights: Weights) -> Weights:
        return weights

    def __call__(self, ids: mx.array, view: View) -> mx.array:
        x = self.embedding(ids)
        norms = [layers["norm"] for layers in self.layers] + [self.norm]
        h = norms[0](x)
        for index, (kind, layers) in enumerate(zip(self.kinds, self.layers, strict=True)):
            run = {"latent": self._latent, "state": self._recur}.get(kind.name, self._attend)
            x, h = norms[index + 1].of_sum(layers["out"](run(h, layers, view, index)), x)
        return h

    def logits(self, h: mx.array) -> mx.array:
        return self.head(h)

    def _attend(self, h, layers, view, index):
        projected = project(h, layers["q"], layers["k"], layers["v"])
        q, k, v = (x.reshape(len(h), -1, DIM) for x in projected)
        q, k = self.rope(q, k, view.positions)
        sinks = self.sinks if self.kinds[index].sinks else None
        out = view.layer(index).attend(q, k, v, scale=DIM**-0.5, sinks=sinks)
        return out.reshape(h.shape[0], -1)

    def _latent(self, h, layers, view, index):
        q = layers["q"](h).reshape(-1, HEADS, RANK + ROPE)
        latent = layers["latent"](h)
        out = view.layer(index).attend_latent(q, latent, scale=(RANK + ROPE) ** -0.5)
        return out.reshape(h.shape[0], -1)

    def _recur(self, h, layers, view, index):
        """A decaying sum, and a convolution over the last three tokens: token by token."""
        gate, value = mx.sigmoid(layers["gate"](h)), layers["value"](h)
        sums, tails = view.layer(index).states()
        outs, ends, kept = [], [], []
        for row, (first, n) in enumerate(view.spans):
            total, tail = sums[row], tails[row]
            for t in range(first, first + n):
                total = total * gate[t] + value[t]
                outs.append(total + 0.5 * tail[0] - 0.25 * tail[1])
                tail = mx.stack([tail[1], value[t]])
            ends.append(total)
            kept.append(tail)
        view.layer(index).set_states([mx.stack(ends), mx.stack(kept)])
        return mx.stack(outs)

    def _layer(self, kind: Kind) -> dict[str, nn.Module]:
        match kind.name:
            case "latent":
                sizes = {"q": HEADS * (RANK + ROPE), "latent": RANK + ROPE, "out": HEADS * RANK}
            case "state":
                sizes = {"gate": WIDTH, "value": WIDTH, "out": WIDTH}
            case _:
                sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
                sizes["out"] = HEADS * DIM
        inner = sizes.pop("out")
        gains = {"q": 2.0, "k": 2.0}
        made = {name: self._linear(WIDTH, n, gains.get(name, 1.0)) for name, n in sizes.items()}
        return made | {"out": self._linear(inner, WIDTH), "norm": RMSNorm(WIDTH, 1e-5)}

    def _linear(self, inputs: int, outputs: int, gain: float = 1.0) -> Linear:
        layer = Linear(inputs, outputs)
        layer.weight = matmul.prepare(self._draw(outputs, inputs, gain=gain), mx.float32)
        return layer

    def _draw(self, rows: int, columns: int, *, gain: float) -> mx.array:
        drawn = self._random.standard_normal((rows, columns)) * (gain * columns**-0.5)
        return mx.array(drawn.astype(np.float32))
