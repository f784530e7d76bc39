"""Which runs belong to one setting, and how methods and settings are named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fedskew.experiment.config import Config, config_hash, with_values
from fedskew.methods import make_method
from fedskew.results.naming import labels, setting_label, to_key, varied_keys


def test_saved_predictions_do_not_make_another_setting() -> None:
    assert varied_keys([Config(), Config(save_predictions=True)]) == []
    assert varied_keys([Config(lr=0.1), Config(lr=0.2, save_predictions=True)]) == ["lr"]


def test_the_same_weights_at_another_path_do_not_make_another_setting() -> None:
    here, there = (Config(init=f"{folder}/w.pt", init_sha256="0f" * 32) for folder in ("here", "there"))
    assert varied_keys([here, there]) == []
    assert varied_keys([Config(init="here/w.pt"), Config(init="there/w.pt")]) == ["init"]  # before a run has read them


def test_other_weights_at_the_same_path_make_another_setting_that_names_path_and_digest() -> None:
    first, second = (Config(init="w.pt", init_sha256=digest * 32) for digest in ("0f", "a1"))
    assert varied_keys([first, second, Config()]) == ["init"]
    assert setting_label(first, ["init"]) == "init=w.pt (sha256:0f0f0f0f0f0f)"
    assert setting_label(Config(), ["init"]) == "init=None"


def test_a_whole_number_is_the_same_value_with_and_without_a_decimal_point() -> None:
    whole, decimal = (with_values(Config(), {"partition": "dirichlet", "partition.beta": beta}) for beta in (1, 1.0))
    assert config_hash(whole) == config_hash(decimal)
    assert varied_keys([whole, decimal]) == []
    assert to_key({"a": [1, (2,)]}) == to_key({"a": [1.0, [2.0]]}) != to_key({"a": [1, [2.5]]})


def resolved(method: str, **params: Any) -> Config:
    """A configuration as a run records it: with all parameters of the method."""
    return Config(method=method, method_params=make_method(method, params).params)


def test_one_variant_is_named_by_the_parameters_that_are_not_its_defaults() -> None:
    found = [resolved("fedavg"), resolved("fedprox", mu=1.0), resolved("fedvls", distill_weight=0.5)]
    assert labels(found) == ["fedavg", "fedprox (mu=1.0)", "fedvls (distill_weight=0.5)"]
    assert labels([resolved("fedprox"), resolved("fedvls+fedprox")]) == ["fedprox", "fedvls+fedprox"]


def test_variants_are_named_by_what_differs_and_by_what_they_share_if_it_is_not_a_default() -> None:
    weights = [resolved("fedvls", distill_weight=weight, suppress_weight=0.0) for weight in (0.1, 0.5)]
    assert labels(weights) == [
        "fedvls (distill_weight=0.1, suppress_weight=0.0)",
        "fedvls (distill_weight=0.5, suppress_weight=0.0)",
    ]


def test_parameters_of_unknown_methods_are_shown_only_if_they_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method object of the user's program, a module that is gone, and one whose class cannot be made."""
    (tmp_path / "broken_method.py").write_text(
        "import fedskew as fs\n\nclass Broken(fs.Regulariser):\n    def __init__(self): raise ValueError('gone')\n"
        "    def term(self, *args): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    for name in ("MyMethod", "no_such_module:Mine", "broken_method:Broken"):
        one, other = (Config(method=name, method_params={"a": a, "b": 1}) for a in (1, 2))
        assert labels([one]) == [name]
        assert labels([one, other]) == [f"{name} (a=1)", f"{name} (a=2)"]


def test_a_table_does_not_import_a_user_s_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run folder may be somebody else's."""
    (tmp_path / "unseen_method.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    named = Config(method="fedavg+unseen_method:Mine", method_params={"strength": 0.1})
    assert labels([named]) == ["fedavg+unseen_method:Mine"]
    assert "unseen_method" not in sys.modules


def test_a_list_in_yaml_is_the_same_as_a_default_tuple() -> None:
    layers = [*make_method("fedper").params["layers"]]
    assert labels([Config(method="fedper", method_params={"layers": layers})]) == ["fedper"]
