"""Execute the notebooks in examples/ and save their outputs.

    python tools/execute_notebooks.py                        # all of them
    python tools/execute_notebooks.py hospital-table.ipynb   # one

Each runs in an empty temporary folder, so it must not depend on files of the repository.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parent.parent / "examples"
SECONDS_PER_CELL = 900
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def execute(path: Path) -> nbformat.NotebookNode:
    """Return the executed notebook. Raises an error if a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=SECONDS_PER_CELL, record_timing=False, resources=resources).execute()
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = _tidy(cell.outputs, folder)
    notebook.metadata.pop("language_info", None)  # the exact version of Python, which changes nothing
    return notebook


def _tidy(outputs: list[nbformat.NotebookNode], folder: str) -> list[nbformat.NotebookNode]:
    """Join the pieces of a stream, and remove terminal colours and the temporary folder's name from them."""
    tidy: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.output_type != "stream":
            tidy.append(output)
            continue
        output.text = COLOUR.sub("", output.text).replace(f"{folder}/", "")
        if tidy and tidy[-1].output_type == "stream" and tidy[-1].name == output.name:
            tidy[-1].text += output.text
        else:
            tidy.append(output)
    return tidy


def main(names: list[str]) -> None:
    for path in [EXAMPLES / name for name in names] or sorted(EXAMPLES.glob("*.ipynb")):
        executed = execute(path)
        nbformat.write(executed, path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
