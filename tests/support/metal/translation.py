"""A launch's kernel as a C++ translation unit, and its compiled library."""

from dataclasses import dataclass
from pathlib import Path

from mlxserve.kernels.metal.launch import Launch
from tests.support.metal import clang
from tests.support.metal.lint import FORBIDDEN
from tests.support.metal.report import header_file, source_file
from tests.support.metal.signature import declaration, instance, parameters
from tests.support.metal.tokens import mark_threadgroup_variables

# How an attribute is computed from msl_thread (msl/abi.h).
_ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "msl_quads(t->dispatch_threads_per_threadgroup)",
    "dispatch_simdgroups_per_threadgroup": "t->dispatch_simdgroups",
    "dispatch_threads_per_threadgroup": "msl_uint3(t->dispatch_threads_per_threadgroup)",
    "grid_origin": "uint3(0u)",
    "grid_size": "msl_uint3(t->threads_per_grid)",
    "quadgroup_index_in_threadgroup": "t->index / 4",
    "quadgroups_per_threadgroup": "msl_quads(t->threads_per_threadgroup)",
    "simdgroup_index_in_threadgroup": "t->simdgroup",
    "simdgroups_per_threadgroup": "t->simdgroups",
    "thread_execution_width": "32u",
    "thread_index_in_quadgroup": "t->index % 4",
    "thread_index_in_simdgroup": "t->lane",
    "thread_index_in_threadgroup": "t->index",
    "thread_position_in_grid": "msl_uint3(t->position_in_grid)",
    "thread_position_in_threadgroup": "msl_uint3(t->position_in_threadgroup)",
    "threadgroup_position_in_grid": "msl_uint3(t->threadgroup_position)",
    "threadgroups_per_grid": "msl_uint3(t->threadgroups_per_grid)",
    "threads_per_grid": "msl_uint3(t->threads_per_grid)",
    "threads_per_simdgroup": "32u",
    "threads_per_threadgroup": "msl_uint3(t->threads_per_threadgroup)",
}


def translation_unit(launch: Launch) -> str:
    """The generated function, and the entry point that the runtime calls for each thread."""
    kernel = launch.kernel
    arguments = []
    for i, parameter in enumerate(parameters(launch)):
        if parameter.kind == "attribute":
            arguments.append(_ATTRIBUTES[parameter.name])
        else:
            passed = "msl_reference" if parameter.by_reference else "msl_pointer"
            arguments.append(f"{passed}{{arguments[{i}]}}")
    return (
        f"#pragma GCC poison {FORBIDDEN}\n"
        f'#line 1 "{header_file(kernel)}"\n{kernel.header}\n'
        f"{declaration(launch)}"
        f'#line 1 "{source_file(kernel)}"\n{mark_threadgroup_variables(kernel.source)}\n}}\n'
        '#line 1 "entry"\n'
        'extern "C" __attribute__((no_sanitize("thread")))\n'
        "void msl_kernel(void* const* arguments, const msl_thread* t) {\n"
        f"  {instance(launch)}({', '.join(arguments)});\n"
        "}\n"
    )


@dataclass(frozen=True, slots=True)
class Variant:
    """How a kernel is compiled: see `emulate`. count: its arithmetic."""

    check: bool = True
    count: bool = False
    reversed_reductions: bool = False
    ulp_noise: int = 0
    fused_multiply_add: bool = False


def compiled(launch: Launch, variant: Variant) -> Path:
    """The library of a launch's kernel. Raises clang.CompileError."""
    flags = list(clang.CHECKED if variant.check else clang.FAST)
    flags.append(f"-ffp-contract={'fast' if variant.fused_multiply_add else 'off'}")
    if variant.reversed_reductions:
        flags.append("-DMSL_REVERSED_REDUCTIONS")
    if variant.ulp_noise:
        flags.append(f"-DMSL_ULP_NOISE={variant.ulp_noise}")
    return clang.compile_kernel(translation_unit(launch), flags, count=variant.count)
