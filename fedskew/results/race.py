"""The record of a race of methods. `fedskew choose` saves it in `race.json`, and the report reads it.

A candidate is a method with its settings and a learning rate. A race has up to three rungs. In each rung, the
candidates are trained up to a later round than before. Only the best candidates go on, and FedAvg always does. After
the last rung, FedAvg and the best other methods meet in a final, each with its best candidate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fedskew.data.partitions.rule import PARTITIONS
from fedskew.errors import UserError, other_format
from fedskew.experiment.storage.files import reporting_os_errors, write_file
from fedskew.results.significance import Difference

RACE = "race.json"
FORMAT = 1
"""The version of the format of `race.json`."""


class Repeats(NamedTuple):
    """The words for what differs between the trials of one candidate: splits or seeds."""

    one: str
    many: str
    on: str
    """The preposition: `on` 3 splits, `with` 3 seeds."""


SPLITS = Repeats("split", "splits", "on")
SEEDS = Repeats("seed", "seeds", "with")
"""For trials on one split. They differ in validation samples, initial model, clients of each round, and batches."""


def repeats(config: Mapping[str, Any]) -> Repeats:
    """Return `SPLITS` if trials with this configuration have different splits, else `SEEDS`."""
    partition = config.get("partition") or {}
    rule = PARTITIONS.get(str(partition.get("rule")))
    is_drawn = rule is None or rule.is_drawn  # a user's own rule counts as one that draws
    return SPLITS if is_drawn and partition.get("seed") is None else SEEDS


@dataclass(frozen=True)
class Standing:
    """A candidate's validation results in one rung, or in the final."""

    method: str
    label: str
    """The method and its settings, without the learning rate."""
    lr: float
    params: Mapping[str, Any]
    scores: Mapping[int, float]
    """Validation score by seed.

    Each seed has its own validation samples. It also has its own split, unless the split is fixed (see `repeats`).
    """
    kept: bool
    """Whether the candidate goes on to the next rung, or to the final after the last rung. True in the final."""

    @property
    def mean(self) -> float:
        return fmean(self.scores.values())


@dataclass(frozen=True)
class Rung:
    """The candidates that were trained to the same round, the best first."""

    rounds: int
    standings: tuple[Standing, ...]


@dataclass(frozen=True)
class Finalist:
    """A method in the final. There, methods are compared with tuned FedAvg on seeds that no rung used."""

    standing: Standing
    overall: float
    """Mean score over all seeds with which the candidate was trained to the end, in the last rung and in the final."""
    difference: Difference | None
    """This method minus tuned FedAvg, corrected by Holm's method. None for FedAvg itself."""
    compute: float
    """Local computation, as a multiple of FedAvg's."""
    traffic: float
    """Bytes sent and received, as a multiple of FedAvg's."""
    time_ratio: float
    """Measured time of a round, as a multiple of FedAvg's. Its key in `race.json` is `seconds`."""
    reveals: str
    """What the server learns about a client's labels."""
    extra_compute: str
    """What clients compute besides FedAvg's training, such as `1 teacher forward`. The cost is per local step, unless
    the text names another period."""


@dataclass(frozen=True)
class RaceRecord:
    """A race, finished or not. Only a finished race has an answer."""

    config: Mapping[str, Any]
    """The federation and the training settings that all candidates share."""
    methods: tuple[str, ...]
    rank_by: str
    budget: str
    plan: Mapping[str, int] | None = None
    """How thorough the race is: the fields of `choose.budget.Plan`."""
    final_plan: Mapping[str, int] | None = None
    """The plan, with its final reduced to what was left of the budget. None before the end of the last rung."""
    rungs: tuple[Rung, ...] = ()
    final: tuple[Finalist, ...] = ()
    """The finalists, sorted by `overall`, the best first."""
    chosen: int | None = None
    """The position of the chosen method in `final`."""
    answer: tuple[str, ...] = ()
    failures: Mapping[str, str] | None = None
    """Methods that could not run here, with the reason."""
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        return self.chosen is not None

    @property
    def repeats(self) -> Repeats:
        return repeats(self.config)

    @property
    def winner(self) -> Finalist:
        if self.chosen is None:
            raise ValueError("the race is not finished")
        return self.final[self.chosen]

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self), "final": [_finalist_json(finalist) for finalist in self.final]}

    @classmethod
    def from_json(cls, content: Any) -> RaceRecord:
        if not isinstance(content, dict) or "format" not in content:
            raise UserError(f"not the record of a race; expected a JSON object with format {FORMAT}")
        if content["format"] != FORMAT:
            raise other_format("the record of a race", content["format"], FORMAT)
        values = {key: value for key, value in content.items() if key != "format"}
        try:
            values["rungs"] = tuple(
                Rung(rung["rounds"], tuple(map(_standing, rung["standings"]))) for rung in values["rungs"]
            )
            values["final"] = tuple(map(_finalist, values["final"]))
            return cls(**{**values, "methods": tuple(values["methods"]), "answer": tuple(values["answer"])})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"damaged record of a race: {type(error).__name__}: {error}") from error


def _standing(content: Mapping[str, Any]) -> Standing:
    return Standing(**{**content, "scores": {int(seed): float(score) for seed, score in content["scores"].items()}})


def _finalist_json(finalist: Finalist) -> dict[str, Any]:
    return {"seconds" if name == "time_ratio" else name: value for name, value in asdict(finalist).items()}


def _finalist(content: Mapping[str, Any]) -> Finalist:
    difference = content["difference"]
    return Finalist(**{
        **{"time_ratio" if name == "seconds" else name: value for name, value in content.items()},
        "standing": _standing(content["standing"]),
        "difference": None if difference is None else Difference(**difference),
    })  # fmt: skip


def load_race(folder: str | Path) -> RaceRecord | None:
    """Read the race in a folder. None if there is none."""
    path = Path(folder) / RACE
    if not path.is_file():
        return None
    with reporting_os_errors("read", path):
        content = path.read_bytes()
    try:
        return RaceRecord.from_json(json.loads(content))
    except (ValueError, UserError) as error:
        raise UserError(f"{path}: {error}") from error


def save_race(folder: Path, race: RaceRecord) -> None:
    """Write the record to a folder, or replace the one that is there."""
    write_file(folder / RACE, json.dumps(race.to_json(), indent=1, allow_nan=False) + "\n")


def find_races(paths: Sequence[str | Path]) -> list[Path]:
    """Return the folders of races among these paths and directly below them."""
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        folders = [path, *sorted(p for p in path.iterdir() if p.is_dir())] if path.is_dir() else []
        found |= dict.fromkeys(folder for folder in folders if (folder / RACE).is_file())
    return list(found)
