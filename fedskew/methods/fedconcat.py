"""FedConcat: clients with similar labels train an encoder together, and one head learns on the concatenated encoders.

Diao et al., "Exploiting label skews in federated learning with model concatenation", AAAI 2024.

    1. clusters   k-means on the clients' label distributions n_c/n
    2. encoders   FedAvg within each cluster, which gives one model per cluster
    3. head       FedAvg of one linear head on the frozen, concatenated encoders: a few batches per client and round,
                  with equal weights for all clients

The final model has one encoder per cluster, so inference takes one forward pass per cluster.

Sent to the server: the client's label counts once, then the model; in the last stage only the head.
Extra compute: in the last stage one forward pass of every encoder per sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from fedskew.errors import expect
from fedskew.methods.catalogue import method
from fedskew.methods.clustering import cluster_by_labels
from fedskew.methods.fedavg import CrossEntropy
from fedskew.methods.parts import Reveals
from fedskew.methods.stages import Notes, Schedule, Stage, Survey


@method("fedconcat", paper="Diao et al., AAAI 2024")
@dataclass(frozen=True)
class FedConcat(Schedule):
    """One encoder per cluster of clients with similar labels, and one head on all encoders."""

    clusters: int = 5
    """The number of clusters. There are fewer if the clients have fewer distinct label distributions."""
    encoder_rounds: int | None = None
    """Rounds per cluster; default: the run's rounds. Each cluster gets its share of `clients_per_round`, so all
    encoders together cost about as much as FedAvg."""
    head_rounds: int | None = None
    """Rounds of the head; default: the run's rounds. The published code uses 50 rounds for the encoders and 1000 for
    the head."""
    head_batches: int = 3
    """Batches per client in a round of the head."""
    head_start: Literal["random", "joined"] = "random"
    """Whether the head starts with random weights or as the concatenation of the clusters' heads. The published code
    concatenates them if there are many classes."""
    largest: float | None = None
    """The maximum size of a cluster, relative to an even share of the clients; default: no limit. The published code
    uses 1.2 if there are many classes."""

    sends = "label counts once"
    reveals: ClassVar[Reveals] = "label counts"
    extra_compute = "1 forward of every encoder per sample in the head's rounds"
    needs_features = True
    needs_linear_head = True
    trains_encoders = True
    takes_class_weights = True

    def __post_init__(self) -> None:
        expect(self.clusters >= 1, "clusters", self.clusters, "a whole number ≥ 1")
        for name in ("encoder_rounds", "head_rounds"):
            value = getattr(self, name)
            expect(value is None or value >= 1, name, value, "a whole number ≥ 1")
        expect(self.head_batches >= 1, "head_batches", self.head_batches, "a whole number ≥ 1")
        expect(self.largest is None or self.largest >= 1, "largest", self.largest, "a number ≥ 1")

    def stages(self, rounds: int, local_epochs: int, notes: Notes) -> Sequence[Stage]:  # noqa: ARG002
        first = Stage("clusters", 0, CrossEntropy(), survey="labels")
        if "clusters" not in notes:  # `conclude` adds them after the first stage
            return [first]
        names = [f"encoder.{i}" for i in range(len(notes["clusters"]))]
        encoders = [
            Stage(f"encoder {i}", self.encoder_rounds or rounds, CrossEntropy(), model=name, clients=tuple(cluster))
            for i, (name, cluster) in enumerate(zip(names, notes["clusters"], strict=True))
        ]
        head = Stage(
            "head",
            self.head_rounds or rounds,
            CrossEntropy(),
            concatenates=tuple(names),
            new_head=self.head_start == "random",
            local_batches=self.head_batches,
            average="uniform",
            cost=len(names) / 3,  # one forward pass per encoder, which is a third of a training step
        )
        return [first, *encoders, head]

    def conclude(self, stage: Stage, survey: Survey) -> Notes:  # noqa: ARG002
        return {"clusters": cluster_by_labels(survey.label_counts, self.clusters, self.largest)}
