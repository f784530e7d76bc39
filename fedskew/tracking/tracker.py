"""What all trackers share: which numbers of a round are told, and when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedskew.experiment.callbacks import Callback
from fedskew.experiment.preparation import Prepared
from fedskew.experiment.result import Result
from fedskew.experiment.round.row import RoundRow
from fedskew.experiment.round.state import RunState

FolderOf = Callable[[Prepared], Path]
_EVALUATED = ("accuracy", "macro_f1", "worst_class", "mean_class", "best_class", "class_gap")


def scalars(row: RoundRow) -> dict[str, float]:
    """The numbers of a round, under names that the tools group by."""
    found: dict[str, Any] = {
        "train/loss": row.loss,
        "train/lr": row.lr,
        "train/diverged": len(row.diverged),
        "cost/compute": row.compute,
        "cost/seconds": row.seconds,
        "cost/bytes": row.bytes_moved,
        "local/drift_diversity": row.drift_diversity,
    }
    found |= {f"tally/{name.replace(' ', '_')}": number for name, number in row.tally.items()}
    if row.is_evaluated:
        found |= {f"test/{name}": getattr(row.evaluation, name) for name in _EVALUATED}
        found |= {f"class/{c}": a for c, a in enumerate(row.tested.class_accuracy)}
    return {name: float(value) for name, value in found.items() if value is not None}


class Tracker(Callback):
    """Tells one run after another; a subclass says to whom."""

    def __init__(self, folder_of: FolderOf) -> None:
        self._folder_of = folder_of
        self._open = False

    def on_start(self, prepared: Prepared, state: RunState, rounds_ahead: int) -> None:  # noqa: ARG002
        self.begin(prepared, self._folder_of(prepared), state.round)
        self._open = True

    def on_round(self, row: RoundRow, rounds_ahead: int) -> None:  # noqa: ARG002
        self.tell(scalars(row), row.round)

    def on_end(self, result: Result) -> None:
        if self._open:  # a run that was finished before is not told again
            self.end(result)
            self._open = False

    def begin(self, prepared: Prepared, folder: Path, round: int) -> None:
        """Open the log of a run that stands after `round`."""
        raise NotImplementedError

    def tell(self, numbers: dict[str, float], round: int) -> None:
        raise NotImplementedError

    def end(self, result: Result) -> None:
        raise NotImplementedError


def flat(prepared: Prepared) -> dict[str, str]:
    """The configuration as tools take it: dotted keys, short texts."""
    values: dict[str, str] = {}
    for key, value in prepared.config.to_mapping().items():
        if isinstance(value, dict):
            values |= {f"{key}.{inner}": str(v)[:250] for inner, v in value.items()}
        else:
            values[key] = str(value)[:250]
    return values
