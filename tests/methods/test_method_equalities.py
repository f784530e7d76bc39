"""A method whose strength is zero, or in a special case, equals another method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from linear_clients import COUNTS, federation, final, linear_model, played, serve, settings, theta
from torch import Tensor, nn

from fedskew.experiment.round.server import Server
from fedskew.losses import calibrated_cross_entropy
from fedskew.methods import Client, Objective, Outputs, make_method
from fedskew.methods.fedlmd import FedLMD, FedLMDTf
from fedskew.methods.fedntd import FedNTD
from fedskew.methods.fedvls import FedVLS
from fedskew.models import Classifier


@dataclass(frozen=True)
class Calibrated(Objective):
    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return calibrated_cross_entropy(out.logits, y, client.label_counts)


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize(
    ("method", "params", "other"),
    [
        ("fedprox", {"mu": 0.0}, "fedavg"),
        ("fedrs", {"alpha": 1.0}, "fedavg"),
        ("fedrs", {"alpha": 1.0, "soft": True}, "fedavg"),
        ("fedlc", {"tau": 0.0}, "fedavg"),
        ("fedntd", {"beta": 0.0}, "fedavg"),
        ("fedlmd", {"beta": 0.0}, "fedavg"),
        ("fedlmd-tf", {"beta": 0.0}, "fedavg"),
        ("fedavgm", {"server_momentum": 0.0}, "fedavg"),
        ("fedgr-server", {"gravity": 0.0}, "fedavg"),
        ("fedgr", {"gravity": 0.0}, "fedgr-client"),
        ("fedgr-client+fedgr-server", {}, "fedgr"),
        ("fedvls", {"distill_weight": 0.0, "suppress_weight": 0.0}, Calibrated()),
        ("feded", {}, "fedvls"),
        ("fedlmd-switch", {"switch_round": 0}, "fedlmd"),
        ("fedlmd-switch", {"switch_round": 2}, "fedlmd-tf"),
        ("fedlmd-switch", {"switch_round": 50}, "fedlmd-tf"),
    ],
)
def test_special_cases_equal_another_method(method: str, params: dict[str, Any], other: Any, engine: str) -> None:
    found = final(method, params, batch_size=2, engine=engine)
    np.testing.assert_allclose(found, final(other, batch_size=2, engine=engine), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    "method", ["fedprox", "fedrs", "fedlc", "fedntd", "fedlmd", "fedlmd-tf", "fedgr-server", "fedgr-client", "fedvls"]
)
def test_with_its_defaults_it_differs_from_fedavg(method: str) -> None:
    assert np.abs(final(method) - final("fedavg")).max() > 1e-6


@pytest.mark.parametrize("method", ["fedavgm", "scaffold"])
def test_server_state_has_an_effect_from_the_second_round_on(method: str) -> None:
    np.testing.assert_allclose(final(method, rounds=1), final("fedavg", rounds=1), rtol=1e-13, atol=1e-15)
    assert np.abs(final(method) - final("fedavg")).max() > 1e-6


def test_label_masking_of_even_clients_is_not_true_distillation() -> None:
    even = np.array([[2, 2, 2, 2], [3, 3, 3, 3]])
    first = final("fedlmd", federation=federation(even))
    np.testing.assert_allclose(first, final("fedntd", federation=federation(even)), rtol=1e-13)


@pytest.mark.parametrize("method", ["fedntd", "fedntd-tf", "fedlmd", "fedlmd-tf"])
def test_with_two_classes_only_cross_entropy_remains(method: str) -> None:
    two = federation(np.array([[5, 2], [0, 4], [3, 0]]))
    np.testing.assert_allclose(final(method, federation=two), final("fedavg", federation=two), rtol=1e-13, atol=1e-15)


def test_one_full_step_of_equal_clients_makes_scaffold_gradient_descent() -> None:
    """Σ_k (c − c_k) = 0: the corrections cancel in the plain mean."""
    one_step = {"local_epochs": 1, "momentum": 0.0, "weight_decay": 0.0, "average": "uniform", "rounds": 4}
    np.testing.assert_allclose(final("scaffold", **one_step), final("fedavg", **one_step), rtol=1e-12, atol=1e-14)


def test_scaffold_with_one_client_is_fedavg() -> None:
    lone = federation(COUNTS[:1])
    np.testing.assert_allclose(
        final("scaffold", federation=lone, rounds=3), final("fedavg", federation=lone, rounds=3), rtol=1e-12
    )


def test_the_switch_is_first_teacher_free_and_then_has_a_teacher() -> None:
    server = serve("fedlmd-switch", {"beta": 2.0}, rounds=5)
    states, rows = played(server)
    assert [row.stage for row in rows] == ["teacher-free"] * 2 + ["teacher"] * 3
    tf_only, _ = played(serve("fedlmd-tf", {"beta": 2.0}, rounds=5))
    np.testing.assert_array_equal(theta(states[2]), theta(tf_only[2]))
    assert np.abs(theta(states[3]) - theta(tf_only[3])).max() > 1e-6


def test_the_switch_passes_its_parameters_to_both() -> None:
    stages = make_method(
        "fedlmd-switch", {"switch_round": 3, "beta": 2.0, "temperature": 3.0, "majority_rule": "paper"}
    ).stages(10, 5, {})
    assert [stage.rounds for stage in stages] == [3, 7]
    assert [stage.objective for stage in stages] == [FedLMDTf(2.0, 3.0, "paper"), FedLMD(2.0, 3.0, "paper")]


def test_the_teachers_batch_norm_follows_the_published_programs() -> None:
    """FedVLS's teacher uses the batch's statistics, FedNTD's and FedLMD's teachers their running statistics."""
    assert FedVLS().companions() == {"teacher": "train"}
    assert FedVLS(teacher_mode="eval").companions() == {"teacher": "eval"}
    assert FedLMD().companions() == FedNTD().companions() == {"teacher": "eval"}


def test_before_training_a_teacher_agrees_with_its_student() -> None:
    """The first step of FedNTD is FedAvg's: student and teacher are still the same model."""
    one_step = {"local_epochs": 1, "rounds": 1}
    np.testing.assert_allclose(final("fedntd", **one_step), final("fedavg", **one_step), rtol=1e-12)


def test_scaffold_keeps_the_state_of_a_client_that_takes_no_step() -> None:
    """A client whose only batch is too small for BatchNorm returns the received model."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Classifier(nn.BatchNorm1d(3), linear_model().head)
    fed = federation(np.array([[5, 2, 0, 0], [0, 0, 1, 0]]))
    states, rows = played(Server(fed, make_method("scaffold"), model, settings(rounds=3)))
    last = states[-1]
    assert rows[-1].clients == [0, 1]
    assert last.models["global"].server_state["control/head.weight"].abs().max() > 0
    assert (last.clients.read("global", [1])[0]["control/head.weight"] == 0).all()


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("method", ["fedvls", "fedvls+fedsam", "fedvls+fedsmoo"])
def test_nothing_trains_a_client_with_a_single_class(method: str, engine: str, precision: str) -> None:
    """All three terms have no gradient, and sharpness-aware solvers do not amplify rounding errors."""
    fed = federation(np.array([[4, 0, 0, 0], [0, 3, 0, 0]]))
    changed = {"weight_decay": 0.0, "rounds": 3, "batch_size": 2, "engine": engine, "precision": precision}
    states, _ = played(serve(method, federation=fed, **changed))
    np.testing.assert_allclose(theta(states[-1]), theta(states[0]), rtol=0, atol=2e-7)
    assert np.abs(final("fedavg+fedsam", federation=fed, **changed) - theta(states[0])).max() > 1e-3
