"""The public names of `fedskew`: the lazy imports, the imports that editors see and the modules agree."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import fedskew as fs
from fedskew.data import PARTITIONS


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
