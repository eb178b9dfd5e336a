"""Refuses what MLX or Metal would refuse before a kernel starts."""

import math

from mlxserve.kernels.metal.launch import Launch
from tests.support.metal import clang, signature

MAX_THREADS = 1024
MAX_BUFFERS = 31


def check_launch(launch: Launch) -> None:
    """Raise ValueError for a launch that MLX or Metal would refuse."""
    kernel = launch.kernel
    if not kernel.outputs:
        raise ValueError(f"the kernel {kernel.name!r} has no output")
    _check_count(f"arrays for the inputs {kernel.inputs}", launch.arrays, kernel.inputs)
    _check_count(f"shapes for the outputs {kernel.outputs}", launch.shapes, kernel.outputs)
    _check_count(f"dtypes for the outputs {kernel.outputs}", launch.dtypes, kernel.outputs)
    for what, sizes in (("grid", launch.grid), ("threadgroup", launch.threadgroup)):
        if len(sizes) != 3 or min(sizes) < 1:
            raise ValueError(f"{what}={sizes}: expected three sizes of at least 1")
    if math.prod(launch.threadgroup) > MAX_THREADS:
        raise ValueError(
            f"threadgroup={launch.threadgroup}: Metal runs at most {MAX_THREADS} threads in one"
        )
    found = signature.parameters(launch)
    attributes = sum(parameter.kind == "attribute" for parameter in found)
    if not attributes:
        # Every thread would do the same; MLX 0.32.4 can also generate a broken function then.
        raise ValueError(
            f"the source of {kernel.name!r} uses no attribute such as thread_position_in_grid"
        )
    if len(found) - attributes > MAX_BUFFERS:
        raise ValueError(
            f"{kernel.name!r} takes {len(found) - attributes} buffers; Metal binds {MAX_BUFFERS}"
        )


def check_options(
    mode: str, order: str, ulp_noise: int, fused: bool, alignment: int, timeout_s: int
) -> None:
    """Raise ValueError for options of `emulate` that mean nothing."""
    for name, value, known in (
        ("mode", mode, ("check", "fast")),
        ("order", order, ("forward", "reverse", "random")),
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(known)}")
    if ulp_noise < 0:
        raise ValueError(f"ulp_noise={ulp_noise}: expected 0 or more")
    if alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"alignment={alignment}: expected a power of two")
    if timeout_s < 1:
        raise ValueError(f"timeout_s={timeout_s}: expected whole seconds, at least 1")
    if fused and not clang.has_fused_multiply_add():
        raise ValueError("fused_multiply_add=True: this processor has no such instruction")


def _check_count(what: str, given: tuple, expected: tuple) -> None:
    if len(given) != len(expected):
        raise ValueError(f"{len(given)} {what}")
