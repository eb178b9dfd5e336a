"""The device that MLX computes on, and its memory: the one place that asks MLX about them."""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

import mlx.core as mx

# What MLX may keep of freed buffers, of the memory that the device recommends to use: as much as
# `memory.SPARE_FRACTION` leaves unplanned.
REUSE_FRACTION = 0.05


def has_metal() -> bool:
    """Whether MLX computes on a GPU, through Metal."""
    return mx.metal.is_available()


def name() -> str:
    """The chip's name, such as "Apple M3 Max"."""
    return str(mx.device_info().get("device_name", "unknown"))


def recommended_bytes() -> int:
    """The memory that Metal recommends one process to use, at the most."""
    return int(mx.device_info()["max_recommended_working_set_size"])


class _Limits:
    """MLX's limits of memory, which all engines of a process share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders = 0
        self.before = (0, 0)

    def take(self) -> None:
        with self.lock:
            if self.holders == 0:
                recommended = recommended_bytes()
                wired = mx.set_wired_limit(recommended)
                self.before = wired, mx.set_cache_limit(int(REUSE_FRACTION * recommended))
            self.holders += 1

    def release(self) -> None:
        with self.lock:
            self.holders -= 1
            if self.holders == 0:
                wired, cached = self.before
                mx.set_wired_limit(wired)
                mx.set_cache_limit(cached)


_limits = _Limits()


@contextmanager
def wired_memory() -> Iterator[None]:
    """Keep this process's arrays resident while it is held, and few buffers that nobody uses.

    With Metal, sets MLX's wired limit to what the device recommends, so that weights aren't paged
    out between requests, and bounds its cache of freed buffers. Several engines may hold it: the
    first sets both limits, the last restores what they were. On a CPU nothing is done.
    """
    if not has_metal():
        yield
        return
    _limits.take()
    try:
        yield
    finally:
        _limits.release()


class Pressure(IntEnum):
    """How short of memory the whole machine is, in macOS's numbers."""

    NORMAL = 1
    WARNING = 2
    CRITICAL = 4


def pressure_signal() -> Callable[[], Pressure] | None:
    """What to ask how short of memory the system is; None where it doesn't say (not a Mac)."""
    if sys.platform != "darwin":
        return None
    return _PressureLevel(ctypes.CDLL(None).sysctlbyname)


class _PressureLevel:
    """Activity Monitor's green, yellow and red. A call takes microseconds.

    sysctlbyname: of the C library.
    """

    NAME = b"kern.memorystatus_vm_pressure_level"

    def __init__(self, sysctlbyname: Callable[..., int]) -> None:
        self._sysctlbyname = sysctlbyname

    def __call__(self) -> Pressure:
        level = ctypes.c_int(0)
        size = ctypes.c_size_t(ctypes.sizeof(level))
        failed = self._sysctlbyname(self.NAME, ctypes.byref(level), ctypes.byref(size), None, 0)
        if failed or level.value < Pressure.WARNING:
            return Pressure.NORMAL
        return Pressure.WARNING if level.value < Pressure.CRITICAL else Pressure.CRITICAL
