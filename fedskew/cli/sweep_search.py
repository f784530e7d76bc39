"""`fedskew sweep --search`: the best point on a validation part, then its number on the test set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedskew.cli.campaigns import conclude, in_percent, run_campaign

if TYPE_CHECKING:
    from fedskew.lab.sweep.campaign import Campaign
    from fedskew.lab.sweep.job import Job, Outcome
    from fedskew.lab.sweep.search import Search

TRIALS = 20


def searched(search: Search, trials: int, campaign: Campaign, as_json: bool, quiet: bool) -> None:
    """Search, then run the best point on all training data and test it."""
    from fedskew.cli.terminal import print_json, stdout
    from fedskew.lab.sweep.pool import usual_workers
    from fedskew.lab.sweep.search import search_with_optuna

    at_once = campaign.workers or usual_workers(search.base.device, trials)

    def run(jobs: Sequence[Job]) -> Mapping[str, Outcome]:
        run_campaign(campaign, jobs, as_json or quiet)
        return campaign.outcomes

    found = search_with_optuna(search, trials, at_once, campaign.folder, run)
    final = search.final_jobs(found.values)
    run_campaign(campaign, final, as_json or quiet)
    tested = [record for job in final if (record := campaign.known.get(job)) is not None]
    told = {
        "best": found.values,
        "validation_accuracy": found.validation_accuracy,
        "trials": found.trials,
        "failed": found.failed,
        "test_accuracy": [record.curve[-1][1] for record in tested],
    }
    if as_json:
        print_json(told)
    else:
        listed = ", ".join(f"{key} {value}" for key, value in found.values.items())
        console = stdout()
        console.print(f"best of {found.trials} trials: {listed}", markup=False, soft_wrap=True)
        console.print(f"on validation data {100 * found.validation_accuracy:.2f} %")
        if tested:
            accuracy = in_percent([record.curve[-1][1] for record in tested])
            console.print(f"on the test set, trained on all training data: {accuracy} %")
    conclude(campaign)
