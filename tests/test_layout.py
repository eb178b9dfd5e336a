"""The house rules that a machine can check: imports, docstrings, and calls we do without."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted([*(ROOT / "mlxserve").rglob("*.py"), *(ROOT / "convert").rglob("*.py")])
HEAVY = (
    "mlx",
    "numpy",
    "jinja2",
    "tokenizers",
    "llguidance",
    "torch",
    "transformers",
    "typer",
    "rich",
    "huggingface_hub",
)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_imports_point_one_way():
    lint = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_import_of_the_package_loads_nothing_heavy():
    code = f"""
import sys, mlxserve, mlxserve_convert
print([name for name in {HEAVY!r} if name in sys.modules])
print(sorted(set(mlxserve.__all__) - set(dir(mlxserve)) - {{"LLM"}}))
mlxserve.LLM
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n[]\n", done.stderr


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_names_have_docstrings(path):
    tree = parse(path)
    missing = [] if not tree.body or ast.get_docstring(tree) else ["the module"]
    missing += [
        f"{node.name}, line {node.lineno}"
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not any(ast.unparse(mark) == "overload" for mark in node.decorator_list)
        and not ast.get_docstring(node)
    ]
    assert missing == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_pickle_and_no_code_from_strings(path):
    found = []
    for node in ast.walk(parse(path)):
        match node:
            case ast.Call(func=ast.Name(id="eval" | "exec" | "__import__" as name)):
                found.append(f"{name}(), line {node.lineno}")
            case ast.Import(names=names):
                found += [a.name for a in names if a.name.split(".")[0] in _PICKLES]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in _PICKLES:
                found.append(module)
    assert found == []


_PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
