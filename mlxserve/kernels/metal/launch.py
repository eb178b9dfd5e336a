"""Metal kernels as plain values: MLX compiles and runs them on a Mac, in the tests an emulator."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import mlx.core as mx

from mlxserve import config, device


@dataclass(frozen=True, slots=True)
class Kernel:
    """The arguments of `mx.fast.metal_kernel`.

    source: the body of the function, in the Metal shading language; header: what stands before it.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    header: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Launch:
    """One call of a kernel.

    arrays: its inputs; template: names and values that the source is compiled for; grid: threads in
    all, not threadgroups; threadgroup: threads of one; shapes, dtypes: of the outputs.
    """

    kernel: Kernel
    arrays: tuple[mx.array, ...]
    template: tuple[tuple[str, int | bool | mx.Dtype], ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]


# What runs a launch: `run` on a Mac, the emulator in tests.
Runner = Callable[[Launch], Sequence[mx.array]]


def runner() -> Runner | None:
    """What runs launches in this process: `run` where MLX has Metal, None elsewhere.

    In tests, the `run` of the module that MLXSERVE_METAL_STAND_IN names.
    """
    if stand_in := config.metal_stand_in():
        return importlib.import_module(stand_in).run
    return run if device.has_metal() else None


def run(launch: Launch) -> list[mx.array]:
    """The outputs, lazily. Raises RuntimeError, when it is called, where MLX has no Metal."""
    return _compiled(launch.kernel)(
        inputs=list(launch.arrays),
        template=list(launch.template),
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        output_shapes=list(launch.shapes),
        output_dtypes=list(launch.dtypes),
    )


def source(name: str) -> str:
    """The text of a file of this folder."""
    return resources.files("mlxserve.kernels.metal").joinpath(name).read_text("utf-8")


@cache
def _compiled(kernel: Kernel) -> Any:
    return mx.fast.metal_kernel(
        name=kernel.name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.source,
        header=kernel.header,
    )
