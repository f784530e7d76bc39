"""Datasets and splits that the runs of one process share, so that they are rarely loaded or drawn again.

A process keeps the last few datasets and splits. A split that took long to draw is also saved in the user's cache, for
all processes. For example, a Dirichlet split of many clients can take half a minute, because thousands of draws are
rejected. Splits by a user's own rule or from a file are not saved, because the code or the file may change.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedskew.data import Dataset, Federation, load
from fedskew.data.dataset import stratified_holdout
from fedskew.data.partitions.saved import read_split
from fedskew.data.published.file_search import cache_folder
from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.experiment.preparation import build_federation, data_options, partition_rule
from fedskew.locks import exclusive

_MIN_CACHED_SECONDS = 1.0
"""A split is saved if drawing it took more seconds than this."""
_MAX_CACHED_SAMPLES = 5_000_000
"""Splits of more samples are not saved, because reading them as JSON would take longer than drawing them."""


def shared_federation(config: Config, validation: float | None = None) -> Federation:
    """Return the federation of a run. With `validation`, that fraction of the training data replaces the test set.

    The fraction is held out before the rest is split over the clients. The real test set is then not used at all.
    """
    source = {"name": config.data, **data_options(config)}
    dataset = _load_dataset(
        json.dumps(source, sort_keys=True), config.data_dir, validation, _file_stamps(source.values())
    )
    stamps = _file_stamps([*source.values(), *config.partition.params.values()])
    return _federation(_key(config, validation), dataset, config, stamps)


Stamps = tuple[tuple[str, int, int], ...]
"""Paths of files, each with the time of its last change and its size."""


def _file_stamps(options: Iterable[object]) -> Stamps:
    """Return the stamps of the files that these options name, which tell if a file has changed.

    For a folder, the entries in it are included, but not those in its sub-folders.
    """
    found = []
    for option in options:
        if isinstance(option, str) and option:
            with contextlib.suppress(OSError, ValueError, RuntimeError):  # no path, or no home folder
                path = Path(option).expanduser().absolute()
                for file in (path, *(path.iterdir() if path.is_dir() else ())):
                    status = file.stat()
                    found.append((str(file), status.st_mtime_ns, status.st_size))
    return tuple(sorted(found))


@lru_cache(maxsize=4)
def _load_dataset(data: str, data_dir: str | None, validation: float | None, stamps: Stamps) -> Dataset:  # noqa: ARG001
    """Load a dataset. `data` has its name and parameters as JSON, because a cache needs hashable arguments.

    `stamps` only makes the cache load a file again if it has changed.
    """
    options = json.loads(data)
    dataset = load(options.pop("name"), data_dir, **options)
    return dataset if validation is None else hold_out_validation(dataset, validation)


def hold_out_validation(dataset: Dataset, fraction: float) -> Dataset:
    """Replace the test set by a fraction of the training data."""
    kept, held = stratified_holdout(dataset.train.y, fraction, dataset.name)
    return replace(dataset, train=dataset.train.select(kept), test=dataset.train.select(held))


_recent: dict[str, Federation] = {}
"""The federations that this process made last, by key, data folder and file stamps."""
_MAX_RECENT = 8


def _federation(key: str, dataset: Dataset, config: Config, stamps: Stamps) -> Federation:
    """Return the federation from `_recent`. If it is not there, read or draw its split, and add it."""
    recent_key = f"{key} {config.data_dir} {stamps}"
    if recent_key not in _recent:
        while len(_recent) >= _MAX_RECENT:
            del _recent[next(iter(_recent))]
        _recent[recent_key] = _read_or_draw(key, dataset, config)
    return _recent[recent_key]


def _read_or_draw(key: str, dataset: Dataset, config: Config) -> Federation:
    """Read the split from the user's cache, or draw it. While one process does this, others with the same key wait."""
    is_own_rule = ":" in config.partition.rule
    if is_own_rule or _file_stamps(config.partition.params.values()):  # code or a file that may change
        return build_federation(config, dataset)
    folder = Path(os.environ.get("FEDSKEW_CACHE") or cache_folder()) / "splits"
    path = folder / f"{key}.json"
    with exclusive(folder / f".{key}.lock"):
        if path.is_file():
            with contextlib.suppress(UserError):  # if the file is damaged or splits other data, draw the split
                rule = partition_rule(config)
                arranged = rule.arrange(dataset)
                indices = read_split(path, arranged.dataset.groups[0])
                return Federation(arranged.dataset, indices, rule.describe(), config.partition_seed,
                                  arranged.client_names, arranged.all_notes)  # fmt: skip
        start = time.perf_counter()
        drawn = build_federation(config, dataset)
        if time.perf_counter() - start > _MIN_CACHED_SECONDS and len(drawn.samples) <= _MAX_CACHED_SAMPLES:
            with contextlib.suppress(UserError):  # continue if the cache cannot be written
                drawn.save_split(path)
        return drawn


def _key(config: Config, validation: float | None) -> str:
    """Return the name of a saved split.

    The data folder is not part of the name. If the folder has other data, `read_split` notices that the labels differ.
    """
    identity: dict[str, Any] = {
        "data": {"name": config.data, **config.data_params},
        "partition": config.partition.to_mapping(),
        "seed": config.partition_seed,
        "validation": validation,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
