"""Two reference bounds for federated methods: all data in one place, and every client on its own.

    centralised  One model is trained by SGD on all clients' samples together. In each round it trains on as many
                 samples, for as many epochs, as the round's clients would; it draws them from all clients' samples
    local-only   Every client trains its own model in the rounds in which it is drawn, and nothing is averaged. The
                 reported accuracy is the mean over all clients of their models' accuracy on the common test set

Neither is a federated method: the first gives up privacy, the second gives up collaboration. Both have FedAvg's compute
per round, its learning rates and its fresh optimiser in each round. Neither can be combined with other methods.
`local-only` keeps every client's model and saves that of the client with most samples as the model of the run.

Sent to the server: every sample with `centralised`, nothing with `local-only`.
Extra compute: none.
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
    """One model on all the data, at FedAvg's compute: an upper bound for federated methods."""

    sends = "all its samples"
    reveals: ClassVar[Reveals] = "all labels"
    stands_alone = True

    def stages(self, rounds: int, local_epochs: int, notes: Notes) -> Sequence[Stage]:  # noqa: ARG002
        return [Stage("train", rounds, CrossEntropy(), cohort="pooled")]


@method("local-only", paper="a reference bound, not a federated method")
@dataclass(frozen=True)
class LocalOnly(Schedule):
    """Every client on its own, tested on all classes: what federated methods must beat."""

    stands_alone = True

    def stages(self, rounds: int, local_epochs: int, notes: Notes) -> Sequence[Stage]:  # noqa: ARG002
        return [Stage("train", rounds, CrossEntropy(), cohort="alone")]
