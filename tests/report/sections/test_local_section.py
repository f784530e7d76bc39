"""The section about local training, if there are no results of local models."""

from __future__ import annotations

from dataclasses import replace

from made_up_runs import made_up

from fedskew.experiment.config import PartitionConfig
from fedskew.report.sections.local import local
from fedskew.results import compare_runs


def test_a_simulation_is_advised_to_evaluate_local_models() -> None:
    section = local(compare_runs([made_up("fedavg", 0, [0.5, 0.5])]))
    assert section.missing == ["local models were not evaluated; run with --eval-local"]


def test_a_federation_is_not_advised_to_use_an_option_that_it_refuses() -> None:
    run = made_up("fedavg", 0, [0.5, 0.5])
    split = PartitionConfig("sites", params={"names": ["north", "south"]})
    (missing,) = local(compare_runs([replace(run, config=replace(run.config, partition=split))])).missing
    assert "--eval-local" not in missing
    assert "federation.local_tests" in missing


def test_an_option_that_is_set_is_not_advised() -> None:
    runs = [made_up(method, 0, [0.5, 0.5], finished=False, eval_local=True) for method in ("fedavg", "centralised")]
    does_not_apply = "--eval-local does not apply to this method"
    missing = local(compare_runs(runs)).missing
    assert missing == [does_not_apply]
    begun = replace(runs[0], history=runs[0].history[:1])
    missing = local(compare_runs([begun, runs[1]])).missing
    assert missing == ["fedavg: no round has been evaluated yet", f"centralised: {does_not_apply}"]
