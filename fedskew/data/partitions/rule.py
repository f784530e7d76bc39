"""Partition rules: a rule decides, from a seed, which client gets which training sample.

A rule is a frozen dataclass of its parameters with a method `draw`. To add a rule, write a file like `shards.py` beside
this one and import it in `__init__.py`. After each split, this module checks that no sample goes to two clients, that
no client is too small, and that no sample is left out unless the rule allows it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar, overload

import numpy as np
import numpy.typing as npt

from fedskew.data.dataset import Dataset, lacking_notes
from fedskew.errors import UserError, plural, unknown, unknown_parameter
from fedskew.randomness import permutation
from fedskew.user_code import import_user_module

IntArray = npt.NDArray[np.int64]


class ClientIndices(Sequence[IntArray]):
    """A sequence with the sample indices of each client.

    One array has the indices of all clients, and those of one client are a view of it. A million small arrays would
    need more memory and time.
    """

    def __init__(self, samples: IntArray, sizes: IntArray) -> None:
        """`samples` has the indices of the first client, then those of the second, and so on."""
        self.samples, self.sizes = samples, sizes
        self.sizes.setflags(write=False)
        self.ends = np.cumsum(sizes)

    @classmethod
    def join(cls, parts: Sequence[IntArray]) -> ClientIndices:
        """Join the clients' arrays of indices."""
        if isinstance(parts, ClientIndices):
            return parts
        sizes = np.fromiter(map(len, parts), np.int64, len(parts))
        samples = np.concatenate([np.empty(0, np.int64), *parts]) if len(parts) else np.empty(0, np.int64)
        return cls(samples.astype(np.int64, copy=False), sizes)

    @property
    def owners(self) -> IntArray:
        """The client of each entry of `samples`."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def ascending(self) -> ClientIndices:
        """Return the same clients, each with its indices in ascending order."""
        descents = np.diff(self.samples) < 0
        # A descent from one client's last index to the next client's first does not count.
        descents[self.ends[(self.ends > 0) & (self.ends < len(self.samples))] - 1] = False
        if not descents.any():
            return self
        return ClientIndices(self.samples[np.lexsort((self.samples, self.owners))], self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, client: int) -> IntArray: ...
    @overload
    def __getitem__(self, client: slice) -> tuple[IntArray, ...]: ...
    def __getitem__(self, client: int | slice) -> IntArray | tuple[IntArray, ...]:
        if isinstance(client, slice):
            return tuple(self[k] for k in range(len(self))[client])
        end = int(self.ends[client])
        return self.samples[end - int(self.sizes[client]) : end]

    def __iter__(self) -> Iterator[IntArray]:
        return (self[client] for client in range(len(self)))


@dataclass(frozen=True, eq=False)
class Labels:
    """The training samples as a rule sees them: their labels, domains and sites, and the class names.

    For a dataset with several labels per sample, labels and names are those of `Dataset.groups`.
    """

    y: IntArray
    names: tuple[str, ...]
    domain: IntArray | None = None
    site: IntArray | None = None

    @property
    def classes(self) -> int:
        return len(self.names)

    @cached_property
    def class_sizes(self) -> IntArray:
        return np.bincount(self.y, minlength=self.classes).astype(np.int64)

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Arrangement:
    """A dataset that a rule has prepared for its split."""

    dataset: Dataset
    client_names: tuple[str, ...] = ()
    """The names of the clients; empty if they only have numbers."""
    notes: tuple[str, ...] = ()
    """Lines for the user about what the rule changed."""

    @property
    def all_notes(self) -> tuple[str, ...]:
        """The lines about what loading and the rule changed, and about classes with samples of only one part."""
        return (*self.dataset.notes, *lacking_notes(self.dataset), *self.notes)


@dataclass(frozen=True)
class Partition(ABC):
    """A rule that gives each client its training samples."""

    name: ClassVar[str]
    uses_all: ClassVar[bool] = True
    """Whether every sample goes to a client. A rule that may leave out samples sets this to False."""
    is_drawn: ClassVar[bool] = True
    """Whether the split depends on the seed."""

    @property
    def smallest(self) -> int:
        """The minimum number of samples per client."""
        return 1

    def data_options(self) -> dict[str, Any]:
        """Return the options with which a user's data must be loaded for this rule."""
        return {}

    def arrange(self, dataset: Dataset) -> Arrangement:
        """Prepare the dataset for this rule. Most rules leave it unchanged."""
        return Arrangement(dataset)

    @abstractmethod
    def draw(self, labels: Labels, seed: int) -> Sequence[IntArray]:
        """Return each client's training indices. `split` checks and sorts them."""

    def split(
        self,
        labels: npt.NDArray[np.integer],
        classes: int,
        seed: int,
        names: Sequence[str] = (),
        domain: IntArray | None = None,
        site: IntArray | None = None,
    ) -> ClientIndices:
        """Return each client's training indices in ascending order. A seed gives the same split on every machine."""
        checked = dataclasses.replace(_check_labels(labels, classes, names), domain=domain, site=site)
        check_whole_number("seed", seed, at_least=0)
        indices = self._join(self.draw(checked, seed)).ascending()
        self._check(indices, len(checked))
        return indices

    def describe(self) -> dict[str, object]:
        """Return the rule's name and parameters. `make_partition` makes the same rule from them."""
        return {"name": _rule_name(type(self))} | self._parameters()

    def _parameters(self) -> dict[str, object]:
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def _join(self, drawn: Sequence[IntArray]) -> ClientIndices:
        """Join the arrays that `draw` returned. Report anything else, because a user may have written the rule."""
        try:
            joined = ClientIndices.join(drawn)
        except (TypeError, ValueError) as error:
            found = "None" if drawn is None else f"a {type(drawn).__name__} ({error})"
            reason = f"draw returned {found}; expected a list with one array of sample indices per client"
            raise self.error(reason) from error
        # `join` silently turns fractions and masks into whole numbers.
        for part, indices in zip(drawn, joined, strict=True) if joined is not drawn else ():
            array = np.asarray(part)
            if array.dtype.kind == "b" or bool(np.any(array != indices)):
                raise self.error(f"draw returned an array of {array.dtype}; expected sample indices: whole numbers")
        return joined

    def _check(self, indices: ClientIndices, samples: int) -> None:
        given, sizes = indices.samples, indices.sizes
        if len(given) and (given.min() < 0 or given.max() >= samples):
            found = given.min() if given.min() < 0 else given.max()
            raise self.error(f"the sample index {found} does not exist; expected 0 to {samples - 1}")
        owner_counts = np.bincount(given, minlength=samples)  # how often each sample is assigned
        if (owner_counts > 1).any():
            raise self.error(f"sample {int(np.argmax(owner_counts > 1))} is assigned more than once")
        if self.uses_all and (owner_counts == 0).any():
            raise self.error(f"sample {int(np.argmax(owner_counts == 0))} goes to no client")
        if not len(indices):
            raise self.error("it makes no clients; expected at least one")
        self._check_number(len(indices))
        if sizes.min() < self.smallest:
            short = f"client {int(sizes.argmin())} gets {plural(int(sizes.min()), 'sample')}"
            raise self.error(f"{short}; expected at least {self.smallest}")

    def _check_number(self, drawn: int) -> None:
        """Refuse a split whose number of clients is not that of the rule's parameter `clients`, if the rule has one.

        If the parameter is None, the rule may make any number of clients.
        """
        asked = self._parameters().get("clients")
        if asked is not None and asked != drawn:
            raise self.error(f"draw returned {plural(drawn, 'client')}; expected {asked}, as clients={asked} says")

    def error(self, reason: str) -> UserError:
        """Make the error for an impossible split."""
        parameters = ", ".join(f"{key}={value}" for key, value in self._parameters().items())
        return UserError(f"partition {_rule_name(type(self))!r} ({parameters}): {reason}")

    def require_clients(self, clients: int, samples: int) -> None:
        """Raise `UserError` if there are too few samples for this many clients."""
        if clients * self.smallest > samples:
            most = samples // self.smallest
            raise self.error(
                f"{plural(clients, 'client')} with at least {plural(self.smallest, 'sample')} each need "
                f"{plural(clients * self.smallest, 'sample')}, but there {'is' if samples == 1 else 'are'} {samples}; "
                + (f"use at most {plural(most, 'client')}" if most else "use more data")
            )

    def require_labels(self, labels_per_client: int, labels: Labels) -> None:
        """Raise `UserError` if a client would need more labels than there are classes."""
        if labels_per_client > labels.classes:
            raise self.error(
                f"labels_per_client is {labels_per_client}, but there are {labels.classes} classes; "
                f"expected at most {labels.classes}"
            )

    def require_samples(
        self, needed: IntArray, available: IntArray, labels: Labels, shared_by: str = "clients"
    ) -> None:
        """Raise `UserError` if a class has fewer samples than clients, or shards, that share it."""
        lacking = np.flatnonzero(available < needed)
        if len(lacking):
            c = int(lacking[0])
            if not available[c]:
                raise self.error(
                    f"class {labels.names[c]!r} has no samples to share; expected at least one; leave the class out, "
                    "or use another partition"
                )
            samples = plural(int(available[c]), "sample")
            raise self.error(
                f"class {labels.names[c]!r} has {samples} to share among {needed[c]} {shared_by}; "
                "expected at least one each; use fewer clients"
            )


class CountedPartition(Partition):
    """A rule that decides only how many samples of each class a client gets. A seeded shuffle decides which ones."""

    @abstractmethod
    def counts(self, labels: Labels, seed: int) -> IntArray:
        """Return the number of samples per client and class: [clients, classes]."""

    def draw(self, labels: Labels, seed: int) -> Sequence[IntArray]:
        return deal(self.counts(labels, seed), labels, seed)


PARTITIONS: dict[str, type[Partition]] = {}
"""Every rule by name. `register` adds another."""

_Rule = TypeVar("_Rule", bound=type[Partition])


def register(rule: _Rule) -> _Rule:
    """Make the decorated rule available by name."""
    PARTITIONS[rule.name] = rule
    return rule


def partition_class(name: str) -> type[Partition]:
    """Find a rule by name, or a user's own as `package.module:Class`."""
    if name in PARTITIONS:
        return PARTITIONS[name]
    if ":" not in name:
        raise unknown("partition", name, PARTITIONS)
    module, attribute = import_user_module("partition", name, "Class")
    rule = getattr(module, attribute, None)
    if not isinstance(rule, type) or not issubclass(rule, Partition):
        found = "does not exist" if rule is None else f"is a {type(rule).__name__}"
        raise UserError(f"partition {name!r} {found}; expected a subclass of fedskew.Partition")
    if _lacks_decorator(rule) or inspect.isabstract(rule):
        raise UserError(f"partition {name!r} is incomplete; expected a frozen dataclass with a method draw")
    return rule


def _lacks_decorator(rule: type[Partition]) -> bool:
    """Return whether the class declares parameters of its own, but not with `@dataclass`."""
    parameters = [kind for kind in inspect.get_annotations(rule).values() if "ClassVar" not in str(kind)]
    return bool(parameters) and "__dataclass_fields__" not in vars(rule)


def require_rule(partition: object) -> None:
    """Refuse anything that is not the object of a rule, such as a rule's name."""
    if not isinstance(partition, Partition):
        raise UserError(f"partition is {partition!r}; expected a rule, for example fs.Dirichlet(clients=10, beta=0.1)")


def _rule_name(rule: type[Partition]) -> str:
    """Return the name by which `make_partition` finds the rule."""
    name = getattr(rule, "name", None)
    return name if name is not None and PARTITIONS.get(name) is rule else f"{rule.__module__}:{rule.__qualname__}"


def _plain(value: object) -> object:
    """Return a path as text, and a numpy number as a Python number. Files of runs and splits can store these."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, np.generic):
        return value.item()
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def make_partition(name: str, /, **params: object) -> Partition:
    """Make the rule `name` with these parameters, and defaults for the others."""
    rule = partition_class(name)
    fields = dataclasses.fields(rule)
    known = [field.name for field in fields]
    for key in params:
        if key not in known:
            raise unknown_parameter(f"partition {name!r}", key, known)
    required = [f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    missing = [name for name in required if name not in params]
    if missing:
        raise UserError(f"partition {name!r} needs {' and '.join(repr(key) for key in missing)}")
    return rule(**params)


def split_hash(indices: Sequence[IntArray]) -> str:
    """Return the SHA-256 of the clients' sizes and sample indices, which is the same on every machine."""
    joined = ClientIndices.join(indices)
    digest = hashlib.sha256(joined.sizes.astype("<i8", copy=False).tobytes())
    digest.update(np.ascontiguousarray(joined.samples, "<i8").data)
    return digest.hexdigest()


def deal(counts: IntArray, labels: Labels, seed: int) -> ClientIndices:
    """Give each client its number of samples of each class. The seed shuffles the samples within each class."""
    clients = len(counts)
    owners = np.full(len(labels), -1, np.int64)
    in_class_order = stable_order(labels.y)
    members = np.split(in_class_order, np.cumsum(labels.class_sizes)[:-1])
    for c, indices in enumerate(members):
        takers = np.repeat(np.arange(clients), counts[:, c])
        shuffled = indices[permutation(len(indices), seed, "partition samples", c)]
        owners[shuffled[: len(takers)]] = takers
    return group_by_client(owners, clients)


def group_by_client(owners: IntArray, clients: int) -> ClientIndices:
    """Return each client's samples. `owners` is each sample's client, or −1 for none."""
    owned = np.flatnonzero(owners >= 0)
    keys = owners[owned]
    return ClientIndices(owned[stable_order(keys)], np.bincount(keys, minlength=clients))


def stable_order(keys: IntArray) -> IntArray:
    """Return `np.argsort(keys, kind="stable")` for keys ≥ 0. With millions of keys, this is faster than numpy.

    numpy sorts 16-bit numbers fast, by radix sort. So this sorts by the lowest 16 bits, then by the next 16, and so on.
    """
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    shift = 16
    while int(keys.max(initial=0)) >> shift:
        order = order[np.argsort((keys >> shift).astype(np.uint16)[order], kind="stable")]
        shift += 16
    return order


def share_equally(class_sizes: IntArray, owned: npt.NDArray[np.bool_]) -> IntArray:
    """Divide each class equally among its owners and return the counts. The first owners may get one sample more.

    `owned` [clients, classes] marks which client owns which class.
    """
    owner_counts = np.maximum(owned.sum(axis=0), 1)
    rank = np.cumsum(owned, axis=0) - 1
    shares = class_sizes // owner_counts + (rank < class_sizes % owner_counts)
    return np.where(owned, shares, 0)


def random_orders(rows: int, columns: int, seed: int, purpose: str) -> IntArray:
    """Return an independent permutation of range(columns) per row."""
    ranks = permutation(rows * columns, seed, purpose).reshape(rows, columns)
    return np.argsort(ranks, axis=1)


def check_whole_number(name: str, value: object, *, at_least: int) -> None:
    """Raise `UserError` unless the value is a whole number ≥ `at_least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < at_least:
        raise UserError(f"{name} is {value!r}; expected a whole number ≥ {at_least}")


def check_positive_number(name: str, value: object, *, at_most: float = math.inf) -> None:
    """Raise `UserError` unless the value is a finite number above 0 and at most `at_most`."""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not 0 < float(value) <= at_most or math.isinf(float(value)):  # type: ignore[arg-type]
        limit = "" if math.isinf(at_most) else f" and at most {at_most:g}"
        raise UserError(f"{name} is {value!r}; expected a finite number above 0{limit}")


def check_path(name: str, value: object) -> None:
    """Raise `UserError` unless the value is a path."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise UserError(f"{name} is {value!r}; expected the path of a file")


def _check_labels(labels: npt.NDArray[np.integer], classes: int, names: Sequence[str]) -> Labels:
    y = np.asarray(labels)
    if not y.size:
        raise UserError("there are no labels; expected at least one sample")
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise UserError(f"labels have shape {y.shape} and type {y.dtype}; expected one whole number per sample")
    if y.min() < 0 or y.max() >= classes:
        raise UserError(f"labels range from {y.min()} to {y.max()}; expected 0 to {classes - 1}")
    return Labels(y.astype(np.int64, copy=False), tuple(names) or tuple(str(c) for c in range(classes)))
