"""Where a conversion reads from: the tensors of a model as dense numbers, some rows at a time.

A tensor is read in two steps, so that files are read on one thread while another computes: `fetch`
takes bytes from the disk and may run anywhere; `array` makes an MLX array of them, on the thread
that owns MLX.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from mlxserve.errors import ModelError
from mlxserve.sources.mlx_quant import Quantised

# The smallest bits without a sign that stand for no finite number: infinity's.
INFINITY = {mx.float32: 0x7F800000, mx.float16: 0x7C00, mx.bfloat16: 0x7F80}
LOOK_NUMBERS = 1 << 17  # looked at together, while they are in the processor's cache


class Tensor(Protocol):
    """A tensor as dense numbers. read_bytes: of the file that hold all of it."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> mx.Dtype: ...

    @property
    def read_bytes(self) -> int: ...

    def fetch(self, start: int, stop: int) -> Any:
        """Rows start .. stop of the first axis, as the file has them. Raises ModelError."""
        ...

    def array(self, fetched: Any) -> mx.array:
        """What `fetch` gave as `[stop - start, ...]` in `dtype`."""
        ...


class Source(NamedTuple):
    """A model to convert.

    tensors: under the checkpoint's own names. config: as its file has it, without the description
    of how it is quantised; that is `schemes`, by module. packed: what kinds of packed numbers it
    has, in words; "" if none. dtype: of the numbers where neither the user nor a tensor says.
    """

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    schemes: Mapping[str, Quantised]
    packed: str
    fingerprint: str
    gguf_metadata: Mapping[str, Any] | None = None
    dtype: mx.Dtype | None = None


def all_finite(bits: np.ndarray, dtype: mx.Dtype) -> bool:
    """Whether none of the numbers with these bits is NaN or infinite."""
    flat, infinity = bits.reshape(-1), INFINITY[dtype]
    sign = 1 << 8 * dtype.size - 1
    for start in range(0, flat.size, LOOK_NUMBERS):
        part = flat[start : start + LOOK_NUMBERS]
        # As whole numbers: with a sign the largest is a positive one, without it a negative one.
        if part.view(f"<i{dtype.size}").max() >= infinity or part.max() >= sign | infinity:
            return False
    return True


def check_finite(name: str, bits: np.ndarray, dtype: mx.Dtype) -> None:
    """Raise ModelError if one of a source's numbers is NaN or infinite."""
    if not all_finite(bits, dtype):
        raise ModelError(
            f"tensor {name} has numbers that are NaN or infinite; the model is damaged, download "
            "it again"
        )
