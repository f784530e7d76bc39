"""Datasets of the Hugging Face hub, as `hf:owner/name`. They need the package `datasets`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedskew.data.dataset import Dataset
from fedskew.data.own.objects import load_object
from fedskew.errors import UserError

PREFIX = "hf:"
_OPTIONS = ("subset", "revision")


def load_hub(name: str, options: dict[str, Any]) -> Dataset:
    """Load `hf:owner/name` from the hub or its cache, or `hf:FOLDER` from a folder that `datasets` can read.

    The option `subset` chooses one of the dataset's subsets. `revision` is a branch, tag or commit. The other options
    are those of tables.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{name!r} needs the package datasets: pip install datasets") from error
    place = name.removeprefix(PREFIX)
    if not place.strip("/. "):
        raise UserError(f"{name!r} is incomplete; expected hf:owner/name")
    chosen = {"name": options.get("subset"), "revision": options.get("revision")}
    try:
        found = datasets.load_dataset(place, **{key: value for key, value in chosen.items() if value is not None})
    except Exception as error:  # the package raises many kinds of errors, some without a common base class
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{name!r} cannot be loaded: {type(error).__name__}: {reason}") from error
    rest = {key: value for key, value in options.items() if key not in _OPTIONS}
    dataset = load_object(found, {"name": name, **rest})
    return replace(dataset, in_memory={})  # a repeated run can load it by its name and options
