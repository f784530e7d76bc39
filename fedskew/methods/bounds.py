"""The two bounds between which federated methods lie: all data in one place, and every client for itself.

    centralised  one model, trained by SGD on all clients' samples together. In each round it sees as many samples, as
                 often, as the round's clients would: drawn anew from the samples of all clients
    local-only   every client trains its own model in the rounds in which it is drawn, and none are averaged. What is
                 reported is the mean over all clients of their models' accuracy on the common test set

Neither is a federated method: the first gives up what federated learning is for, the second does without it. Both have
the compute of FedAvg's rounds, its learning rates and its fresh momentum in each round, and cannot be combined with
anything. `local-only` keeps every client's model; as *the* model of the run it saves that of the client with most
samples. Leaves the client: every sample with `centralised`, nothing with `local-only`. Extra compute: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedskew.methods.catalogue import method
from fedskew.methods.fedavg import CrossEntropy
from fedskew.methods.parts import Reveals
from fedskew.methods.stages import Notes, Schedule, Stage


@method("centralised", "centralized", paper="a reference bound, not a federated method")
@dataclass(frozen=True)
class Centralised(Schedule):
    """One model on all the data, at the compute of FedAvg: what federated methods hope to reach."""

    sends = "all its samples"
    reveals: ClassVar[Reveals] = "all labels"
    stands_alone = True

    def stages(self, rounds: int, local_epochs: int, notes: Notes) -> Sequence[Stage]:  # noqa: ARG002
        return [Stage("train", rounds, CrossEntropy(), cohort="pooled")]


@method("local-only", paper="a reference bound, not a federated method")
@dataclass(frozen=True)
class LocalOnly(Schedule):
    """Every client for itself, tested on everyone's classes: what federated methods must beat."""

    stands_alone = True

    def stages(self, rounds: int, local_epochs: int, notes: Notes) -> Sequence[Stage]:  # noqa: ARG002
        return [Stage("train", rounds, CrossEntropy(), cohort="alone")]
