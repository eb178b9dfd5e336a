"""What Metal's compiler refuses and C++'s doesn't: address spaces, and what came after C++14."""

import re

import mlx.core as mx

from mlxserve.kernels.metal.launch import Kernel, Launch
from tests.support.metal import clang, signature
from tests.support.metal.report import Finding, code_at, compiler_findings, header_file, source_file
from tests.support.metal.tokens import (
    mark_threadgroup_variables,
    threadgroup_variables,
    unqualified_pointers,
)

# Metal has none of these; std is C++'s library.
FORBIDDEN = (
    "double std goto new delete asm throw try catch malloc free printf dynamic_cast typeid virtual "
    "wchar_t"
)
_FLAGS = (
    *("-std=c++14", "-Wno-everything", "-Wc++17-extensions", "-Wc++20-extensions", "-Wvla"),
    "-Wreturn-type",
    *("-Wuninitialized", "-Wconditional-uninitialized", "-Xclang", "-cl-single-precision-constant"),
)
_ALLOWED = (
    # Metal's compiler takes it with a warning, and MLX's own kernels are full of it.
    "constexpr if is a C++17 extension",
    # Metal copies a structure between any address spaces.
    "(the implicit copy ",
)
_VECTOR = re.compile(
    r"\b(?:(?:bool|u?(?:char|short|int|long)|half|float|bfloat)[234]"
    r"|(?:metal::)?vec<[^<>]*(?:<[^<>]*>)?[^<>]*>)(?=\s*\()"
)
_ALIAS = re.compile(r"\busing\s+(\w+)\s*=\s*(?:metal::)?vec<")


def lint(launch: Launch) -> list[Finding]:
    """The findings about a kernel's text, as it is compiled for a launch."""
    return [
        *_pointer_findings(launch),
        *_variable_findings(launch.kernel),
        *_cast_findings(launch),
        *_compiled(launch),
    ]


def _pointer_findings(launch: Launch) -> list[Finding]:
    kernel = launch.kernel
    types = {name for name, value in launch.template if isinstance(value, mx.Dtype)}
    return [
        _finding(kernel, file, token.line, f"pointer or reference to {token.text} without a space")
        for file, text in (
            (header_file(kernel), kernel.header),
            (source_file(kernel), kernel.source),
        )
        for token in unqualified_pointers(text, types)
    ]


def _variable_findings(kernel: Kernel) -> list[Finding]:
    return [
        _finding(
            kernel,
            header_file(kernel),
            token.line,
            "threadgroup variable outside of the kernel body",
        )
        for token in threadgroup_variables(kernel.header)
    ]


def _cast_findings(launch: Launch) -> list[Finding]:
    """Casts of a parameter to the space that it isn't in, which only clang lets pass.

    MLX decides by an array's size, so a kernel may compile for one launch and not for another.
    """
    kernel = launch.kernel
    found = []
    for parameter in signature.parameters(launch):
        other = {"constant": "device", "device": "constant"}.get(parameter.space)
        if other is None:
            continue
        cast = rf"\(\s*(?:const\s+)?{other}\b[^()]*\*\s*\)\s*\(*\s*{parameter.name}\b"
        for match in re.finditer(cast, kernel.source):
            line = kernel.source.count("\n", 0, match.start()) + 1
            message = f"{parameter.name} is in the {parameter.space} space here, cast to {other}"
            found.append(_finding(kernel, source_file(kernel), line, message))
    return found


def _compiled(launch: Launch) -> list[Finding]:
    kernel = launch.kernel
    declaration = re.sub(r" \[\[.*?\]\]", "", signature.declaration(launch))
    text = (
        f'#include "msl/address_spaces.h"\n#pragma GCC poison {FORBIDDEN}\n'
        f'#line 1 "{header_file(kernel)}"\n{_with_vectors(kernel.header)}\n'
        f'{declaration}\n#line 1 "{source_file(kernel)}"\n'
        f"{_with_vectors(mark_threadgroup_variables(kernel.source))}\n}}\n"
    )
    if launch.template:
        text += f"template decltype({signature.instance(launch)}) {signature.instance(launch)};\n"
    printed = clang.check_syntax(text, _FLAGS)
    return [
        finding
        for finding in compiler_findings(kernel, printed)
        if not any(allowed in finding.message for allowed in _ALLOWED)
    ]


def _finding(kernel: Kernel, file: str, line: int, message: str) -> Finding:
    where = f"{file}:{line}"
    return Finding("compile", message, where, code_at(kernel, where))


def _with_vectors(text: str) -> str:
    """float4(a, b) and the like as msl_make<float4>(a, b): see address_spaces.h."""
    text = _VECTOR.sub(lambda match: f"msl_make<{match[0]}>", text)
    for alias in set(_ALIAS.findall(text)):
        text = re.sub(rf"\b{alias}(?=\s*\()", f"msl_make<{alias}>", text)
    return text
