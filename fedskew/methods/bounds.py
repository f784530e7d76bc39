"""Two reference bounds for federated methods: training on all data in one place, and each client training alone.

    centralised  One model is trained on the samples of all clients. Each round uses as many samples and epochs as
                 the round's clients would
    local-only   Every client trains its own model in the rounds that draw it, and nothing is averaged. The reported
                 accuracy is the mean of all clients' accuracies on the common test set. The other metrics, such as
                 macro F1, follow from the sum of the clients' confusion matrices

Neither is a federated method: the first gives up privacy, the second gives up collaboration. Both have FedAvg's compute
per round, its learning rates and a fresh optimiser in each round. Neither can be combined with other methods.
`local-only` keeps every client's model. The model saved with the run is that of the client with the most samples.

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


@method("centralised", "centralized", paper="Reference bound, not a federated method")
@dataclass(frozen=True)
class Centralised(Schedule):
    """One model trained on all data, with FedAvg's compute: an upper bound for federated methods."""

    sends = "all its samples"
    reveals: ClassVar[Reveals] = "all labels"
    stands_alone = True
    multi_label = True
    takes_class_weights = True

    def stages(self, rounds: int, local_epochs: int, notes: Notes) -> Sequence[Stage]:  # noqa: ARG002
        return [Stage("train", rounds, CrossEntropy(), cohort="pooled")]


@method("local-only", paper="Reference bound, not a federated method")
@dataclass(frozen=True)
class LocalOnly(Schedule):
    """Every client trains alone and is tested on all classes: the bound that federated methods must beat."""

    stands_alone = True
    multi_label = True
    takes_class_weights = True

    def stages(self, rounds: int, local_epochs: int, notes: Notes) -> Sequence[Stage]:  # noqa: ARG002
        return [Stage("train", rounds, CrossEntropy(), cohort="alone")]
