"""FedRoD: a generic head learns with a balanced softmax, and every client adds the logits of its own personal head.

Chen and Chao, "On bridging generic and personalized federated learning for image classification", ICLR 2022.

    client   L = CE(g + log n_c, y) + CE(⌊g⌋ + P⌊h⌋, y)        g = G h, ⌊·⌋ without gradient
    server   the mean of encoder and generic head G

h are the features, and n_c the client's label counts. The first term trains encoder and generic head as if the
client's classes were balanced. A vacant class drops out of that term's softmax. The second term trains only the
personal head P, for the client's own label distribution. The global model predicts g, and a client's own model
g + P h.

Sent to the server: the model without the personal head, and the client's number of samples.
Extra compute: negligible.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fedskew.losses import calibrated_cross_entropy, cross_entropy
from fedskew.methods.catalogue import register
from fedskew.methods.parts import Client, Objective, Outputs
from fedskew.methods.personal import Personal


@dataclass(frozen=True)
class GenericAndPersonal(Objective):
    """The balanced softmax for the generic head, and the cross entropy for the personal one."""

    head = "personal"
    takes_class_weights = True

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        generic, personal = out.logits.chunk(2, dim=-1)  # g, and ⌊g⌋ + P⌊h⌋, as the head returns them in training
        balanced = calibrated_cross_entropy(generic, y, client.label_counts, client.class_weights)
        return balanced + cross_entropy(personal, y, client.class_weights)

    def class_outputs(self, out: Outputs) -> Outputs:
        return replace(out, logits=out.logits.chunk(2, dim=-1)[0])


@dataclass(frozen=True)
class PersonalHeads(Personal):
    """The personal heads stay on the clients. All layers are trained together."""

    has_global_model = True
    shares = "model without the personal head"

    def keeps(self) -> tuple[str, ...]:
        return ("head.personal",)


register(
    "fedrod",
    parts=(GenericAndPersonal, PersonalHeads),
    paper="Chen and Chao, ICLR 2022",
    summary="A generic head with a balanced softmax, and a personal head of each client, whose logits are added.",
)
