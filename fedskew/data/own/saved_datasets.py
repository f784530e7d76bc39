"""A Hugging Face dataset as `save_to_disk` leaves it: JSON notes and Arrow streams, read without its library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedskew.data.own.tables import Table, arrow_table, import_pyarrow
from fedskew.errors import UserError

_TEST_SPLITS = ("test", "validation", "valid", "val")


def is_saved_dataset(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def saved_tables(folder: Path) -> list[Table]:
    """The train and test tables; one table if nothing was saved to test on."""
    if not (folder / "dataset_dict.json").is_file():
        return [_split(folder)]
    splits = [str(name) for name in _json(folder / "dataset_dict.json").get("splits") or []]
    if len(splits) == 1:
        return [_split(folder / splits[0])]
    if "train" not in splits:
        raise UserError(f"{folder}: splits {', '.join(splits) or '(none)'}; expected one named train")
    test = next((name for name in _TEST_SPLITS if name in splits), None)
    return [_split(folder / name) for name in ("train", test) if name]


def _split(folder: Path) -> Table:
    pyarrow = import_pyarrow()
    state = _json(folder / "state.json")
    try:
        names = [Path(entry["filename"]).name for entry in state["_data_files"]]
    except (KeyError, TypeError):
        names = []
    if not names:
        raise UserError(f"{folder / 'state.json'}: names no data files; expected what save_to_disk writes")
    info = folder / "dataset_info.json"
    features = _json(info).get("features") if info.is_file() else None
    table = pyarrow.concat_tables([_arrow_file(folder / name) for name in names])
    return arrow_table(table, str(folder), features if isinstance(features, dict) else {})


def _arrow_file(path: Path) -> Any:
    pyarrow = import_pyarrow()
    try:
        with pyarrow.OSFile(str(path)) as source, pyarrow.ipc.open_stream(source) as reader:
            return reader.read_all()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: cannot be read ({error}); expected an Arrow stream") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); expected JSON") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object; expected what save_to_disk writes")
    return content
