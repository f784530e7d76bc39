"""FedNova: divides updates by the number of local steps, so that clients with more steps do not bias the objective.

Wang et al., "Tackling the objective inconsistency problem in heterogeneous federated optimization", NeurIPS 2020.

    d_k = (w − w_k)/‖A_k‖₁,  w ← w − (Σ a_k·‖A_k‖₁)·Σ a_k·d_k

w is the global model, w_k is the model that client k sends back, and a_k is its weight in the average. ‖A_k‖₁ is the
number of local steps or, with momentum, the number of steps without momentum that would move as far. A client that
takes no step has d_k = 0.

Sent to the server: the model, the client's number of samples and ‖A_k‖₁.
Extra compute: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedskew.methods.catalogue import method
from fedskew.methods.parts import Client, ServerRule, Tensors, Trained, Updates, weighted_mean


@method("fednova", paper="Wang et al., NeurIPS 2020")
@dataclass(frozen=True)
class FedNova(ServerRule):
    """The mean update per local step, times the mean number of steps."""

    sends = "local steps (one number)"
    needs_sgd = True

    def uplink(self, trained: Trained, client: Client) -> Tensors:  # noqa: ARG002
        return {"local_steps": trained.effective_steps()}

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        steps = updates.uplink["local_steps"].to(updates.weights.dtype)
        mean_steps = updates.weights @ steps
        scales = updates.weights * mean_steps / steps.clamp(min=1)
        update = weighted_mean(updates.changes(sent), scales)
        return {name: w + update[name] for name, w in sent.items()}, state
