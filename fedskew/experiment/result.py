"""The result of a run, which `fedskew.run` returns and `fedskew.load_run` reads from a folder.

Metrics and totals are derived from the rows. A new metric per round is one field of `RoundRow` (`round/record.py`) and
at most one property here. Add its name to `_frame_line` if `to_frame` should show it.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import nn

from fedskew.display import data_frame
from fedskew.errors import UserError
from fedskew.experiment.config import Config, run_name
from fedskew.experiment.preparation import build_federation
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.storage.about import describe_federation, recorded_inputs
from fedskew.metrics.confusion import MEASURES, Evaluation
from fedskew.metrics.scores import Scores
from fedskew.metrics.site_scores import SiteScore
from fedskew.metrics.summary import CurveSummary
from fedskew.notebook import curves, label_map

if TYPE_CHECKING:
    import pandas

STATUS = "finished"
"""The `status` in `summary.json`, which is written when a run ends."""


def describe_participation(site_rounds: Mapping[str, int], rounds: int) -> str:
    """Describe which sites contributed to a federation's model, and in how many rounds."""
    fewer = {name: number for name, number in site_rounds.items() if number < rounds}
    if not fewer:
        return f"{'the only site' if len(site_rounds) == 1 else f'all {len(site_rounds)} sites'} in every round"
    named = [f"{name} in {number or 'no'} round{'s' * (number != 1)}" for name, number in fewer.items()]
    complete = len(site_rounds) - len(fewer)
    return ", ".join([*([f"{complete} of {len(site_rounds)} sites in every round"] if complete else []), *named])


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """The result of one run, finished or not."""

    config: Config
    history: list[RoundRow]
    """One row per round. Row 0 is the initial model."""
    model_or_loader: nn.Module | Callable[[], nn.Module]
    """The final model, or a function that loads it when `model` is first used."""
    engine: str
    """The engine that trained the clients. It can be `auto` only for an unfinished run that was read from a folder."""
    folder: Path | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    """The content of `about.json`: the federation, the command, versions, the machine."""
    finished: bool = True
    stopped_early: bool = False
    """Whether a callback stopped the run before its last round."""
    scores: Scores | None = None
    """AUROC, calibration and other metrics of the final model's probabilities on the test set.

    None if there are none: the run is unfinished, has no global model, was stopped after a round without an evaluation,
    ran out of memory when it computed them, or is from a version that did not compute them. Also None if a probability
    is not finite, or if the sites that tested the model report only totals.
    """
    site_scores: Mapping[str, SiteScore] = field(default_factory=dict)
    """Scores by client, with the clients' names or numbers as keys.

    In a simulation, they are computed on each client's held-out samples (`client_test`). A client's own model is scored
    if the method has one, else the final model. In a federation whose sites report results by class, they are computed
    on each site's test data. A site's own model is scored if there is no global model, else the final model.
    """
    warnings: tuple[str, ...] = ()
    """One line for each damaged file in the folder."""

    # -- configuration and data --------------------------------------------------------------------------

    @property
    def method(self) -> str:
        return self.config.method

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def name(self) -> str:
        """The folder's name. Without a folder, a name such as `digits-dirichlet0.1-fedvls-s0-1a2b3c`."""
        return self.folder.name if self.folder else run_name(self.config)

    @cached_property
    def federation(self) -> Mapping[str, Any] | None:
        """Classes, label counts and hash of the split, from the record of the run.

        If the record does not have them, they are computed from the data. None if the data are missing, too.
        """
        if "federation" in self.about:
            found: Mapping[str, Any] = self.about["federation"]
            return found
        try:
            return describe_federation(build_federation(self.config))
        except UserError:
            return None

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes. Numbers if only their number is known, and empty if not even that."""
        if self.federation is not None:
            return tuple(self.federation["classes"])
        return tuple(map(str, range(len(self.last.confusion)))) if self.last else ()

    @property
    def label_counts(self) -> npt.NDArray[np.int64] | None:
        """Number of samples, [clients, classes]. None if unknown, for example because the sites keep them secret."""
        counts = (self.federation or {}).get("label_counts")
        return None if counts is None or self.sites else np.asarray(counts, np.int64)

    @property
    def client_labels(self) -> tuple[str, ...]:
        """The clients' names, or else their numbers, for tables. Empty if unknown."""
        if self.sites or self.label_counts is None:
            return self.sites
        named = (self.federation or {}).get("client_names")
        return tuple(named or map(str, range(len(self.label_counts))))

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites of a federation across machines. Empty in a simulation."""
        split = self.config.partition
        return tuple(split.params.get("names", ())) if split.rule == "sites" else ()

    @property
    def inputs(self) -> dict[str, Any]:
        """Kind and shape of a stored sample, and how it becomes the model's input."""
        return recorded_inputs(self.federation, self.folder)

    # -- evaluations of the global model -----------------------------------------------------------------

    @cached_property
    def evaluated(self) -> list[RoundRow]:
        """The rows with an evaluation of the global model."""
        return [row for row in self.history if row.is_evaluated]

    @cached_property
    def evaluations(self) -> dict[int, Evaluation]:
        """Evaluations of the global model, by round. Only rounds that train it are counted, as in the papers."""
        return {row.model_round: row.required_evaluation for row in self.evaluated}

    @property
    def accuracy_curve(self) -> list[tuple[int, float]]:
        """The evaluated rounds of the global model and the accuracy after each."""
        return [(row.model_round, row.accuracy) for row in self.evaluated]

    @property
    def curve(self) -> CurveSummary:
        """Best, last and mean-of-last accuracy."""
        self._require_evaluation()
        return CurveSummary.from_curve(self.accuracy_curve, self.config.mean_last)

    @property
    def last(self) -> Evaluation | None:
        """The last evaluation. None if there is none yet."""
        return self.evaluated[-1].evaluation if self.evaluated else None

    @property
    def last_round(self) -> int:
        """The last evaluated round of the global model."""
        return max(self.evaluations, default=0)

    @property
    def evaluation(self) -> Evaluation:
        """The last evaluation on the test set. Raises UserError if there is none yet."""
        return self._require_evaluation()

    def _require_evaluation(self) -> Evaluation:
        if self.last is None:
            raise UserError(f"no round of {self.name} has been evaluated yet")
        return self.last

    @property
    def accuracy(self) -> float:
        """Accuracy on the test set at the last evaluation."""
        return self.evaluation.accuracy

    @property
    def class_accuracy(self) -> tuple[float | None, ...]:
        return self.evaluation.class_accuracy

    @property
    def domain_accuracy(self) -> dict[str, float | None]:
        """Accuracy on each domain's test samples, for data with domains."""
        return (self.evaluated[-1].domain_accuracy or {}) if self.evaluated else {}

    @property
    def auroc(self) -> float | None:
        """AUROC of the final model on the test set. None if it is unknown: see `scores`.

        With two classes, it is that of the positive class. Otherwise, it is the mean over the classes, each against the
        rest. Classes to which all test samples or none belong are left out.
        """
        return None if self.scores is None else self.scores.auroc

    # -- totals over all rounds --------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """Number of rounds so far, over all stages."""
        return max(0, len(self.history) - 1)

    @property
    def planned_rounds(self) -> int | None:
        """Number of rounds that the configuration asks for. None for a method with stages, which may add rounds."""
        has_stages = any(row.stage != "train" for row in self.history)
        return None if has_stages else self.config.rounds

    @property
    def stopped_after(self) -> str:
        """Where a callback stopped the run, such as `after round 18 of 60`."""
        return f"after round {self.rounds}" + ("" if self.planned_rounds is None else f" of {self.planned_rounds}")

    @property
    def diverged(self) -> int:
        """Number of client updates that were discarded, because they or the server's step with them were not finite."""
        return sum(len(row.diverged) for row in self.history)

    @property
    def compute(self) -> float:
        """Local computation, in units of a FedAvg round."""
        return float(sum(row.compute for row in self.history))

    @property
    def bytes_moved(self) -> int:
        """Bytes sent between server and clients, in both directions."""
        return sum(row.bytes_moved for row in self.history)

    @property
    def seconds(self) -> float:
        return float(sum(row.seconds for row in self.history))

    @property
    def notes(self) -> dict[str, Any]:
        """Decisions of the method between stages, such as PKD's groups."""
        return self.history[-1].notes if self.history else {}

    @property
    def privacy(self) -> dict[str, Any] | None:
        """Kind, ε and δ of differential privacy. None without it."""
        return self.history[-1].privacy if self.history else None

    @property
    def site_rounds(self) -> dict[str, int]:
        """Number of rounds to which each site contributed an update, by name. Empty in a simulation."""
        counts = dict.fromkeys(self.sites, 0)
        for row in self.history if counts else ():
            for client in set(row.clients) - set(row.diverged):
                if self.sites[client] not in (row.failed or {}):
                    counts[self.sites[client]] += 1
        return counts

    @property
    def testing_sites(self) -> list[str]:
        """Names of the sites that took part in the last evaluation. Empty in a simulation."""
        return list(self.evaluated[-1].sites or {}) if self.evaluated else []

    @property
    def client_tests(self) -> dict[str, dict[str, float]]:
        """Accuracies on the test samples of each client or site, by its name, from the last evaluation on them.

        accuracy        of the new global model, or of the client's own model if there is no global one
        before, after   of a participant's model, before and after local training
        personal        of the client's own model, if the method has a personal part
        """
        tested = [row.client_tests for row in self.evaluated if row.client_tests]
        found: dict[str, dict[str, float]] = {}
        for kind, values in tested[-1].items() if tested else ():
            names = self.client_labels if len(self.client_labels) == len(values) else map(str, range(len(values)))
            for name, value in zip(names, values, strict=False):
                if value is not None:
                    found.setdefault(name, {})[kind] = value
        return found

    @property
    def client_accuracy(self) -> float:
        """The mean of the clients' accuracies on their own test samples. NaN if there are none.

        A client's own model is tested if it has one, or else the global model.
        """
        found = [tests.get("personal", tests.get("accuracy", np.nan)) for tests in self.client_tests.values()]
        return float(np.nanmean(found)) if np.isfinite(found).any() else np.nan

    # -- the model, and views of the result ---------------------------------------------------------------

    @cached_property
    def model(self) -> nn.Module:
        """The final global model. If the result was read from a folder, the model is loaded when it is first used.

        If clients train alone, it is the model of the client with the most samples. If a personal part leaves no global
        model, the tensors that stay on the clients have their initial values.
        """
        return self.model_or_loader if isinstance(self.model_or_loader, nn.Module) else self.model_or_loader()

    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`."""
        return {
            "status": STATUS,
            "method": self.method,
            "seed": self.seed,
            "rounds": self.rounds,
            "accuracy": self.accuracy,
            **({} if self.auroc is None else {"auroc": self.auroc}),
            **self.curve.to_json(),
            "final": self.evaluation.to_json(),
            **({} if self.scores is None else {"scores": self.scores.to_json()}),
            **({"domain_accuracy": self.domain_accuracy} if self.domain_accuracy else {}),
            **({"site_scores": {k: v.to_json() for k, v in self.site_scores.items()}} if self.site_scores else {}),
            **({"client_tests": self.client_tests} if self.client_tests else {}),
            **({} if self.privacy is None else {"privacy": self.privacy}),
            "diverged": self.diverged,
            **({"sites": self.site_rounds, "tested_by": self.testing_sites} if self.sites else {}),
            "compute": self.compute,
            "notes": self.notes,
            "seconds": self.seconds,
            "engine": self.engine,
            **({"stopped_early": True} if self.stopped_early else {}),
        }

    def to_frame(self) -> pandas.DataFrame:
        """A pandas DataFrame with one line per round: the recorded values and the metrics of the evaluation."""
        frame: pandas.DataFrame = data_frame([_frame_line(row) for row in self.history], list(_frame_line(RoundRow(0))))
        return frame.set_index("round")

    def site_frame(self) -> pandas.DataFrame:
        """A pandas DataFrame with one line per site: `site_scores`, on the site's own test samples."""
        if not self.site_scores:
            raise UserError(
                f"{self.name} has no results by site; expected a finished run with client_test, such as "
                "client_test=0.2, or with sites that report results by class"
            )
        records = [{"site": name, **score.to_json()} for name, score in self.site_scores.items()]
        frame: pandas.DataFrame = data_frame(records)
        return frame.set_index("site")

    def __repr__(self) -> str:
        state = ", stopped early" if self.stopped_early else "" if self.finished else ", unfinished"
        accuracy = f", accuracy {100 * self.accuracy:.1f} %" if self.last else ""
        return f"<Result: {self.title}, {self.rounds} round{'s' * (self.rounds != 1)}{state}{accuracy}>"

    @property
    def title(self) -> str:
        config = self.config
        return f"{config.method} on {config.data}, {config.partition.rule} split, seed {config.seed}"

    def _repr_html_(self) -> str:
        """Show the result in a notebook: a table, the accuracy over the rounds, and the label counts."""
        state = ", stopped early" if self.stopped_early else "" if self.finished else ", unfinished"
        lines = [("rounds", f"{self.rounds}{state}")]
        if self.last is not None:
            names = zip(self.classes, self.class_accuracy, strict=True)
            by_class = ", ".join(f"{name} {100 * a:.1f}" for name, a in names if a is not None)
            best = self.curve.best
            lines += [
                ("accuracy", f"{100 * self.accuracy:.2f} %"),
                ("best accuracy", f"{100 * best.accuracy:.2f} % after round {best.round}"),
                # Without results by class, for example of sites that report totals, these lines are left out.
                *([("worst class", f"{100 * self.last.worst_class:.2f} %")] if by_class else []),
                *([("accuracy by class, %", by_class)] if by_class else []),
                *([] if self.auroc is None else [("AUROC", f"{self.auroc:.4f}")]),
            ]
        lines += [("seconds", f"{self.seconds:.1f}"), ("folder", str(self.folder or "none"))]
        cells = "".join(f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>" for name, value in lines)
        accuracy = [(round_, 100 * value) for round_, value in self.accuracy_curve]
        table = f"<table><caption>{html.escape(self.title)}</caption>{cells}</table>"
        return f"{table}{curves({self.method: [accuracy]})}{self._heat_map()}"

    def _heat_map(self) -> str:
        """A heat map of classes and clients, for notebooks. Empty if the label counts are unknown."""
        return "" if self.label_counts is None else label_map(self.label_counts, self.client_labels, self.classes)


def recorded_scores(summary: Mapping[str, Any]) -> Scores | None:
    """The scores in a `summary.json`. Earlier versions recorded AUROC only, or nothing."""
    if "scores" in summary:
        return Scores.from_json(summary["scores"])
    return Scores(auroc=summary["auroc"]) if summary.get("auroc") is not None else None


def recorded_site_scores(summary: Mapping[str, Any]) -> dict[str, SiteScore]:
    """The scores by site in a `summary.json`. Empty if there are none."""
    return {name: SiteScore.from_json(score) for name, score in summary.get("site_scores", {}).items()}


def _frame_line(row: RoundRow) -> dict[str, Any]:
    """The line of `to_frame` for one row: plain values, counts, and the metrics of the evaluation."""
    plain = ("round", "stage", "model", "model_round", "lr", "loss", "visits", "compute", "drift_diversity", "seconds")
    values: dict[str, Any] = {name: getattr(row, name) for name in plain}
    values |= {"clients": len(row.clients), "diverged": len(row.diverged), "bytes": row.bytes_moved}
    return values | {name: getattr(row.evaluation, name, None) for name in MEASURES}
