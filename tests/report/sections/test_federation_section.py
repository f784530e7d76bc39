"""The section about the federation: sites of a federation across machines, and samples with several labels."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up_runs import made_up

from fedskew.experiment.config import PartitionConfig
from fedskew.report.sections.federation import federation
from fedskew.results import compare_runs


@pytest.mark.parametrize(
    ("sites", "listed"),
    [
        (["north"], "1 site: north."),
        (["north", "south"], "2 sites: north, south."),
    ],
)
@pytest.mark.parametrize("method", ["fedavg", "fedconcat"])  # sites of the second send their label counts
def test_a_federation_across_machines_has_no_map(method: str, sites: list[str], listed: str) -> None:
    note = f"{listed} For a federation across machines, no map of the samples by client and class is shown."
    split = PartitionConfig("sites", params={"names": sites})
    run = made_up(method, 0, [0.5, 0.5])
    at_sites = replace(run, config=replace(run.config, partition=split))
    assert federation(compare_runs([at_sites])).paragraphs == [note]


def test_labels_are_not_called_samples_if_a_sample_may_have_several() -> None:
    run = made_up("fedavg", 0, [0.5, 0.5])
    several = replace(run, config=replace(run.config, task="multi-label"))
    section = federation(compare_runs([several]))
    assert "2 clients, 2 classes, 27 labels;" in section.paragraphs[0]
    assert section.tables[0].columns[:2] == ["client", "labels"]
    assert federation(compare_runs([run])).tables[0].columns[:2] == ["client", "samples"]


def test_the_seed_of_the_split_is_named_if_it_is_not_that_of_the_run() -> None:
    run = made_up("fedavg", 5, [0.5, 0.5])
    assert "split of seed 5." in federation(compare_runs([run])).paragraphs[0]
    fixed = replace(run.config.partition, seed=3)
    run = replace(run, config=replace(run.config, partition=fixed))
    assert "split of seed 3." in federation(compare_runs([run])).paragraphs[0]
