"""Runs a launch on the CPU, and says what is wrong with its kernel."""

import math
import os
import signal
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import numpy as np

from mlxserve.kernels.metal.launch import Launch
from tests.support.metal import abi, clang, signature
from tests.support.metal.lint import lint
from tests.support.metal.report import Finding, KernelError, code_at, compiler_findings, places
from tests.support.metal.tokens import threadgroup_variables
from tests.support.metal.translation import Variant, compiled
from tests.support.metal.validate import check_launch, check_options

MAX_THREADGROUP_BYTES = 32 << 10
_REDZONE_BYTES = 64

Mode = Literal["check", "fast"]
Order = Literal["forward", "reverse", "random"]
_ORDERS = ("forward", "reverse", "random")


def emulate(
    launch: Launch,
    *,
    mode: Mode = "check",
    order: Order = "forward",
    seed: int = 0,
    flush_to_zero: bool = False,
    reversed_reductions: bool = False,
    ulp_noise: int = 0,
    fused_multiply_add: bool = False,
    alignment: int = 16,
    timeout_s: int = 60,
) -> list[mx.array]:
    """The outputs of a launch, from the very source that MLX would compile for a Mac.

    mode: "check" finds faults; "fast" only computes. order, seed: in which order threads,
    simdgroups and threadgroups run. The rest is what a GPU may do differently: flush_to_zero:
    subnormals; reversed_reductions: another order of simd_sum and the like; ulp_noise: exp and
    other functions are off by up to so many units in the last place; fused_multiply_add: a * b + c
    is rounded once; alignment: of each buffer, in bytes (a slice's is that of its elements).

    Raises KernelError if the kernel is wrong, also where it doesn't compile or doesn't end within
    timeout_s; ValueError for a launch that MLX would refuse; RuntimeError without clang.
    """
    check_launch(launch)
    check_options(mode, order, ulp_noise, fused_multiply_add, alignment, timeout_s)
    settings = abi.Settings(
        grid=launch.grid,
        threadgroup=threadgroup_size(launch),
        check=mode == "check",
        order=_ORDERS.index(order),
        seed=seed,
        flush_to_zero=flush_to_zero,
        timeout_s=timeout_s,
        alignment=alignment,
    )
    variant = Variant(
        check=mode == "check",
        reversed_reductions=reversed_reductions,
        ulp_noise=ulp_noise,
        fused_multiply_add=fused_multiply_add,
    )
    return run(launch, variant, settings).outputs


@dataclass(frozen=True, slots=True)
class Run:
    """A launch that found nothing wrong. buffers: in the order of the report's."""

    outputs: list[mx.array]
    report: abi.Report
    buffers: list[abi.Buffer]


def run(launch: Launch, variant: Variant, settings: abi.Settings) -> Run:
    """Compile and run a launch. Raises KernelError."""
    kernel = launch.kernel
    if variant.check and (findings := lint(launch)):
        raise KernelError(kernel, findings)
    try:
        library = compiled(launch, variant)
    except clang.CompileError as error:
        findings = compiler_findings(kernel, str(error)) or [Finding("compile", str(error))]
        raise KernelError(kernel, findings) from None
    buffers = _buffers(launch)
    report, status = abi.execute(library, buffers, settings)
    raw = [report.finding[i] for i in range(report.findings)]
    addresses = {address for finding in raw for address in (finding.pc, finding.other_pc)} - {0}
    where = places(kernel, library, addresses)
    findings = [_finding(launch, finding, where) for finding in raw]
    findings += _memory_findings(launch, report, variant.check)
    findings += _status_findings(status, settings, findings)
    if findings:
        raise KernelError(kernel, findings)
    written = [buffer for buffer in buffers if buffer.writable]
    outputs = [
        _to_mlx(buffer.data.reshape(shape), dtype)
        for buffer, shape, dtype in zip(written, launch.shapes, launch.dtypes, strict=True)
    ]
    return Run(outputs, report, buffers)


def threadgroup_size(launch: Launch) -> tuple[int, int, int]:
    """The threads of a threadgroup: MLX makes it no larger than the grid."""
    x, y, z = (min(pair) for pair in zip(launch.threadgroup, launch.grid, strict=True))
    return x, y, z


def _finding(launch: Launch, raw: abi.RawFinding, where: dict[int, str]) -> Finding:
    place = where.get(raw.pc, "") if raw.pc else f"{raw.file.decode()}:{raw.line}" * bool(raw.line)
    return Finding(
        kind=raw.kind.decode(),
        message=raw.message.decode(),
        where=place,
        code=code_at(launch.kernel, place),
        other=where.get(raw.other_pc, ""),
        threadgroup=tuple(raw.threadgroup) if raw.in_thread else None,
        thread=tuple(raw.thread) if raw.in_thread else None,
    )


def threadgroup_bytes(launch: Launch, report: abi.Report, check: bool) -> int:
    """What a threadgroup's variables take, without what checking adds."""
    redzones = len(threadgroup_variables(launch.kernel.source)) if check else 0
    return report.threadgroup_bytes - redzones * _REDZONE_BYTES


def _memory_findings(launch: Launch, report: abi.Report, check: bool) -> list[Finding]:
    size = threadgroup_bytes(launch, report, check)
    if size <= MAX_THREADGROUP_BYTES:
        return []
    message = f"{size} bytes of threadgroup memory, but Metal has {MAX_THREADGROUP_BYTES}"
    return [Finding("threadgroup-memory", message)]


def _status_findings(status: int, settings: abi.Settings, findings: list[Finding]) -> list[Finding]:
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) == signal.SIGALRM:
            message = f"the launch did not end within {settings.timeout_s} s"
            return [Finding("timeout", message)]
        return [Finding("crash", f"ended by {signal.Signals(os.WTERMSIG(status)).name}")]
    if status and not findings:  # otherwise a finding says why
        return [Finding("crash", f"the emulator's process ended with status {status}")]
    return []


def _buffers(launch: Launch) -> list[abi.Buffer]:
    """The buffers of the generated function's parameters, in their order."""
    inputs = [_to_numpy(array) for array in launch.arrays]
    found = []
    for parameter in signature.parameters(launch):
        if parameter.kind == "output":
            dtype = _numpy_dtype(launch.dtypes[parameter.index])
            # A pattern that no kernel writes by chance, and not zeros.
            size = math.prod(launch.shapes[parameter.index]) * dtype.itemsize
            data = np.full(size, 0xFF, np.uint8).view(dtype)
            found.append(abi.Buffer(parameter.name, data, writable=True))
        elif parameter.kind != "attribute":
            array = inputs[parameter.index]
            about = {
                "input": array.reshape(-1),
                "shape": np.array(array.shape, np.int32),
                "strides": np.array(array.strides, np.int64) // array.itemsize,
                "ndim": np.array([array.ndim], np.int32),
            }
            found.append(abi.Buffer(parameter.name, about[parameter.kind]))
    return found


def _to_numpy(array: mx.array) -> np.ndarray:
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.ascontiguousarray(np.array(array)).reshape(array.shape)


def _to_mlx(data: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(data).view(dtype) if dtype == mx.bfloat16 else mx.array(data)


def _numpy_dtype(dtype: mx.Dtype) -> np.dtype:
    return _to_numpy(mx.zeros(1, dtype)).dtype
