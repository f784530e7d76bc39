"""`fedskew.methods()`: the catalogue as a list."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from method_cases import slow

import fedskew as fs
from fedskew.methods import METHODS


def test_all_methods_by_name() -> None:
    listed = fs.methods()
    assert [entry.name for entry in listed] == sorted(METHODS)
    assert len(listed) == len(METHODS)
    assert listed["feded"] is METHODS["fedvls"], "by alias"
    assert "feded" in listed
    assert "fedvlss" not in listed
    assert [entry.name for entry in fs.methods("fedlmd*")] == ["fedlmd", "fedlmd-switch", "fedlmd-tf"]
    assert isinstance(listed[:3], fs.MethodList)


@pytest.mark.parametrize(
    ("method", "needs"),
    [
        ("fedavg", "nothing"),
        ("fedvls", "teacher"),
        ("moon", "features, teacher, client state"),
        ("scaffold", "client state"),
        *((method, "client state") for method in ("fedper", "fedrod", "ditto")),
        ("fedbabu", "nothing"),  # its heads never change between rounds
        ("fedlaw", "server data"),
        ("fedconcat", "stages, features"),
        ("ccvr", "features"),
        *((method, "stages, features") for method in ("afl", "fed3r", "fedncm")),
    ],
)
def test_what_a_method_needs(method: str, needs: str) -> None:
    [row] = fs.methods(method).to_frame().to_dict("records")
    assert row["needs"] == needs
    assert row["reveals"] == METHODS[method].revealed
    assert row["sends"] == METHODS[method].sends


def test_a_table_in_the_terminal_and_in_a_notebook() -> None:
    lines = repr(fs.methods("fedlmd*")).splitlines()
    assert lines[0].split() == ["name", "paper", "needs", "reveals"]
    assert lines[1].startswith("fedlmd ")
    html = fs.methods("fedlmd*")._repr_html_()
    assert html.count("<tr>") == 4
    assert "<td>fedlmd-tf</td>" in html
    assert repr(fs.methods("nothing-like-it")) == "no methods"


def test_a_misspelt_name_gets_one_line() -> None:
    with pytest.raises(fs.UserError, match="did you mean 'fedvls'"):
        _ = fs.methods()["fedvsl"]


def test_an_empty_list_has_no_table() -> None:
    with pytest.raises(fs.UserError, match="the list has no methods; a table needs at least one"):
        fs.methods("fedlmd*")[:0].to_frame()


def test_without_pandas_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(fs.UserError, match=r"a DataFrame needs pandas: pip install pandas"):
        fs.methods().to_frame()


@pytest.mark.parametrize("first", ["fs.methods()", *slow("import fedskew.methods", "from fedskew.methods import pack")])
def test_the_function_and_the_package_share_a_name(first: str) -> None:
    script = f"import fedskew as fs\n{first}\nimport fedskew.methods as package\n"
    script += "assert len(fs.methods()) == len(package.METHODS) == len(fs.methods.METHODS)"
    done: Any = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
