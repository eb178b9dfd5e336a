"""The runtime's functions and structures: include/msl/abi.h from Python's side."""

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAX_BUFFERS = 32
MAX_FINDINGS = 32


class Traffic(ctypes.Structure):
    """What moved between threads and a buffer, in one direction."""

    _fields_ = (
        ("bytes", ctypes.c_uint64),
        ("moved_bytes", ctypes.c_uint64),
        ("distinct_bytes", ctypes.c_uint64),
        ("transactions", ctypes.c_uint64),
        ("transactions_needed", ctypes.c_uint64),
    )


class RawFinding(ctypes.Structure):
    """A finding before its addresses are places."""

    _fields_ = (
        ("kind", ctypes.c_char * 24),
        ("message", ctypes.c_char * 320),
        ("file", ctypes.c_char * 160),
        ("line", ctypes.c_int32),
        ("in_thread", ctypes.c_uint32),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3),
        ("pc", ctypes.c_uint64),
        ("other_pc", ctypes.c_uint64),
    )


class Report(ctypes.Structure):
    """What a launch leaves behind."""

    _fields_ = (
        ("findings", ctypes.c_uint32),
        ("threadgroup_bytes", ctypes.c_uint64),
        ("barriers", ctypes.c_uint64),
        ("simd_operations", ctypes.c_uint64),
        ("arithmetic", ctypes.c_uint64),
        ("threadgroup_loaded", ctypes.c_uint64),
        ("threadgroup_stored", ctypes.c_uint64),
        ("loads", Traffic * MAX_BUFFERS),
        ("stores", Traffic * MAX_BUFFERS),
        ("finding", RawFinding * MAX_FINDINGS),
    )


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("element_bytes", ctypes.c_uint32),
        ("writable", ctypes.c_uint32),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("buffer_count", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("check", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("flush_to_zero", ctypes.c_uint32),
        ("timeout_s", ctypes.c_uint32),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("buffers", ctypes.POINTER(_Buffer)),
    )


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that a kernel sees. data: its contents; an output's are overwritten by the launch."""

    name: str
    data: np.ndarray
    writable: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """How a library is run.

    check: it was compiled with checks; count: traffic, which needs these; order: 0 forward,
    1 reverse, 2 random; alignment: of each buffer, in bytes.
    """

    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    check: bool
    count: bool = False
    order: int = 0
    seed: int = 0
    flush_to_zero: bool = False
    timeout_s: int = 60
    alignment: int = 16


def execute(path: Path, buffers: Sequence[Buffer], settings: Settings) -> tuple[Report, int]:
    """Run a library in a process of its own. Gives its report and its wait status.

    Outputs are copied back into `buffers`.
    """
    library = ctypes.CDLL(str(path))
    library.msl_allocate.restype = ctypes.c_void_p
    library.msl_allocate.argtypes = (
        *(ctypes.c_uint64, ctypes.c_uint64),
        *(ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_uint64)),
    )
    library.msl_free.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
    library.msl_run.argtypes = (ctypes.POINTER(_Launch), ctypes.c_void_p)
    library.msl_layout_bytes.restype = ctypes.c_uint64
    if library.msl_layout_bytes() != ctypes.sizeof(Report) + ctypes.sizeof(_Launch):
        raise RuntimeError("the structures of abi.py are not those of msl/abi.h")
    with ExitStack() as stack:

        def allocate(size: int, alignment: int) -> int:
            mapping, mapped = ctypes.c_void_p(), ctypes.c_uint64()
            address = library.msl_allocate(
                size, alignment, ctypes.byref(mapping), ctypes.byref(mapped)
            )
            if address is None:
                raise MemoryError(f"the Metal emulator found no {size} bytes of address space")
            stack.callback(library.msl_free, mapping, mapped)
            return address

        addresses = []
        for buffer in buffers:
            # An alignment that is no more than asked for finds code that relies on more.
            address = allocate(max(buffer.data.nbytes, 1), settings.alignment)
            ctypes.memmove(address, buffer.data.ctypes.data, buffer.data.nbytes)
            addresses.append(address)
        descriptions = (_Buffer * MAX_BUFFERS)(
            *(
                _Buffer(address, b.data.nbytes, b.name.encode(), b.data.itemsize, b.writable)
                for address, b in zip(addresses, buffers, strict=True)
            )
        )
        launch = _Launch(
            settings.grid,
            settings.threadgroup,
            len(buffers),
            settings.order,
            settings.seed,
            settings.check,
            settings.count,
            settings.flush_to_zero,
            settings.timeout_s,
            (ctypes.c_void_p * MAX_BUFFERS)(*addresses),
            descriptions,
        )
        report = allocate(ctypes.sizeof(Report), 64)
        status = library.msl_run(ctypes.byref(launch), report)
        for address, buffer in zip(addresses, buffers, strict=True):
            if buffer.writable:
                ctypes.memmove(buffer.data.ctypes.data, address, buffer.data.nbytes)
        return Report.from_buffer_copy(ctypes.string_at(report, ctypes.sizeof(Report))), status
