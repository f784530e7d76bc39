"""A user's method named `package.module:Class`: what works, and one-line errors for what does not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedskew.errors import UserError
from fedskew.methods import METHODS, catalogue, find, make_method

SOURCE = """
from dataclasses import dataclass
from torch.nn.functional import cross_entropy
from fedskew.methods import Objective, Part, ServerRule, Solver, method, register

@dataclass(frozen=True)
class Sharper(Objective):
    \"\"\"Cross entropy of scaled logits.

    More about it.
    \"\"\"
    scale: float = 2.0
    def loss(self, out, y, client):
        return cross_entropy(self.scale * out.logits, y)

@method("own-halved")
@dataclass(frozen=True)
class Halved(Solver):
    def direction(self, gradient, params, client):
        return {name: g / 2 for name, g in gradient(params).items()}

both = register("own-both", parts=(Sharper, Halved), paper="", summary="Sharper and halved.")

class Lossless(Objective):
    pass

class Ruleless(ServerRule):
    pass

class Formless(Part):
    pass

@dataclass(frozen=True)
class Undecided(Objective):
    strength: float
    def loss(self, out, y, client):
        return self.strength * cross_entropy(out.logits, y)

number = 3
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_methods.py").write_text(SOURCE)
    (tmp_path / "own_thawed.py").write_text(SOURCE.replace("frozen=True", "frozen=False"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(catalogue, "METHODS", dict(METHODS))
    yield
    for name in ("own_methods", "own_thawed"):
        sys.modules.pop(name, None)


def test_a_class_is_found_by_its_module_and_composes() -> None:
    method = make_method("own_methods:Sharper+fedprox", {"scale": 3, "mu": 0.5})
    assert method.name == "own_methods:Sharper+fedprox"
    assert method.params == {"scale": 3.0, "mu": 0.5}
    assert make_method(method.name, method.params) == method
    assert find("own_methods:Sharper").summary == "Cross entropy of scaled logits."


@pytest.mark.parametrize("name", ["own_methods:own-both", "own_methods:both"])
def test_a_method_that_the_module_registers(name: str) -> None:
    method = make_method(name, {"scale": 3})
    assert method.name == name
    assert [type(part).__name__ for part in method.parts] == ["Sharper", "Halved", "Mean"]


def test_an_object_needs_no_defaults() -> None:
    find("own_methods:Sharper")
    undecided = sys.modules["own_methods"].Undecided(strength=0.5)
    assert make_method(undecided).params == {"strength": 0.5}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_method:Sharper", "cannot import 'own_method'"),
        ("own_thawed:Sharper", "cannot import 'own_thawed': TypeError: .*non-frozen"),
        ("own_methods:Sharpr", "Sharpr.*did you mean 'Sharper'"),
        ("own_methods:fedavg", "unknown method in module 'own_methods'"),
        ("own_methods:", "expected package.module:Class"),
        ("own_methods:Sharper:strength=1", "expected package.module:Class without settings"),
        ("own_methods:number", "is a int; expected a subclass of a part such as Objective"),
        ("own_methods:Formless", "Formless is not a part of a method"),
        ("own_methods:Lossless", r"Lossless has no loss\(\)"),
        ("own_methods:Ruleless", r"Ruleless has no aggregate\(\)"),
        ("own_methods:Undecided", "'strength' of Undecided has no default"),
        ("own_methods:Sharper+fedvls", "'own_methods:Sharper' and 'fedvls' both set the objective"),
    ],
)
def test_mistakes_are_one_line(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        make_method(name)
    assert "\n" not in str(error.value)


def test_an_unknown_parameter_of_a_class_is_refused() -> None:
    with pytest.raises(UserError, match="no parameter 'scael'; did you mean 'scale'"):
        make_method("own_methods:Sharper", {"scael": 1})
