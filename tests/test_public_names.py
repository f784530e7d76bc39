"""The public names of `fedskew`: the lazy imports, the imports that editors see and the modules agree."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedskew as fs
from fedskew.data import PARTITIONS
from fedskew.data.own.arrays import load_npz
from fedskew.data.own.table_files import csv_table
from fedskew.data.own.tables import load_tables
from fedskew.experiment.config.documentation import setting_names


def names_that_type_checkers_see() -> dict[str, str]:
    """The imports under `if TYPE_CHECKING`, by name."""
    tree = ast.parse(Path(fs.__file__).read_text(encoding="utf-8"))
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in guarded.body if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for node in imports for alias in node.names), "`as` makes a name public"
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_type_checkers_and_the_lazy_import_agree() -> None:
    assert names_that_type_checkers_see() == fs._MODULES


@pytest.mark.parametrize("name", fs.__all__)
def test_every_name_is_there_and_has_a_docstring(name: str) -> None:
    value = getattr(fs, name)
    assert name in dir(fs)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert inspect.getdoc(value)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Dirichlett'"):
        _ = fs.Dirichlett


def test_star_import_and_completion_do_not_import_torch() -> None:
    script = "import sys, fedskew; assert 'Dirichlet' in dir(fedskew); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_rule_is_a_class_under_partitions() -> None:
    rules = {rule for rule in PARTITIONS.values() if rule.__module__.startswith("fedskew.")}
    assert {getattr(fs.partitions, name) for name in fs.partitions.__all__} == rules
    assert fs.partitions.DomainDirichlet(clients=4).name == "domain-dirichlet"


def test_dir_lists_all_public_names_and_nothing_else() -> None:
    listed = [name for name in dir(fs) if not name.startswith("__")]
    assert listed == sorted(fs.__all__)


@pytest.mark.parametrize(
    ("function", "left_out"), [(fs.run, ()), (fs.compare, ("seed",)), (fs.choose, ("eval_every", "eval_local"))]
)
def test_docstrings_name_every_parameter_and_every_setting_with_its_default(
    function: Any, left_out: tuple[str, ...]
) -> None:
    document = inspect.getdoc(function) or ""
    for name in inspect.signature(function).parameters:
        assert re.search(rf"\b{name}\b", document), name
    for name in setting_names(*left_out, *inspect.signature(function).parameters):
        assert f"\n    {name}={getattr(fs.Config(), name)!r}: " in document


def test_the_docstring_of_choose_lists_the_model_as_a_setting() -> None:
    assert "\n    model='auto': " in (inspect.getdoc(fs.choose) or "")


@pytest.mark.parametrize("name", [name for name in fs.__all__ if inspect.isfunction(getattr(fs, name))])
def test_docstrings_of_functions_name_every_parameter(name: str) -> None:
    function = getattr(fs, name)
    document = inspect.getdoc(function) or ""
    for parameter in inspect.signature(function).parameters:
        assert re.search(rf"\b{parameter}\b", document), parameter


def test_the_options_of_load_are_all_listed() -> None:
    listed = inspect.getdoc(fs.load) or ""
    for loader in (load_tables, load_npz, csv_table):
        for parameter in inspect.signature(loader).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY or parameter.name in ("delimiter", "decimal"):
                assert re.search(rf"\b{parameter.name}\b", listed), parameter.name


def test_config_lists_its_keys() -> None:
    assert all(f"\n    {name}={getattr(fs.Config(), name)!r}: " in str(fs.Config.__doc__) for name in setting_names())
