"""Every notebook runs from top to bottom, and is kept without its outputs."""

from pathlib import Path

import pytest

from mlxserve.device import has_metal

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELL_TIMEOUT_S = 300
PLOTS = {"quickstart.ipynb": 1, "caches.ipynb": 5}
PRINTS = {
    "quickstart.ipynb": ["tokens in the vocabulary", "Paris"],
    "caches.ipynb": [
        "the same tokens as computed: " + ("" if has_metal() else "True"),
        "kv_bits 'plain', not '8/8'",
        "MOST USERS",
        "marmalade",
    ],
}


def read(path: Path):
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def ids(path: Path) -> str:
    return path.name


def test_each_is_known_here():
    assert sorted(PRINTS) == sorted(PLOTS) == [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_outputs_are_cleared(path):
    for cell in read(path).cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None), cell.source


def run(notebook, folder: Path) -> None:
    """Execute every cell in a kernel of this Python. Raises CellExecutionError for one that fails.

    The kernel is named by this interpreter and not by what happens to be installed on the machine.
    """
    import nbclient
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    manager = AsyncKernelManager(kernel_spec_manager=KernelSpecManager(ensure_native_kernel=True))
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(
        notebook, timeout=CELL_TIMEOUT_S, resources=resources, km=manager
    ).execute()


@pytest.mark.real
@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_every_cell_runs(path, smollm2_gguf, tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = read(path)
    run(notebook, tmp_path)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == PLOTS[path.name]
    printed = "".join(output.get("text", "") for output in outputs)
    assert [text for text in PRINTS[path.name] if text not in printed] == []


def test_a_failing_cell_fails(tmp_path):
    import nbclient
    from nbformat import v4

    notebook = v4.new_notebook(cells=[v4.new_code_cell("1 / 0")])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ZeroDivisionError"):
        run(notebook, tmp_path)
