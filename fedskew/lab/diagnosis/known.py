"""Settings that papers print or that fedskew reran, and which of them are near a federation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedskew.data.catalogue import DATASETS
from fedskew.errors import UserError
from fedskew.lab.diagnosis.reruns import reruns_from_records, shipped_reruns
from fedskew.lab.diagnosis.setting import KnownSetting, Score, known_setting
from fedskew.lab.diagnosis.skew import Skew, distance
from fedskew.lab.papers.cells import Cell, table_cells, why_not_runnable
from fedskew.lab.papers.protocol import papers, read_protocol
from fedskew.lab.sweep.records import Records, read_folder

ACCURACIES = ("best", "last-50 accuracy")
"""The metrics of papers' tables that measure the overall accuracy of a model."""
NEAR = 0.1
"""Settings up to this distance count as near. A distance is the root mean square difference of five measures, each of
which is between 0 and 1."""
SIMILAR_PARTICIPATION = 2.0
"""Shares of clients per round that differ by up to this factor are similar. If all clients take part, only settings
where all take part are similar: a method that helps with few clients per round may harm with all (see the maps in
RESULTS.md)."""
NEARNESS = (
    f"A setting is near if five measures of skew (vacant and minority classes, Hellinger distance, client sizes, class "
    f"sizes) have a root mean square difference of at most {NEAR}, and if the share of clients per round is similar: "
    f"within a factor of {SIMILAR_PARTICIPATION:g}, and all clients in both settings or in neither. The data and "
    "the model may differ."
)


def known_settings(results: str | Path | None = None) -> list[KnownSetting]:
    """Collect the settings of the papers' tables, of the reruns that ship with fedskew, and of a user's records."""
    from_user = [] if results is None else reruns_from_records(_read_records(results))
    reruns = ((rerun.setting, rerun.score) for rerun in dict.fromkeys([*shipped_reruns(), *from_user]))
    settings: dict[KnownSetting, KnownSetting] = {}
    for setting, score in (*_printed(), *reruns):
        known = settings.setdefault(setting, replace(setting, scores=[]))
        _add(known.scores, score)
    return list(settings.values())


def _read_records(folder: str | Path) -> Records:
    records = read_folder(folder)
    if not len(records):
        raise UserError(f"no records in {str(folder)!r}; expected .jsonl files of `fedskew reproduce` or `sweep`")
    return records


def _add(scores: list[Score], score: Score) -> None:
    """Add a score. A number that is printed in several tables, or rerun with the same result, counts once."""
    for i, known in enumerate(scores):
        if replace(known, source=score.source) == score:
            sources = dict.fromkeys((*known.sources, score.source))
            scores[i] = known if score.is_rerun else replace(known, source=", ".join(sources))
            return
    scores.append(score)


def _printed() -> Iterator[tuple[KnownSetting, Score]]:
    """Yield the accuracies that papers print for known datasets.

    Left out are cells with a condition, such as `rounds=80`, and tables whose split is a file of label counts.
    """
    for paper in papers():
        columns: dict[tuple[str, tuple[str, str, str, str]], list[Cell]] = {}
        for table in read_protocol(paper).tables:
            for cell in table_cells(paper, table):
                comparable = cell.metric in ACCURACIES and not cell.condition
                if comparable and cell.dataset in DATASETS and read_protocol(paper).tables[table].partition is None:
                    columns.setdefault((table, cell.column), []).append(cell)
        for (table, _), cells in columns.items():
            yield from _column(paper, table, cells)


def _column(paper: str, table: str, cells: Sequence[Cell]) -> Iterator[tuple[KnownSetting, Score]]:
    """Yield the score of each method but FedAvg in a table's column. Yield nothing if the column lacks FedAvg.

    Left out are methods that this version lacks, and splits without a rule or a number of clients.
    """
    means = {cell.method: cell.printed.mean for cell in cells if cell.printed and cell.printed.mean is not None}
    baseline = means.get("FedAvg")
    if baseline is None:
        return
    for cell in cells:
        if cell.method == "FedAvg" or cell.method not in means:
            continue
        values = read_protocol(paper).values(table, *cell.setting, cell.method)
        setting = _setting(cell.dataset, values)
        if setting is not None and not why_not_runnable(cell):
            source, prints_best = f"{paper}/{table}", cell.metric == "best"
            score = Score(str(values["method"]), means[cell.method], baseline, source, prints_best=prints_best)
            yield setting, score


def _setting(dataset: str, values: Mapping[str, Any]) -> KnownSetting | None:
    rule = values["partition"]
    if not isinstance(rule, str) or "partition.clients" not in values:
        return None
    params = {key.removeprefix("partition."): v for key, v in values.items() if key.startswith("partition.")}
    clients = int(params.pop("clients"))
    params.pop("seed", None)
    return known_setting(dataset, rule, params, clients, values.get("clients_per_round"))


@dataclass(frozen=True)
class Neighbour:
    """A known setting and its distance from a federation."""

    setting: KnownSetting
    distance: float
    """Rounded to two decimals. Further decimals say nothing: the splits of two seeds differ by more."""

    @property
    def is_near(self) -> bool:
        return self.distance <= NEAR


def nearest(
    skew: Skew,
    settings: Iterable[KnownSetting],
    participation: float | None = None,
    own_setting: KnownSetting | None = None,
) -> list[Neighbour]:
    """Sort the settings by the distance of their skew. Settings whose split cannot be drawn are left out.

    Among equally distant settings, those with a similar number of clients and classes come first. With `participation`,
    only settings with a similar share of clients per round are returned. `own_setting` is the federation's own
    setting, if it is known. A setting with the same data and split has distance 0, whatever the number of clients per
    round.
    """
    coordinates = skew.coordinates()
    found = []
    for setting in settings:
        if participation is not None and not _is_similar(setting.participation, participation):
            continue
        if own_setting is not None and replace(setting, per_round=own_setting.per_round) == own_setting:
            found.append(Neighbour(setting, 0.0))
            continue
        try:
            found.append(Neighbour(setting, round(distance(coordinates, setting.coordinates()), 2)))
        except UserError:  # the split cannot be drawn
            continue

    def order(neighbour: Neighbour) -> tuple[float, float]:
        setting = neighbour.setting
        size = abs(np.log10(setting.clients / skew.clients)) + abs(np.log10(setting.classes / skew.classes))
        return neighbour.distance, float(size)

    return sorted(found, key=order)


def _is_similar(one: float, other: float) -> bool:
    if (one == 1) != (other == 1):
        return False
    return max(one, other) <= SIMILAR_PARTICIPATION * min(one, other)
