"""The results of runs. Reports, figures, tables, trackers, exports and commands share these types.

- A round is a `RoundRow` (`experiment/round/record.py`). A new metric per round is a new field there.
- A run is a `Result` (`experiment/result.py`). `run` returns it, and `load_run` reads it from a folder. `load_runs`
  finds and reads several runs.
- Several methods on the same federations are a `Comparison`, with one `MethodRuns` per method. `compare` runs the
  methods, and `compare_runs` compares existing runs. A comparison has the means over seeds, the ranking and the
  significance of differences. `ranking.py` has the metrics that can decide which method is best.
- A sweep is one `Comparison` per setting, made by `comparisons`.
"""

from __future__ import annotations

from fedskew.experiment.result import Result
from fedskew.experiment.round.record import RoundRow
from fedskew.results.comparison import Comparison, MethodRuns, compare_runs, comparisons
from fedskew.results.folders import LoadedRuns, find_runs, load_run, load_runs, load_runs_and_races
from fedskew.results.run_methods import compare

__all__ = [
    "Comparison",
    "LoadedRuns",
    "MethodRuns",
    "Result",
    "RoundRow",
    "compare",
    "compare_runs",
    "comparisons",
    "find_runs",
    "load_run",
    "load_runs",
    "load_runs_and_races",
]
