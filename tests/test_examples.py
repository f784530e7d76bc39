"""The notebooks in examples/: their committed outputs are real and small, and every cell still runs."""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install fedskew[dev]")
pytest.importorskip("nbclient", reason="nbclient is not installed: pip install fedskew[dev]")
REPOSITORY = Path(__file__).parents[1]
NOTEBOOKS = sorted((REPOSITORY / "examples").glob("*.ipynb"))
MAX_BYTES = 300_000
SLOW = {"images-own-method.ipynb", "simulation-to-federation.ipynb"}
"""Notebooks with many runs, or with a server and three sites. `make test` checks their committed outputs only."""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_committed_notebook_was_executed_from_top_to_bottom(path: Path) -> None:
    assert path.stat().st_size < MAX_BYTES
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert len(outputs) >= 5
    assert not any(output.output_type == "error" for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] if path.name in SLOW else [], id=path.name) for path in NOTEBOOKS],
)
def test_every_cell_runs(path: Path) -> None:
    if "federation" in path.name and find_spec("flwr") is None:
        pytest.skip("Flower is not installed: pip install fedskew[flower]")
    execute = runpy.run_path(str(REPOSITORY / "tools/execute_notebooks.py"))["execute"]
    kinds = [[output.output_type for output in cell.get("outputs", ())] for cell in execute(path).cells]
    committed = nbformat.read(path, as_version=4)
    assert kinds == [[output.output_type for output in cell.get("outputs", ())] for cell in committed.cells]
