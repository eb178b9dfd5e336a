"""Print the files over 400 lines and the functions over 60: `python -m tests.support.sizes`.

A question to the author rather than a rule, so it never fails.
"""

import ast
from pathlib import Path

FILE_LINES = 400
FUNCTION_LINES = 60


def main() -> None:
    """Print them, largest first."""
    found: list[tuple[int, str]] = []
    for path in sorted([*Path("mlxserve").rglob("*.py"), *Path("convert").rglob("*.py")]):
        text = path.read_text(encoding="utf-8")
        if (lines := text.count("\n")) > FILE_LINES:
            found.append((lines, str(path)))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    found.append((lines, f"{path}:{node.lineno} {node.name}"))
    for lines, where in sorted(found, reverse=True):
        print(f"large: {where}, {lines} lines")


if __name__ == "__main__":
    main()
