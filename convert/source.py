"""Where a conversion reads from: the tensors of a model as dense numbers, some rows at a time.

A tensor is read in two steps: `fetch` takes its bytes from the disk to a buffer, and `array` makes
MLX's array of them.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from mlxserve.sources.mlx_quant import Quantised


class Buffer:
    """Memory that is used for one piece after the other: new memory costs as much as reading.

    It is MLX's own, so that what is read needs no copy. `data` may be written to while no array of
    it is in use.
    """

    def __init__(self, nbytes: int) -> None:
        self._array = mx.zeros(nbytes, dtype=mx.uint8)
        self._views: dict[tuple[object, ...], mx.array] = {}
        mx.eval(self._array)
        self.data = memoryview(self._array)  # type: ignore[arg-type]

    def array(self, shape: tuple[int, ...], dtype: mx.Dtype, at: int = 0) -> mx.array:
        """The numbers from byte `at` on, in place."""
        if (shape, dtype, at) not in self._views:
            flat = self._array[at : at + math.prod(shape) * dtype.size]
            view = self._views[shape, dtype, at] = flat.view(dtype).reshape(shape)
            mx.eval(view)
        return self._views[shape, dtype, at]


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

    def fetch(self, start: int, stop: int, buffer: Buffer) -> None:
        """Rows start .. stop of the first axis, into a buffer that is large enough for `array`.

        Raises ModelError.
        """
        ...

    def array(self, buffer: Buffer, rows: int) -> mx.array:
        """What `fetch` left in the buffer, as `[rows, ...]` in `dtype`."""
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
