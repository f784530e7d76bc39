"""Build fedskew/lab/diagnosis/reruns.csv, which `fedskew diagnose` reads, from the records in results/.

python tools/build_reruns.py

It also prints how many of the gains over FedAvg that papers print the reruns confirm.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from fedskew.lab.diagnosis.advice import printed_gains
from fedskew.lab.diagnosis.known import Neighbour, known_settings
from fedskew.lab.diagnosis.reruns import reruns_from_records, to_csv
from fedskew.lab.sweep.records import read_folder

ROOT = Path(__file__).parent.parent


def main() -> None:
    table = to_csv(reruns_from_records(read_folder(ROOT / "results")))
    path = ROOT / "fedskew" / "lab" / "diagnosis" / "reruns.csv"
    path.write_text(table, encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {len(table.splitlines()) - 1} reruns, {len(table) // 1024} KiB")
    print(outcomes_of_printed_gains())


def outcomes_of_printed_gains() -> str:
    """How many printed gains were confirmed, were smaller, or changed sign. A gain below one point may be chance."""
    everything = printed_gains([Neighbour(setting, 0.0) for setting in known_settings()])
    rerun = [
        (one.outcome, one.score.gain, one.rerun) for one in everything if one.score.gain > 0 and one.rerun is not None
    ]
    found = Counter(outcome for outcome, _, _ in rerun)
    large = sum(outcome == "refuted" and printed >= 1 and measured <= -1 for outcome, printed, measured in rerun)
    return (
        f"{found.total()} printed gains over FedAvg were rerun: {found['confirmed']} were confirmed, "
        f"{found['smaller']} were less than half as large, {found['refuted']} changed sign "
        f"({large} of these from at least +1 to at most -1 point)"
    )


if __name__ == "__main__":
    main()
