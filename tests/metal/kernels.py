"""Small kernels for the emulator's own tests: one input, one output."""

import mlx.core as mx

from mlxserve.kernels.metal.launch import Kernel, Launch

NAMES = """uint i = thread_position_in_grid.x; uint t = thread_position_in_threadgroup.x;
uint lane = thread_index_in_simdgroup; uint simdgroup = simdgroup_index_in_threadgroup;
"""
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SHARED = "threadgroup float s[64];"
# Lines before a body, which findings count.
NAME_LINES = NAMES.count("\n")


def launch(
    body: str,
    x: mx.array | None = None,
    *,
    threads: int = 64,
    threadgroup: int = 64,
    shape: tuple[int, ...] | None = None,
    dtype: mx.Dtype = mx.float32,
    template: tuple[tuple[str, int | bool | mx.Dtype], ...] = (),
    header: str = "",
) -> Launch:
    """A kernel from `x` (0, 1, ... 63 by default) to `o` (an element for each thread)."""
    return Launch(
        Kernel("k", ("x",), ("o",), NAMES + body, header),
        (mx.arange(64, dtype=mx.float32) if x is None else x,),
        template,
        (threads, 1, 1),
        (threadgroup, 1, 1),
        ((threads,) if shape is None else shape,),
        (dtype,),
    )
