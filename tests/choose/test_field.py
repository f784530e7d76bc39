"""The field of a race."""

from __future__ import annotations

import pytest

from fedskew.choose.field import BASELINE, DEFAULT_FIELD, LR_FACTORS, Candidate, field_methods, make_field
from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.methods import make_method
from fedskew.methods.fedvls import FedVLS


def test_the_default_field_has_at_least_twelve_methods_with_valid_settings() -> None:
    assert len(field_methods(None)) >= 12
    for method, settings in DEFAULT_FIELD.items():
        usual = make_method(method).params
        for params in settings:
            assert make_method(method, params).params != usual, f"{method} {params} is the default"


@pytest.mark.parametrize("settings", [0, 1, 2])
def test_every_method_has_as_many_learning_rates_as_fedavg(settings: int) -> None:
    field = make_field(field_methods(None), 0.05, settings)
    assert len(set(field)) == len(field)
    for method in DEFAULT_FIELD:
        rates = {c.lr for c in field if c.method == method and not c.params}
        assert rates == {0.05, 0.017, 0.15}
    assert len(make_field(["fedprox"], 0.05, settings)) == len(LR_FACTORS) + [0, 2, 6][settings]


@pytest.mark.parametrize("names", [["fedavg"], []])
def test_a_field_of_fedavg_alone_is_refused(names: list[str]) -> None:
    with pytest.raises(UserError, match="methods has no method besides fedavg"):
        field_methods(names)


def test_fedavg_always_takes_part() -> None:
    assert field_methods(["fedvls", "fedprox"]) == (BASELINE, "fedvls", "fedprox")
    assert field_methods(["fedavgm+fedvls"]) == (BASELINE, "fedvls+fedavgm")


@pytest.mark.parametrize("name", ["pkd", "centralised", "fedlmd-switch"])
def test_methods_in_stages_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="trains in stages"):
        field_methods([name])


def test_methods_that_a_race_would_misjudge_are_refused() -> None:
    with pytest.raises(UserError, match=r"'fedvls\+ccvr' corrects its model in the last round only"):
        field_methods(["ccvr+fedvls"])
    with pytest.raises(UserError, match="'fedper' has no global model and cannot be raced"):
        field_methods(["fedper"])
    assert field_methods(["ditto"]) == (BASELINE, "ditto")


def test_an_unknown_method_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'fedprox'"):
        field_methods(["fedproxx"])


def test_anything_but_names_is_refused() -> None:
    for wrong in ("fedvls", [FedVLS(distill_weight=5.0)], [None], 5):
        with pytest.raises(UserError, match=r"expected a list of names, for example \['fedprox', 'fedvls'\]"):
            field_methods(wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"methods has 'fedprox:mu=0\.1'; expected names without settings"):
        field_methods(["fedprox:mu=0.1"])
    assert field_methods(name for name in ["fedvls"]) == (BASELINE, "fedvls")


def test_the_configured_learning_rate_is_tried_as_it_is() -> None:
    assert [candidate.lr for candidate in make_field(["fedavg"], 0.0125, 0)] == [0.0125, 0.0042, 0.038]


def test_a_candidate_is_its_configuration() -> None:
    candidate = Candidate("fedprox", 0.2, {"mu": 0.5})
    config = candidate.config(Config())
    assert (config.method, config.method_params, config.lr) == ("fedprox", {"mu": 0.5}, 0.2)
    assert candidate.label == "fedprox (mu=0.5)"
    assert Candidate.from_json(candidate.to_json()) == candidate
    assert candidate.key != Candidate("fedprox", 0.2).key
