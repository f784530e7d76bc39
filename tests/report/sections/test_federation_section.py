"""The section about the federation, if the sites did not share their label counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up_runs import made_up

from fedskew.experiment.config import PartitionConfig
from fedskew.report.sections.federation import federation
from fedskew.results import compare_runs


@pytest.mark.parametrize(
    ("sites", "note"),
    [
        (["north"], "1 site: north. It did not share its label counts, so no map is shown."),
        (["north", "south"], "2 sites: north, south. They did not share their label counts, so no map is shown."),
    ],
)
def test_a_federation_of_sites_without_label_counts_is_described(sites: list[str], note: str) -> None:
    split = PartitionConfig("sites", params={"names": sites})
    run = made_up("fedavg", 0, [0.5, 0.5])
    at_sites = replace(run, config=replace(run.config, partition=split))
    assert federation(compare_runs([at_sites])).paragraphs == [note]
