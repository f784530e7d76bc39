"""Federations: a dataset split among clients, each with its samples and label counts."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.data.dataset import Dataset
from fedskew.data.loading import is_named, load
from fedskew.data.partitions.rule import ClientIndices, IntArray, Partition, make_partition, require_rule, split_hash
from fedskew.data.partitions.saved import write_split
from fedskew.errors import UserError, plural
from fedskew.notebook import label_map
from fedskew.randomness import generator


@dataclass(frozen=True, eq=False)
class Federation:
    """A dataset whose training samples are split among clients."""

    dataset: Dataset
    indices: Sequence[IntArray]
    """The indices of each client's training samples."""
    partition: Mapping[str, object]
    """The rule's name and parameters."""
    seed: int
    client_names: tuple[str, ...] = ()
    """The names of the clients; empty if they only have numbers."""
    notes: tuple[str, ...] = ()
    """Lines for the user about what the loader and the rule changed in the data."""
    held_out: Sequence[IntArray] = ()
    """The indices of the training samples that each client holds out for testing; empty if clients hold out none."""
    server_samples: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    """The indices of the training samples that only the server holds."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "indices", ClientIndices.join(self.indices))

    def __repr__(self) -> str:
        params = ", ".join(
            f"{key}={value!r}" for key, value in self.partition.items() if key not in ("name", "clients")
        )
        rule = f"{self.partition.get('name')}({params})"
        return f"Federation({self.dataset.name!r}, {plural(self.clients, 'client')}, {rule}, seed={self.seed})"

    def _repr_html_(self) -> str:
        """Show the label counts of all clients as a map in a notebook."""
        unused = f", {plural(self.unused, 'sample')} unused" if self.unused else ""
        caption = f"{self!r}: {plural(int(self.sizes.sum()), 'sample')}{unused}"
        shown = label_map(self.label_counts, self.client_labels, self.dataset.classes)
        return f"<div>{escape(caption)}</div>{shown}"

    @property
    def clients(self) -> int:
        return len(self.indices)

    @property
    def classes(self) -> int:
        return len(self.dataset.classes)

    @property
    def client_labels(self) -> tuple[str, ...]:
        """The names of the clients in tables, or their numbers if they have no names."""
        return self.client_names or tuple(str(k) for k in range(self.clients))

    @property
    def column_sums_from(self) -> tuple[str, ...]:
        """The sites that sent sums of their columns for the encoding; empty in a simulation."""
        return ()

    @property
    def secure_aggregation(self) -> bool:
        """Whether the server learns only sums over the clients; False in a simulation."""
        return False

    @cached_property
    def sizes(self) -> IntArray:
        """Samples per client, [clients]."""
        return self.joined_indices.sizes

    @cached_property
    def populated(self) -> IntArray:
        """The numbers of the clients that have samples."""
        return _frozen(np.flatnonzero(self.sizes))

    @cached_property
    def label_counts(self) -> IntArray:
        """Samples by client and class, [clients, classes]. A sample with several labels counts for each of them."""
        y = self.dataset.train.y[self.samples]
        return _frozen(self.dataset.task.label_counts(y, self.joined_indices.owners, self.clients, self.classes))

    @cached_property
    def domains(self) -> tuple[str, ...]:
        """Each client's most frequent domain, or the first domain if the client has no samples.

        Empty if the dataset has no domains.
        """
        domain = self.dataset.train.domain
        if domain is None:
            return ()
        names = self.dataset.domains
        cells = self.joined_indices.owners * len(names) + domain[self.samples]
        counts = np.bincount(cells, minlength=self.clients * len(names)).reshape(self.clients, len(names))
        return tuple(names[number] for number in counts.argmax(axis=1))

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the split."""
        return split_hash(self.indices)

    @property
    def samples(self) -> IntArray:
        """The indices of all clients' training samples, client by client."""
        return self.joined_indices.samples

    @property
    def unused(self) -> int:
        """The number of training samples that neither a client nor the server has."""
        held = sum(map(len, self.held_out)) + len(self.server_samples)
        return len(self.dataset.train) - int(self.sizes.sum()) - held

    def vacant(self, client: int) -> tuple[int, ...]:
        """Classes without samples on this client."""
        return _indices_where(self.label_counts[client] == 0)

    def minority(self, client: int) -> tuple[int, ...]:
        """Classes that the client has, but that make up at most 1/classes of its labels."""
        counts = self.label_counts[client]
        return _indices_where((counts > 0) & (counts * self.classes <= counts.sum()))

    def majority(self, client: int) -> tuple[int, ...]:
        """Classes that make up more than 1/classes of the client's labels (the rule in FedLMD's code)."""
        counts = self.label_counts[client]
        return _indices_where(counts * self.classes > counts.sum())

    def restrict(self, labels: Sequence[int]) -> Federation:
        """Return a federation whose clients and server keep only samples of these labels. A client may keep none."""
        if self.dataset.train.y.ndim > 1:
            raise UserError("samples with several labels cannot be restricted to some labels; expected one per sample")
        is_kept = np.zeros(self.classes, np.bool_)
        for label in labels:
            if not 0 <= label < self.classes:
                raise UserError(f"label is {label}; expected 0 to {self.classes - 1}")
            is_kept[label] = True
        has_kept_label = is_kept[self.dataset.train.y]
        samples = self.samples
        keep = has_kept_label[samples]
        return replace(
            self,
            indices=ClientIndices(samples[keep], np.bincount(self.joined_indices.owners[keep], minlength=self.clients)),
            partition={**self.partition, "restricted_to": np.flatnonzero(is_kept).tolist()},
            held_out=tuple(part[has_kept_label[part]] for part in self.held_out),
            server_samples=self.server_samples[has_kept_label[self.server_samples]],
        )

    def resplit(self, seed: int) -> Federation:
        """Split the same data by the same rule with another seed."""
        if seed == self.seed:
            return self
        params = dict(self.partition)
        if "restricted_to" in params:
            raise UserError("a restricted federation cannot be split again; split the whole dataset, then restrict it")
        if len(self.held_out) or len(self.server_samples):
            raise UserError(
                f"the federation has test samples of clients or samples of the server, so it cannot be split again "
                f"with seed {seed}; pass a federation without them, and set client_test or server_data instead"
            )
        return federation(self.dataset, make_partition(str(params.pop("name")), **params), seed)

    def hold_out(self, fraction: float) -> Federation:
        """Hold out a share of each client's samples of each class as the client's own test samples.

        With several labels per sample, `Dataset.groups` take the place of classes.
        """
        held = self.draw_held_out(fraction, self.seed, "client test")
        if not held.any():
            raise UserError(
                f"{self.dataset.name}: no client holds out a sample; expected more samples per client and class, or a "
                "larger client_test"
            )
        kept, own = (tuple(part[chosen[part]] for part in self.indices) for chosen in (~held, held))
        return replace(self, indices=kept, held_out=own)

    def give_server(self, fraction: float) -> Federation:
        """Move a share of the clients' samples to the server, equally many of each class.

        A class with too few samples gives all but one of them. With several labels per sample, `Dataset.groups` take
        the place of classes.
        """
        labels, names = self.dataset.groups
        each = int(fraction * len(self.samples) / len(names) + 1e-9)  # 0.29 of 100 samples are 29, not 28.999…
        if not each:
            raise UserError(
                f"server_data is {fraction}, which is less than one sample per class of {self.dataset.name}; expected "
                f"at least {_rounded_up(len(names) / max(1, len(self.samples))):g}"
            )
        given = np.zeros(len(labels), dtype=bool)
        for label in range(len(names)):
            members = np.sort(self.samples[labels[self.samples] == label])
            count = min(each, max(0, len(members) - 1))
            given[generator(self.seed, "server data", label).permutation(members)[:count]] = True
        kept = tuple(part[~given[part]] for part in self.indices)
        return replace(self, indices=kept, server_samples=np.flatnonzero(given))

    def draw_held_out(self, fraction: float, seed: int, purpose: str) -> npt.NDArray[np.bool_]:
        """Draw a share of each client's samples of each class, as a mask over the training samples.

        The number of samples is rounded up or down at random, so that the share is right on average. But a client keeps
        at least one sample of every class that it has, so no class becomes vacant. With several labels per sample, this
        holds for `Dataset.groups`, but a label may become vacant. Seed, purpose, client and class determine the random
        numbers.
        """
        labels, _ = self.dataset.groups
        held = np.zeros(len(labels), dtype=bool)
        for client, part in enumerate(self.indices):
            for label in np.unique(labels[part]).tolist():
                members = part[labels[part] == label]
                draw = generator(seed, purpose, client, label)
                count = min(len(members) - 1, int(len(members) * fraction + draw.random()))
                held[draw.permutation(members)[:count]] = True
        return held

    def save_split(self, path: str | os.PathLike[str]) -> None:
        """Save the indices of the clients' training samples, with a hash. The partition `Saved(path)` restores them."""
        write_split(path, self.indices, self.dataset.groups[0], self.partition, self.seed)

    @cached_property
    def joined_indices(self) -> ClientIndices:
        """`indices`, typed as `ClientIndices`."""
        return ClientIndices.join(self.indices)


def federation(
    data: object,
    partition: Partition,
    seed: int = 0,
    data_dir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Federation:
    """Split a dataset among clients.

    `data` is a `Dataset`, or anything that `load` takes: a name, a path or a Python object. `partition` is a rule such
    as `Dirichlet(clients=10, beta=0.1)` or `Column("hospital")`, and `seed` decides its random choices. `data_dir` and
    `options` go to `load`.
    """
    require_rule(partition)
    arranged = partition.arrange(load_for(partition, data, data_dir, **options))
    dataset, train = arranged.dataset, arranged.dataset.train
    groups, names = dataset.groups
    indices = partition.split(groups, len(names), seed, names=names, domain=train.domain, site=train.site)
    return Federation(dataset, indices, partition.describe(), int(seed), arranged.client_names, arranged.all_notes)


def load_for(
    partition: Partition, data: object, data_dir: str | os.PathLike[str] | None = None, **options: Any
) -> Dataset:
    """Load a dataset. For a user's own data, add the options that the partition needs, such as the column of sites."""
    if isinstance(data, Dataset) or is_named(data):
        return load(data, data_dir, **options)
    needed = partition.data_options()
    dataset = load(data, data_dir, **{**needed, **options})
    source = {key: value for key, value in dataset.source.items() if key in options or key not in needed}
    return replace(dataset, source=source)  # a configuration omits the options that only the partition set


def _frozen(array: IntArray) -> IntArray:
    array.setflags(write=False)
    return array


def _rounded_up(number: float) -> float:
    """Round up to two significant digits, so that the result is not below the number."""
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit) * unit


def _indices_where(mask: npt.NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(np.flatnonzero(mask).tolist())
