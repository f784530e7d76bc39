"""Build fedskew/lab/diagnosis/reruns.csv, which `fedskew diagnose` reads, from the records in results/.

python tools/build_reruns.py
"""

from __future__ import annotations

from pathlib import Path

from fedskew.lab.diagnosis.reruns import reruns_from_records, to_csv
from fedskew.lab.sweep.records import read_folder

ROOT = Path(__file__).parent.parent


def main() -> None:
    table = to_csv(reruns_from_records(read_folder(ROOT / "results")))
    path = ROOT / "fedskew" / "lab" / "diagnosis" / "reruns.csv"
    path.write_text(table, encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {len(table.splitlines()) - 1} reruns, {len(table) // 1024} KiB")


if __name__ == "__main__":
    main()
