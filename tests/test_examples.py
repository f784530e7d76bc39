"""The notebooks in examples/: their committed outputs are real and small, and every cell still runs."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install fedskew[dev]")
pytest.importorskip("nbclient", reason="nbclient is not installed: pip install fedskew[dev]")
REPOSITORY = Path(__file__).parents[1]
NOTEBOOKS = sorted((REPOSITORY / "examples").glob("*.ipynb"))
MAX_BYTES = 300_000
RUN_HERE = REPOSITORY / "examples" / "hospital-table.ipynb"
"""The notebook whose cells `make test` runs in its own process. A kernel, and other notebooks, take much longer."""


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


def test_the_code_of_a_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    names: dict[str, object] = {}
    try:
        for cell in nbformat.read(RUN_HERE, as_version=4).cells:
            if cell.cell_type == "code":
                exec(compile(cell.source, RUN_HERE.name, "exec"), names)
    finally:
        sys.modules.pop("model", None)  # the exported code, which the last cell imports
    assert {"race", "chosen", "exported"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_every_cell_runs(path: Path) -> None:
    if "federation" in path.name and find_spec("flwr") is None:
        pytest.skip("Flower is not installed: pip install fedskew[flower]")
    execute = runpy.run_path(str(REPOSITORY / "tools/execute_notebooks.py"))["execute"]
    kinds = [[output.output_type for output in cell.get("outputs", ())] for cell in execute(path).cells]
    committed = nbformat.read(path, as_version=4)
    assert kinds == [[output.output_type for output in cell.get("outputs", ())] for cell in committed.cells]
