"""Methods joined by + and their parameters."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
from linear_clients import played, serve

from fedskew.errors import UserError
from fedskew.methods import (
    METHODS,
    Method,
    ServerRule,
    Tensors,
    Updates,
    canonical_name,
    combined_entry,
    find,
    make_method,
)
from fedskew.methods.catalogue import _ALIASES, register
from fedskew.methods.composition import slot_name
from fedskew.methods.fedlmd import FedLMD, FedLMDTf
from fedskew.methods.fedprox import FedProx
from fedskew.methods.fedvls import FedVLS

BOUNDS = [name for name, entry in METHODS.items() if entry.stands_alone]
CLOSED_FORMS = [name for name, entry in METHODS.items() if not entry.trains_clients]
PAIRS = list(itertools.combinations((name for name in METHODS if name not in (*BOUNDS, *CLOSED_FORMS)), 2))


def clash(first: str, second: str) -> set[str]:
    return {slot_name(part) for part in find(first).parts} & {slot_name(part) for part in find(second).parts}


def is_staged_and_personal(first: str, second: str) -> bool:
    kinds = {*find(first).kinds, *find(second).kinds}
    return "personal part" in kinds and bool(kinds & {"stages", "calibration"})


def set_stages_twice(first: str, second: str) -> bool:
    return {"stages", "calibration"} <= {*find(first).kinds, *find(second).kinds}


@pytest.mark.parametrize(("first", "second"), [pair for pair in PAIRS if clash(*pair)])
def test_two_parts_of_one_kind_are_refused_by_name(first: str, second: str) -> None:
    with pytest.raises(UserError) as refusal:
        make_method(f"{first}+{second}")
    message = str(refusal.value)
    assert f"{first!r} and {second!r}" in message
    assert any(f"both set the {slot}" in message for slot in clash(first, second))


STAGED_AND_PERSONAL = [pair for pair in PAIRS if is_staged_and_personal(*pair) and not clash(*pair)]


@pytest.mark.parametrize(("first", "second"), STAGED_AND_PERSONAL)
def test_stages_and_personal_parts_are_refused_by_name(first: str, second: str) -> None:
    with pytest.raises(UserError, match="runs in stages") as refusal:
        make_method(f"{first}+{second}")
    assert repr(first) in str(refusal.value)
    assert repr(second) in str(refusal.value)


@pytest.mark.parametrize(("first", "second"), [pair for pair in PAIRS if set_stages_twice(*pair)])
def test_stages_and_a_calibration_are_refused_by_name(first: str, second: str) -> None:
    with pytest.raises(UserError, match=f"'{first}' and '{second}' both set the stages of a run"):
        make_method(f"{first}+{second}")


def have_different_heads(first: str, second: str) -> bool:
    entries = find(first), find(second)
    return any(entry.head for entry in entries) and any(entry.needs_linear_head for entry in entries)


REFUSALS = clash, is_staged_and_personal, set_stages_twice, have_different_heads
COMBINING = [pair for pair in PAIRS if not any(refuses(*pair) for refuses in REFUSALS)]


@pytest.mark.parametrize(("first", "second"), COMBINING)
def test_parts_of_different_kinds_combine_in_any_order(first: str, second: str) -> None:
    one, other = make_method(f"{first}+{second}"), make_method(f"{second}+{first}")
    assert one == other
    assert sorted(one.name.split("+")) == sorted({first, second} - {"fedavg"})
    for name in (first, second):
        for part in make_method(name).parts:
            if type(part) in find(name).parts:
                assert part in one.parts


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("fpl+fedvls", "fedvls+fpl"),
        ("fedexp+fedsam+feded", "fedvls+fedsam+fedexp"),
        ("fedavgm+fedprox+fedlmd", "fedlmd+fedprox+fedavgm"),
        ("pfedme+fedvls", "fedvls+pfedme"),
        ("fedsam+fedmr+pkd", "pkd+fedmr+fedsam"),
        ("fedavg+fedprox", "fedprox"),
        ("fedavgm+feddisco+fedprox", "fedprox+feddisco+fedavgm"),
        ("fedavg", "fedavg"),
    ],
)
def test_a_combination_has_one_name_objective_regulariser_solver_server(given: str, name: str) -> None:
    assert make_method(given).name == canonical_name(given) == combined_entry(given).name == name


def test_the_canonical_name_of_an_invalid_combination_is_itself() -> None:
    assert canonical_name("fedvls+fedlmd") == "fedvls+fedlmd"
    assert canonical_name("fedvls+nonsense") == "fedvls+nonsense"


@pytest.mark.parametrize("bound", BOUNDS)
def test_nothing_is_combined_with_a_bound(bound: str) -> None:
    for name in METHODS:
        for both in (f"{bound}+{name}", f"{name}+{bound}"):
            with pytest.raises(UserError, match="is a reference bound, not a federated method"):
                make_method(both)


def test_a_method_cannot_be_combined_with_itself() -> None:
    with pytest.raises(UserError, match="'fedvls' and 'fedvls' both set the objective"):
        make_method("fedvls+feded")


@pytest.mark.parametrize("method", ["fedlmd+fedprox+fedavgm", "pkd+scaffold", "fedvls+scaffold", "fedgr+fedprox"])
@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_a_combination_runs(method: str, engine: str) -> None:
    states, rows = played(serve(method, engine=engine, clients_per_round=2))
    assert all(row.diverged == [] for row in rows)
    assert states[-1].model.params["head.weight"].isfinite().all()


def test_a_combination_takes_each_parts_parameters() -> None:
    method = make_method("fedlmd+fedprox+fedavgm", {"beta": 2, "mu": 0.5, "server_momentum": 0.9})
    assert method.params["beta"] == 2.0
    assert method.params["mu"] == 0.5
    assert method.params["server_momentum"] == 0.9
    assert method.params["temperature"] == 1.0


def test_spaces_and_capitals_do_not_matter() -> None:
    assert make_method(" FedLMD + FedProx").name == "fedlmd+fedprox"


@pytest.mark.parametrize("name", ["", "fedvls+", "+fedvls", "fedvls++fedprox"])
def test_a_missing_name_is_an_unknown_method(name: str) -> None:
    with pytest.raises(UserError, match="unknown method ''"):
        make_method(name)


# -- parameters -------------------------------------------------------------------------------------------


def test_an_unknown_parameter_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no parameter 'distil_weight'; did you mean 'distill_weight'\?"):
        make_method("fedvls", {"distil_weight": 0.5})


def test_a_method_without_parameters_says_so() -> None:
    with pytest.raises(UserError, match="no parameter 'zzz'; its parameters: none"):
        make_method("fedavg", {"zzz": 1})


def test_a_parameter_of_another_part_is_refused() -> None:
    with pytest.raises(UserError, match=r"no parameter 'fedprox\.beta'"):
        make_method("fedlmd+fedprox", {"fedprox.beta": 1.0})


def test_a_parameter_can_name_its_part() -> None:
    assert make_method("fedlmd+fedprox", {"fedprox.mu": 0.3}).solver == FedProx(mu=0.3)
    assert make_method("fedlmd+fedprox", {"solver.mu": 0.3}).solver == FedProx(mu=0.3)
    assert make_method("fedvls", {"feded.distill_weight": 0.3}).objective == FedVLS(distill_weight=0.3)


@pytest.mark.parametrize(
    ("method", "params", "message"),
    [
        ("fedprox", {"mu": "much"}, "parameter 'mu' is 'much'; expected a finite number"),
        ("fedprox", {"mu": True}, "parameter 'mu' is True; expected a finite number"),
        ("fedprox", {"mu": None}, "parameter 'mu' is None; expected a finite number"),
        ("fedprox", {"mu": float("inf")}, "parameter 'mu' is inf; expected a finite number"),
        ("fedprox", {"mu": float("nan")}, "parameter 'mu' is nan; expected a finite number"),
        ("fedprox", {"mu": 10**400}, "; expected a finite number"),
        ("fedrs", {"soft": 1}, "parameter 'soft' is 1; expected true or false"),
        ("pkd", {"warmup_rounds": 2.5}, "parameter 'warmup_rounds' is 2.5; expected a whole number"),
        ("pkd", {"warmup_rounds": True}, "parameter 'warmup_rounds' is True; expected a whole number"),
        ("pkd", {"groups": 3}, "parameter 'groups' is 3; expected a list"),
        ("pkd", {"groups": [0, 6]}, "parameter 'groups' is 0; expected a list"),
        ("pkd", {"groups": [["a", "b"]]}, "parameter 'groups' is 'a'; expected a whole number"),
        ("fedvls", {"suppress_variant": "papper"}, "expected one of 'lade', 'paper'; did you mean 'paper'?"),
        ("fedlmd", {"majority_rule": 7}, "parameter 'majority_rule' is 7; expected one of 'code', 'paper'"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(method: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        make_method(method, params)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("method", "name", "value"),
    [
        ("fedprox", "mu", -0.1),
        ("fedrs", "alpha", 1.5),
        ("fedrs", "alpha", -0.1),
        ("fedlc", "tau", -1.0),
        ("fedntd", "beta", -1.0),
        ("fedntd", "temperature", 0.0),
        ("fedlmd", "beta", -1.0),
        ("fedlmd-tf", "temperature", -1.0),
        ("fedlmd-switch", "switch_round", -1),
        ("fedvls", "distill_weight", -0.1),
        ("fedvls", "suppress_weight", -0.1),
        ("fedgr", "gravity", -0.5),
        ("fedavgm", "server_momentum", 1.0),
        ("fedavgm", "server_momentum", -0.1),
        ("fedavgm", "server_lr", 0.0),
        ("scaffold", "server_lr", 0.0),
        ("pkd", "temperature", 0.0),
        ("pkd", "distill_weight", -1.0),
        ("pkd", "warmup_rounds", 0),
        ("pkd", "expert_rounds", 0),
        ("pkd", "expert_epochs", 0),
        ("pkd", "expert_epochs", -2),
    ],
)
def test_a_value_out_of_range_is_refused(method: str, name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{name} is {value!r}; expected a"):
        make_method(method, {name: value})


def test_numbers_that_yaml_reads_as_text_or_integers_are_converted() -> None:
    assert make_method("fedprox", {"mu": "1e-3"}).params["mu"] == 0.001
    mu = make_method("fedprox", {"mu": 1}).params["mu"]
    assert isinstance(mu, float)
    assert make_method("fedlmd-switch", {"switch_round": None}).params["switch_round"] is None


# -- objects ----------------------------------------------------------------------------------------------


def test_an_object_is_a_method() -> None:
    assert make_method(FedVLS(distill_weight=0.5)) == make_method("fedvls", {"distill_weight": 0.5})
    assert make_method(FedLMDTf()).name == "fedlmd-tf"
    given = Method("mine", objective=FedLMD(), solver=FedProx())
    assert make_method(given) is given


def test_parameters_are_not_for_objects() -> None:
    for given in (FedLMD(), make_method("fedlmd")):
        with pytest.raises(UserError, match="'beta' was given with a method object; set it on the object"):
            make_method(given, {"beta": 2.0})


@pytest.mark.parametrize("given", [FedVLS, 3, None])
def test_an_object_that_is_not_a_method_is_refused(given: Any) -> None:
    with pytest.raises(UserError, match="expected a name, or an object such as"):
        make_method(given)


# -- a name that two parts share --------------------------------------------------------------------------


@pytest.fixture
def damped() -> Any:
    @dataclass(frozen=True)
    class Damped(ServerRule):
        beta: float = 0.5

        def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
            return {name: w + self.beta * (updates.mean()[name] - w) for name, w in sent.items()}, state

    yield register("damped", "slow", parts=(Damped,), paper="-", summary="-")
    del METHODS["damped"], _ALIASES["slow"]


def test_a_shared_parameter_name_must_say_which_part_is_meant(damped: object) -> None:
    with pytest.raises(UserError, match=r"'beta' belongs to fedlmd and damped; write fedlmd\.beta"):
        make_method("fedlmd+damped", {"beta": 0.1})
    method = make_method("fedlmd+damped", {"fedlmd.beta": 3.0, "slow.beta": 0.25})
    assert method.params["objective.beta"] == 3.0
    assert method.params["server.beta"] == 0.25


def test_two_parts_of_one_method_are_told_apart_by_their_slots(damped: Any) -> None:
    loss, rule = find("fedlmd").parts[0], damped.parts[0]
    register("damped-lmd", parts=(loss, rule), paper="-", summary="-")
    try:
        with pytest.raises(UserError, match=r"'beta' belongs to damped-lmd and damped-lmd; write objective\.beta"):
            make_method("damped-lmd", {"beta": 0.1})
        assert make_method("damped-lmd", {"objective.beta": 3.0}).params["objective.beta"] == 3.0
    finally:
        del METHODS["damped-lmd"]


def test_shared_parameter_names_survive_saving_and_loading(damped: object) -> None:
    method = make_method("fedlmd+damped", {"fedlmd.beta": 3.0, "damped.beta": 0.25})
    assert make_method(method.name, method.params) == method


@pytest.mark.parametrize("solver", ["fedacg", "fedlesam"])
def test_the_entry_of_a_combination_counts_the_gradient_of_its_personal_layers(solver: str) -> None:
    entry = combined_entry(f"{solver}+fedper")
    assert entry.extra_compute.endswith("1 forward and backward for the personal layers")
    assert not entry.example_privacy, "a run with it is refused"
    assert "personal" not in combined_entry(f"{solver}+fedrep").extra_compute
    assert combined_entry(solver).example_privacy
    assert combined_entry("fedper+fedprox").example_privacy
