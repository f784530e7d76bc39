"""The header of a model card: metadata in the form of the Hugging Face Hub, as YAML.

The header has the model's task, its training data and its measured results (`model-index`).
https://huggingface.co/docs/hub/model-cards describes the keys.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml

from fedskew.data.catalogue import DATASETS, DatasetEntry
from fedskew.export.card_disclosures import method_entries
from fedskew.export.site_model import own_accuracy
from fedskew.methods import is_reference_bound
from fedskew.metrics.scores import Scores
from fedskew.results import Result

_TASKS = {"image": "image-classification", "table": "tabular-classification", "text": "text-classification"}
"""The Hub's names of the tasks, by kind of data."""

_HUB_DATASETS = {
    "mnist": "ylecun/mnist",
    "fashion-mnist": "zalando-datasets/fashion_mnist",
    "svhn": "ufldl-stanford/svhn",
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
    "tiny-imagenet": "zh-plus/tiny-imagenet",
    "ag_news": "fancyzhx/ag_news",
    "femnist": "flwrlabs/femnist",
}
"""Names on the Hub of datasets in the catalogue. Other datasets are not linked, unless they are `hf:owner/name`."""
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def metadata_header(run: Result, title: str, site: str | None = None, licence: str | None = None) -> str:
    """Return the header of the model card, between lines of three dashes.

    fedskew cannot know under which licence a model may be used, so the header has none unless `licence` is given.
    """
    metrics = _metrics(run) if site is None else _site_metrics(run, site)
    dataset = _hub_dataset(run)
    metadata: dict[str, Any] = {
        **({"license": licence} if licence else {}),
        "library_name": "pytorch",
        "pipeline_tag": _TASKS[run.inputs["kind"]],
        "tags": _tags(run),
        **({"datasets": [dataset]} if dataset else {}),
    }
    if metrics:
        metadata["metrics"] = list(dict.fromkeys(metric["type"] for metric in metrics))
        result = {"task": {"type": metadata["pipeline_tag"]}, "dataset": _dataset(run, site), "metrics": metrics}
        metadata["model-index"] = [{"name": title, "results": [result]}]
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, width=1000)}---"


def _tags(run: Result) -> list[str]:
    federated = [] if is_reference_bound(run.method) else ["federated-learning"]
    return [*federated, "label-skew", "fedskew", *(entry.name for entry in method_entries(run))]


def _metrics(run: Result) -> list[dict[str, Any]]:
    """List the results of the last evaluation on the test set."""
    evaluation, scores = run.evaluation, run.scores or Scores()
    return _known(
        ("accuracy", "accuracy", evaluation.accuracy),
        ("balanced_accuracy", "mean accuracy over classes", evaluation.mean_class),
        ("worst_class_accuracy", "accuracy of the worst class", evaluation.worst_class),
        ("f1", "macro F1", evaluation.macro_f1),
        ("roc_auc", "AUROC", scores.auroc),
        ("brier_score", "Brier score", scores.brier),
    )


def _site_metrics(run: Result, site: str) -> list[dict[str, Any]]:
    """List the results of a site's own model on its held-out samples, if it was tested."""
    score = run.site_scores.get(site)
    auroc = None if score is None else score.auroc
    return _known(("accuracy", "accuracy", own_accuracy(run, site)), ("roc_auc", "AUROC", auroc))


def _known(*metrics: tuple[str, str, float | None]) -> list[dict[str, Any]]:
    """List the metrics that have a value. Each is given as its type on the Hub, its name and its value."""
    return [
        {"type": kind, "value": round(value, 6), "name": name}
        for kind, name, value in metrics
        if value is not None and not math.isnan(value)
    ]


def published_dataset(run: Result) -> DatasetEntry | None:
    """Return the dataset of the catalogue that the run used. Data in memory may have the name of one by chance."""
    own = run.sites or "in_memory" in run.config.data_params
    return None if own else DATASETS.get(run.config.data.lower())


def _hub_dataset(run: Result) -> str | None:
    """Return the name of the training data on the Hub. None if fedskew knows no name, as for the data of sites."""
    if run.sites or "in_memory" in run.config.data_params:
        return None
    name = run.config.data
    if not name.startswith("hf:"):
        return _HUB_DATASETS.get(name.lower())
    name = name.removeprefix("hf:")  # a name on the Hub, or the path of a folder
    return name if _HUB_NAME.fullmatch(name) and not Path(name).exists() else None


def name_site(site: str) -> str:
    """Return a site's name for use in a sentence. A client without a name has a number: client 3 is `site 3`."""
    return f"site {site}" if site.isdecimal() else site


def _dataset(run: Result, site: str | None) -> dict[str, str]:
    """Describe the data that the model was tested on. The path of a user's own data is left out."""
    if site is not None:
        return {"type": "private", "name": f"held-out samples of {name_site(site)}", "split": "test"}
    if run.sites:
        return {"type": "private", "name": "test samples of the federation", "split": "test"}
    hub, known = _hub_dataset(run), published_dataset(run)
    name = known.name if known else hub or "own data"
    return {"type": hub or (known.name if known else "private"), "name": name, "split": "test"}
