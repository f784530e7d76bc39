"""The results of runs, in types that reports, figures, tables, trackers, exports and commands share.

- A round: `RoundRow` (`experiment/round/record.py`). A new metric per round is one field there.
- A run: `Result` (`experiment/result.py`), which `run` returns and `load_run` reads from a folder.
- Several runs: `load_runs`, which looks for run folders.
- Methods on the same federations: `Comparison`, with one `MethodRuns` per method. `compare` runs the methods and
  returns a comparison. `compare_runs` makes one from existing runs. A comparison has the means over seeds, the ranking
  and the significance of differences. `ranking.py` has the metrics that can decide which method is best.
- A sweep: one `Comparison` per setting, made by `comparisons`.
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
