"""Compute the features and probabilities of a finished run's model on the test set."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedskew.data import Dataset, load
from fedskew.engine.data.device import DeviceSamples
from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.experiment.preparation import data_options, partition_rule
from fedskew.models import has_features
from fedskew.randomness import permutation
from fedskew.results import Result

Floats = npt.NDArray[np.float64]
BATCH_SIZE = 500
PLOTTED_SAMPLES = 600
"""The maximum number of samples in the charts of t-SNE and PCA. It is enough to show clusters, and t-SNE takes about
two seconds."""
DATA_KEYS = ("data", "data_dir", "partition")
"""The keys of the configuration that determine the test set."""
SAMPLES = 2000
"""The maximum number of samples on which the model is run, for means by class."""


@dataclass(frozen=True, eq=False)
class ModelOutputs:
    """A model's outputs for test samples. One sample is taken from each class in turn."""

    labels: npt.NDArray[np.int64]
    features: Floats
    """The inputs of the head. For a model without a separate head, the logits."""
    probabilities: Floats

    def class_distances(self, classes: int) -> Floats:
        """Euclidean distances between the mean features of the classes. NaN for a class without samples."""
        means = np.full((classes, self.features.shape[1]), np.nan)
        for c in np.unique(self.labels):
            means[c] = self.features[self.labels == c].mean(axis=0)
        distances: Floats = np.linalg.norm(means[:, None] - means[None], axis=-1)
        return distances

    def mean_probabilities(self, classes: int) -> Floats:
        """Mean predicted probabilities, one row per true class."""
        rows = np.full((classes, classes), np.nan)
        for c in np.unique(self.labels):
            rows[c] = self.probabilities[self.labels == c].mean(axis=0)
        return rows

    @cached_property
    def pca(self) -> Floats:
        """The features of the first `PLOTTED_SAMPLES` samples, projected on their first two principal components."""
        from sklearn.decomposition import PCA

        return np.asarray(PCA(2, random_state=0).fit_transform(self._plotted_features()), np.float64)

    @cached_property
    def tsne(self) -> Floats:
        """The features of the first `PLOTTED_SAMPLES` samples, embedded by t-SNE.

        t-SNE preserves neighbourhoods but not distances.
        """
        from sklearn.manifold import TSNE
        from threadpoolctl import threadpool_limits

        shown = self._plotted_features()
        with np.errstate(over="ignore", invalid="ignore"):
            spread = np.std(self.pca[:, 0].astype(np.float32))
        if not 0 < spread < np.inf:  # t-SNE divides by it, and such a value can crash Python
            raise UserError("the features of the test samples differ too little or too much for t-SNE")
        perplexity = min(30.0, (len(shown) - 1) / 3)
        with threadpool_limits(1):  # on a busy machine, more threads can be a hundred times slower
            embedded = TSNE(2, perplexity=perplexity, init="pca", random_state=0).fit_transform(shown)
        return np.asarray(embedded, np.float64)

    def _plotted_features(self) -> Floats:
        """The features of the first `PLOTTED_SAMPLES` samples. Raise a UserError if they cannot be drawn in a plane."""
        shown = self.features[:PLOTTED_SAMPLES]
        if min(shown.shape) < 2:
            raise UserError("features are drawn in a plane; expected at least two test samples and two features")
        # Equal features may differ slightly, because rounding errors depend on a sample's place in the batch.
        if np.ptp(shown, axis=0).max() <= 1e-6 * np.abs(shown).max():
            raise UserError("all test samples have the same features, so they cannot be drawn")
        return shown


def model_outputs(run: Result) -> ModelOutputs:
    """Run the model on test samples.

    Raise a UserError if the model or the data are missing, if the data are at sites, if their classes have changed
    since the run, if their inputs no longer fit the model, if samples have several labels, or if an output is not
    finite.
    """
    if run.sites:
        raise UserError("the data are at the sites, so features cannot be computed here")
    if run.config.task == "multi-label":
        raise UserError("samples have several labels, so features cannot be coloured by class")
    model = run.model
    dataset = _dataset(json.dumps({key: run.config.to_mapping()[key] for key in DATA_KEYS}, sort_keys=True))
    if tuple(dataset.classes) != tuple(run.classes):
        raise UserError(f"{run.config.data} has changed since the run: its classes differ")
    encoder, head = (model.encoder, model.head) if has_features(model) else (model, nn.Identity())
    samples = DeviceSamples(dataset, dataset.test, torch.device("cpu"))
    rows = _choose_balanced(dataset)
    features, probabilities = [], []
    with torch.no_grad():
        # The batches have about equal sizes. A model that uses the batch's statistics would fail on a single sample.
        for batch in np.array_split(rows, -(-len(rows) // BATCH_SIZE)):
            hidden, logits = _forward(encoder, head, samples.inputs(torch.from_numpy(batch)), run)
            features.append(hidden.flatten(1).double().numpy())
            probabilities.append(logits.double().softmax(dim=-1).numpy())
    found = ModelOutputs(dataset.test.y[rows], np.concatenate(features), np.concatenate(probabilities))
    if not (np.isfinite(found.features).all() and np.isfinite(found.probabilities).all()):
        raise UserError(f"{run.folder}: the model's outputs are not finite")
    return found


@lru_cache(maxsize=2)
def _dataset(settings: str) -> Dataset:
    """Load the data as the run did, without classes that the partition leaves out.

    `settings` are the `DATA_KEYS` of the configuration. They are JSON text, because the cache needs a hashable key.
    """
    config = Config.from_mapping(json.loads(settings))
    return partition_rule(config).arrange(load(config.data, config.data_dir, **data_options(config))).dataset


def _forward(encoder: nn.Module, head: nn.Module, x: Tensor, run: Result) -> tuple[Tensor, Tensor]:
    """Return features and logits."""
    try:
        hidden = encoder(x)
        return hidden, head(hidden)
    except (RuntimeError, IndexError) as error:  # IndexError: a word that the model does not know
        raise UserError(f"{run.config.data} has changed since the run: its inputs do not fit the model") from error


def _choose_balanced(dataset: Dataset) -> npt.NDArray[np.int64]:
    """Choose test samples from each class in turn, in the same order for all runs."""
    y = dataset.test.y
    shuffled = permutation(len(y), 0, "report features")
    rank = np.zeros(len(y), np.int64)
    for c in range(len(dataset.classes)):
        class_rows = shuffled[y[shuffled] == c]
        rank[class_rows] = np.arange(len(class_rows))
    order = np.argsort(rank[shuffled], kind="stable")
    return np.asarray(shuffled[order][:SAMPLES], np.int64)
