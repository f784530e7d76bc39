"""The result of a run: what `fedskew.run` returns, and what `fedskew.load_run` reads from a folder.

Both are one type. Everything but the configuration, the rows and the model is derived from the rows, so a new metric
per round is one field of `RoundRow` (`round/record.py`), and at most one property here.
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
from fedskew.metrics.summary import CurveSummary

if TYPE_CHECKING:
    import pandas

STATUS = "finished"


def describe_participation(site_rounds: Mapping[str, int], rounds: int) -> str:
    """Who contributed to a federation's model, in words."""
    fewer = {name: number for name, number in site_rounds.items() if number < rounds}
    if not fewer:
        return f"all {len(site_rounds)} sites in every round"
    named = [f"{name} in {number or 'no'} round{'s' * (number != 1)}" for name, number in fewer.items()]
    complete = len(site_rounds) - len(fewer)
    return ", ".join([*([f"{complete} of {len(site_rounds)} sites in every round"] if complete else []), *named])


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """One run, finished or not."""

    config: Config
    history: list[RoundRow]
    """One row per round; row 0 is the initial model."""
    source: nn.Module | Callable[[], nn.Module]
    """The final model, or a function that loads it when `model` is first used."""
    engine: str
    """The engine that trained the clients; `auto` is already resolved."""
    folder: Path | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    """The content of `about.json`: the federation, the command, versions, the machine."""
    finished: bool = True
    stopped_early: bool = False
    """Whether a callback stopped the run before its last round."""
    auroc: float | None = None
    """Mean AUROC of each class against the rest, of the final model on the test set. None before the run is finished,
    if the sites of a federation tested the model, and in runs from before it was computed."""
    warnings: tuple[str, ...] = ()
    """What is damaged in the folder, one line each."""

    # -- what the run was --------------------------------------------------------------------------------

    @property
    def method(self) -> str:
        return self.config.method

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def name(self) -> str:
        """The folder's name, or the name that the folder would have."""
        return self.folder.name if self.folder else run_name(self.config)

    @cached_property
    def federation(self) -> Mapping[str, Any] | None:
        """Classes, label counts and hash of the split: as recorded, or else from the data; None without either."""
        if "federation" in self.about:
            found: Mapping[str, Any] = self.about["federation"]
            return found
        try:
            return describe_federation(build_federation(self.config))
        except UserError:
            return None

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; numbers if the names are unknown."""
        if self.federation is not None:
            return tuple(self.federation["classes"])
        return tuple(map(str, range(len(self.last.confusion)))) if self.last else ()

    @property
    def label_counts(self) -> npt.NDArray[np.int64] | None:
        """[clients, classes]; None if unknown, for instance because the sites of a federation keep them secret."""
        counts = (self.federation or {}).get("label_counts")
        return None if counts is None or self.sites else np.array(counts, np.int64)

    @property
    def client_labels(self) -> tuple[str, ...]:
        """What tables call the clients: their names, or else their numbers; empty if unknown."""
        if self.sites or self.label_counts is None:
            return self.sites
        named = (self.federation or {}).get("client_names")
        return tuple(named or map(str, range(len(self.label_counts))))

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites of a federation across machines; empty in a simulation."""
        split = self.config.partition
        return tuple(split.params.get("names", ())) if split.rule == "sites" else ()

    @property
    def inputs(self) -> dict[str, Any]:
        """Kind, shape and normalisation of a stored sample."""
        return recorded_inputs(self.federation, self.folder)

    # -- evaluations of the global model -----------------------------------------------------------------

    @cached_property
    def evaluated(self) -> list[RoundRow]:
        """The rows with an evaluation of the global model."""
        return [row for row in self.history if row.is_evaluated]

    @cached_property
    def evaluations(self) -> dict[int, Evaluation]:
        """By round of the global model. Rounds of experts do not count, as in the papers."""
        return {row.model_round: row.tested for row in self.evaluated}

    @property
    def accuracy_curve(self) -> list[tuple[int, float]]:
        """The evaluated rounds of the global model and the accuracy after each."""
        return [(row.model_round, row.accuracy) for row in self.evaluated]

    @property
    def curve(self) -> CurveSummary:
        """Best, last and mean-of-last accuracy."""
        return CurveSummary.from_curve(self.accuracy_curve, self.config.mean_last)

    @property
    def last(self) -> Evaluation | None:
        """The last evaluation; None if there is none yet."""
        return self.evaluated[-1].evaluation if self.evaluated else None

    @property
    def last_round(self) -> int:
        """The last evaluated round of the global model."""
        return max(self.evaluations, default=0)

    @property
    def evaluation(self) -> Evaluation:
        """The last global model on the test set."""
        if self.last is None:
            raise UserError(f"no round of {self.name} was evaluated yet")
        return self.last

    @property
    def accuracy(self) -> float:
        """Accuracy of the last global model on the test set."""
        return self.evaluation.accuracy

    @property
    def class_accuracy(self) -> tuple[float | None, ...]:
        return self.evaluation.class_accuracy

    @property
    def domain_accuracy(self) -> dict[str, float | None]:
        """Accuracy on each domain's test samples, for data with domains."""
        return (self.evaluated[-1].domain_accuracy or {}) if self.evaluated else {}

    # -- totals over all rounds --------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """Rounds of all stages so far."""
        return max(0, len(self.history) - 1)

    @property
    def diverged(self) -> int:
        """Number of client updates that were not finite and were left out."""
        return sum(len(row.diverged) for row in self.history)

    @property
    def compute(self) -> float:
        """Local computation in units of one plain local round of each participant."""
        return float(sum(row.compute for row in self.history))

    @property
    def bytes_moved(self) -> int:
        """Traffic between server and clients, in both directions."""
        return sum(row.bytes_moved for row in self.history)

    @property
    def seconds(self) -> float:
        return float(sum(row.seconds for row in self.history))

    @property
    def notes(self) -> dict[str, Any]:
        """What the method decided between stages, for instance PKD's groups."""
        return self.history[-1].notes if self.history else {}

    @property
    def privacy(self) -> dict[str, Any] | None:
        """Kind, ε and δ of the noise on the sites' updates; None without noise."""
        return self.history[-1].privacy if self.history else None

    @property
    def site_rounds(self) -> dict[str, int]:
        """Number of rounds to which each site contributed an update, by name; empty in a simulation."""
        counts = dict.fromkeys(self.sites, 0)
        for row in self.history if counts else ():
            for client in set(row.clients) - set(row.diverged):
                if self.sites[client] not in (row.failed or {}):
                    counts[self.sites[client]] += 1
        return counts

    @property
    def site_tests(self) -> list[str]:
        """Names of the sites that reported tests of the last evaluated model."""
        return list(self.evaluated[-1].sites or {}) if self.evaluated else []

    # -- the model, and views for people -----------------------------------------------------------------

    @cached_property
    def model(self) -> nn.Module:
        """The final global model; it is loaded when it is first used."""
        return self.source if isinstance(self.source, nn.Module) else self.source()

    def summary(self) -> dict[str, Any]:
        """The result as JSON: the content of `summary.json`."""
        return {
            "status": STATUS,
            "method": self.method,
            "seed": self.seed,
            "rounds": self.rounds,
            "accuracy": self.accuracy,
            **({} if self.auroc is None else {"auroc": self.auroc}),
            **self.curve.to_json(),
            "final": self.evaluation.to_json(),
            **({"domain_accuracy": self.domain_accuracy} if self.domain_accuracy else {}),
            "diverged": self.diverged,
            **({"sites": self.site_rounds, "tested_by": self.site_tests} if self.sites else {}),
            "compute": self.compute,
            "notes": self.notes,
            "seconds": self.seconds,
            "engine": self.engine,
            **({"stopped_early": True} if self.stopped_early else {}),
        }

    def to_frame(self) -> pandas.DataFrame:
        """One line per round, as a pandas DataFrame: what was recorded, and the metrics of the evaluation."""
        frame: pandas.DataFrame = data_frame([_line(row) for row in self.history], list(_line(RoundRow(0))))
        return frame.set_index("round")

    def __repr__(self) -> str:
        state = ", stopped early" if self.stopped_early else "" if self.finished else ", unfinished"
        found = f", accuracy {100 * self.accuracy:.1f} %" if self.last else ""
        return f"<Result: {self.title}, {self.rounds} round{'s' * (self.rounds != 1)}{state}{found}>"

    @property
    def title(self) -> str:
        config = self.config
        return f"{config.method} on {config.data}, {config.partition.rule} split, seed {config.seed}"

    def _repr_html_(self) -> str:
        """For notebooks."""
        state = ", stopped early" if self.stopped_early else "" if self.finished else ", unfinished"
        lines = [("rounds", f"{self.rounds}{state}")]
        if self.last is not None:
            names = zip(self.classes, self.class_accuracy, strict=True)
            by_class = ", ".join(f"{name} {100 * a:.1f}" for name, a in names if a is not None)
            best = self.curve.best
            lines += [
                ("accuracy", f"{100 * self.accuracy:.2f} %"),
                ("best accuracy", f"{100 * best.accuracy:.2f} % after round {best.round}"),
                ("worst class", f"{100 * self.last.worst_class:.2f} %"),
                ("accuracy by class, %", by_class),
            ]
        lines += [("seconds", f"{self.seconds:.1f}"), ("folder", str(self.folder or "none"))]
        cells = "".join(f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>" for name, value in lines)
        return f"<table><caption>{html.escape(self.title)}</caption>{cells}</table>"


def _line(row: RoundRow) -> dict[str, Any]:
    """The numbers of a row, without nested values."""
    plain = ("round", "stage", "model", "model_round", "lr", "loss", "visits", "compute", "drift_diversity", "seconds")
    values: dict[str, Any] = {name: getattr(row, name) for name in plain}
    values |= {"clients": len(row.clients), "diverged": len(row.diverged), "bytes": row.bytes_moved}
    return values | {name: getattr(row.evaluation, name, None) for name in MEASURES}
