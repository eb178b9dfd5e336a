"""Counts arithmetic: adds to each basic block of a kernel's LLVM code a sum of its operations."""

import re

COUNTER = "msl_arithmetic"

_OPERATION = re.compile(
    r"^  %\S+ = (?:(?:tail |musttail |notail )?call\b[^@]*@(?P<function>[\w.]+)\("
    r"|(?:fadd|fsub|fmul|fdiv)\b)"
)
_FUSED = re.compile(r"llvm\.(?:fma|fmuladd)\.")
_FUNCTION = re.compile(
    r"(?:llvm\.)?(?:exp2?|exp10|log2?|log10|pow|sqrt|sin|cos|tan|sinh|cosh|tanh|atan2?|asin|acos)"
    r"(?:f|\.\w+)?$"
)
_WIDTH = re.compile(r"<(\d+) x (?:float|half|double)>")
# A GPU reduces a simdgroup by itself; that every lane does it here isn't the kernel's arithmetic.
_UNCOUNTED = re.compile(r"^define .*@\S*(?:msl_reduce|msl_scan)")


def count_arithmetic(code: str) -> str:
    """LLVM code that adds the operations that it executes to the runtime's counter.

    An addition, subtraction, multiplication or division of floats is one, a fused multiply-add two,
    a call of exp and the like one; of a vector, as many as it has elements.
    """
    written: list[str] = []
    counted = False
    first, operations = 0, 0  # of the present block: the line behind its first operation, their sum

    def close_block() -> None:
        nonlocal operations
        if operations:
            name = f"%{COUNTER}.{first}"
            written[first:first] = [
                f"  {name} = load i64, ptr @{COUNTER}",
                f"  {name}.new = add i64 {name}, {operations}",
                f"  store i64 {name}.new, ptr @{COUNTER}",
            ]
        operations = 0

    for line in code.splitlines():
        if line.startswith("define "):
            counted = not _UNCOUNTED.match(line)
        elif not line.startswith(" "):  # a label, or the end of a function
            close_block()
        written.append(line)
        if counted and (found := _operations(line)):
            first = first if operations else len(written)
            operations += found
    written.append(f"@{COUNTER} = external hidden global i64")
    return "\n".join(written) + "\n"


def _operations(line: str) -> int:
    match = _OPERATION.match(line)
    if not match:
        return 0
    each = 1
    if function := match["function"]:
        if _FUSED.match(function):
            each = 2
        elif not _FUNCTION.match(function):
            return 0
    width = _WIDTH.search(line)
    return each * (int(width[1]) if width else 1)
