"""Runs Metal kernels without a Mac: the very source that MLX compiles there, as C++ on the CPU.

`emulate` gives a launch's outputs, or raises KernelError with what is wrong with its kernel:
access out of bounds, to read-only or uninitialised memory, races, barriers and simd operations that
threads don't reach together, undefined arithmetic, address spaces. `cost` counts memory traffic.
Neither can show how long a kernel takes, nor what Metal's own compiler makes of it.
"""

from tests.support.metal.clang import unavailable
from tests.support.metal.cost import BufferCost, Cost, Traffic, cost
from tests.support.metal.emulator import emulate
from tests.support.metal.mlx_source import mlx_source
from tests.support.metal.report import Finding, KernelError
from tests.support.metal.signature import generated_source

__all__ = [
    "BufferCost",
    "Cost",
    "Finding",
    "KernelError",
    "Traffic",
    "cost",
    "emulate",
    "generated_source",
    "mlx_source",
    "unavailable",
]
