"""What a round costs in computation, in rounds of FedAvg."""

from __future__ import annotations

import pytest
from toy_runs import image_federation, linear, linear_layers, norm_and_dropout, trained

PKD = {"groups": [[0, 3], [1, 2]], "warmup_rounds": 1, "expert_rounds": 2}
ENGINES = pytest.mark.parametrize("engine", ["plain", "stacked"])


@ENGINES
@pytest.mark.parametrize(
    ("method", "units"), [("fedavg", 1), ("fedvls", 4 / 3), ("fedlmd", 4 / 3), ("fedlmd-tf", 1), ("scaffold", 1)]
)
def test_compute_in_rounds_of_fedavg(method: str, units: float, engine: str) -> None:
    _, rows = trained(image_federation(), method, linear(), engine=engine, clients_per_round=3)
    assert [row.compute for row in rows] == pytest.approx([units, units])


@ENGINES
@pytest.mark.parametrize(
    ("method", "units"),
    [("fedper", 1), ("fedper+fedprox", 1), ("fedper+fedacg", 2), ("fedper+fedlesam", 2), ("fedper+fedsam", 2)],
)
def test_compute_counts_a_gradient_that_only_personal_layers_need(method: str, units: float, engine: str) -> None:
    """FedACG and FedLESAM compute no gradient at the current parameters, along which personal layers step."""
    _, rows = trained(image_federation(), method, linear_layers(), engine=engine)
    assert [row.compute for row in rows] == pytest.approx([units, units])


def test_compute_of_pkd_as_the_paper_counts_it() -> None:
    federation = image_federation()
    total = int(federation.sizes.sum())
    epochs, expert_epochs = 2, 3
    params = {**PKD, "expert_epochs": expert_epochs}
    _, rows = trained(federation, "pkd", linear(), params, rounds=3, local_epochs=epochs)
    of_stage = {row.stage: row for row in rows}
    assert of_stage["warm-up"].compute == pytest.approx(1)
    for stage, group in (("expert 0", (0, 3)), ("expert 1", (1, 2))):
        owned = int(federation.restrict(group).sizes.sum())
        assert of_stage[stage].compute == pytest.approx(expert_epochs / epochs * owned / total)
    for row in rows[-2:]:
        assert 0 < row.tally["distilled"] < row.visits
        assert row.compute == pytest.approx(1 + row.tally["distilled"] / (3 * epochs * total))
        assert row.tally["distilled"] == row.tally["expert 0"] + row.tally["expert 1"]


def test_compute_of_experts_with_one_class_a_client() -> None:
    """Two of four clients train the expert: half a round's work, not a whole one."""
    federation = image_federation(((6, 0, 0, 0), (0, 6, 0, 0), (0, 0, 6, 0), (0, 0, 0, 6)))
    _, rows = trained(federation, "pkd", linear(), {**PKD, "groups": [[0, 3]]})
    assert [row.compute for row in rows if row.stage == "expert 0"] == pytest.approx([0.5, 0.5])


@ENGINES
def test_a_round_without_any_step(engine: str) -> None:
    """BatchNorm cannot train on the one sample that each client has: nothing happens, and nothing breaks."""
    federation = image_federation(((1, 0, 0, 0), (0, 0, 0, 1), (0, 1, 0, 0)))
    for method in ("fedavg", "fedvls", "scaffold", "fedgr"):
        _, rows = trained(federation, method, norm_and_dropout(), engine=engine)
        assert [(row.visits, row.compute, row.diverged) for row in rows] == [(0, 0.0, [])] * 2
    params = {"groups": [[0, 1]], "warmup_rounds": 1, "expert_rounds": 1}
    _, rows = trained(federation, "pkd", norm_and_dropout(), params, engine=engine)
    assert [row.visits for row in rows] == [0, 0, 0]
