"""The papers' figures that can be drawn from runs: what each shows, and which runs it needs.

`feded: Fig. 1` is a figure of FedVLS's preprint, which calls the method FedED.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedskew.errors import unknown
from fedskew.report.charts.chart import Figure
from fedskew.report.figures import bars, curves, heat_maps, sweeps
from fedskew.results import Comparison

Draw = Callable[[Sequence[Comparison]], Figure]


@dataclass(frozen=True)
class Entry:
    """A figure of a paper."""

    name: str
    shows: str
    needs: str
    """The runs it needs, as options of `fedskew compare` or a grid of `fedskew sweep`."""
    draw: Draw


_ENTRIES = (
    Entry("fedvls/1", "accuracy by class of the global model and of one client's updated model (feded: Fig. 1)",
          "--methods fedavg,fedlc,fedvls --eval-local, with --beta 0.1; another run with --partition iid",
          bars.local_update),
    Entry("fedvls/2", "confusion matrix of one client's model after its update (also Fig. 6)",
          "--methods fedavg,fedvls --eval-local", heat_maps.local_confusion),
    Entry("fedvls/3", "accuracy over rounds, a panel per split and dataset",
          "one comparison per --data and --beta", curves.accuracy_by_setting),
    Entry("fedvls/4", "accuracy over rounds by participation, local epochs or number of clients (also Fig. 8)",
          "a sweep over clients_per_round, local_epochs or partition.clients", curves.accuracy_by_setting),
    Entry("fedvls/5", "like fedvls/1, for all methods", "--methods ... --eval-local", bars.local_update),
    Entry("fedvls/7", "samples by client and class, a panel per split (feded: Fig. 3)",
          "one run per split", heat_maps.maps),
    Entry("fedvls/9", "accuracy by class after local updates (mean over clients) and after aggregation (feded: Fig. 4)",
          "--methods ... --eval-local", bars.local_and_aggregated),
    Entry("fedvls/lambda", "accuracy over the distillation weight",
          "a sweep over method.distill_weight", sweeps.over_keys),
    Entry("fedvls/ablation", "accuracy without each part of the loss",
          "runs of fedvls with distill_weight or suppress_weight 0", bars.by_part),
    Entry("fedlmd/2", "labels of the sampled clients and predictions, by round and class",
          "--methods fedavg,fedlmd --clients 100 --clients-per-round 10", heat_maps.labels_and_predictions),
    Entry("fedlmd/4", "accuracy over rounds of FedAvg with and without distillation",
          "--methods fedavg,fedkd", curves.accuracy_by_setting),
    Entry("fedlmd/5", "methods without a teacher under several splits",
          "--methods fedavg,fedrs,fedlmd-tf, one comparison per split", bars.by_setting),
    Entry("fedlmd/6", "accuracy over rounds, a panel per split", "one comparison per --beta",
          curves.accuracy_by_setting),
    Entry("fedlmd/7", "accuracy over local epochs and over clients per round",
          "a sweep over local_epochs and clients_per_round", sweeps.over_keys),
    Entry("fedlmd/8", "accuracy over the round at which FedLMD-Tf becomes FedLMD",
          "a sweep over method.switch_round of fedlmd-switch", sweeps.over_keys),
    Entry("fedlmd/9", "accuracy over temperature and weight",
          "a sweep over method.temperature and method.beta of fedlmd and fedlmd-tf", sweeps.grid),
    Entry("fedlmd/10", "samples by client and class, 100 clients", "one run per --beta", heat_maps.maps),
    Entry("fedgr/1", "label, quantity and double imbalance of 10 clients",
          "runs with --partition fedgr-label, fedgr-quantity, fedgr-double", heat_maps.maps),
    Entry("fedgr/2", "methods under the three imbalances", "the runs of fedgr/1 with several methods", bars.by_setting),
    Entry("fedgr/4", "accuracy over the strength of gravity", "a sweep over method.gravity", sweeps.over_keys),
    Entry("fedgr/5", "t-SNE of features", "--methods fedavg,fedgr", heat_maps.embeddings),
    Entry("pkd/2", "accuracy by class minus the mean, with the gap between best and worst",
          "runs of centralised and of fedavg with --partition balanced and one-class, and several models",
          bars.around_mean),
    Entry("pkd/3", "feature distances, mean probabilities and predictions by class",
          "a run of fedavg", heat_maps.model_internals),
    Entry("pkd/4", "best and worst class over rounds, a panel per setting",
          "runs with --clients-per-round 10 and 100, and --partition one-class", curves.best_and_worst),
    Entry("pkd/5", "classes of the confusable group over rounds", "a run of fedavg or pkd", curves.confusable_group),
    Entry("pkd/6", "how often each class is predicted as each other class, over rounds", "a run of fedavg",
          curves.prediction_flow),
    Entry("pkd/8", "worst class over rounds", "--methods fedavg,pkd", curves.worst_by_setting),
    Entry("pkd/9", "accuracy over rounds and over computation, expert activations", "--methods fedavg,pkd",
          curves.computation),
)  # fmt: skip

FIGURES: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}


def find_figure(name: str) -> Entry:
    if name not in FIGURES:
        raise unknown("figure", name, FIGURES)
    return FIGURES[name]
