"""What clients keep from one of their rounds to the next: before the first, after each, and how much in all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedskew.engine import ModelState, RoundResult, on_host
from fedskew.experiment.config import Config
from fedskew.experiment.round.client_states import ClientStates
from fedskew.experiment.round.own_models import as_state
from fedskew.experiment.round.phases import Round
from fedskew.experiment.round.state import RunState
from fedskew.methods import Part, Stage, Tensors


def fresh_state(parts: Sequence[Part], params: Tensors) -> Tensors:
    """What a client keeps before its first round: one for all of them, on the host as the others are."""
    state: Tensors = {}
    for part in parts:
        state |= part.client_state(params)
    return {name: t.cpu() for name, t in state.items()}


def kept_after(this: Round, result: RoundResult, finite: npt.NDArray[np.bool_], before: RunState) -> ClientStates:
    """What the clients keep after a round; one whose update is not finite, what it had `before`."""
    rows = np.flatnonzero(finite).tolist()
    states = as_state(result.trained) if this.stage.cohort == "alone" else result.states
    if not states or not rows:
        return before.clients
    states = on_host(states)
    kept = {int(this.clients[row]): {name: t[row] for name, t in states.items()} for row in rows}
    return before.clients.updated(this.stage.model, before.round + 1, kept)


def bytes_of_one(stage: Stage, parts: Sequence[Part], model: ModelState) -> int:
    """What one client keeps in a stage with these parts."""
    state = fresh_state(parts, model.params)
    if stage.cohort == "alone":
        state |= as_state(model)
    return sum(t.nbytes for t in state.values())


def most_states(config: Config, clients: int, rounds: int) -> int:
    """How many states there are at the most after so many rounds, older ones for checkpoints included."""
    a_round = config.clients_per_round or clients
    replaced = 2 * config.checkpoint_every * a_round  # by newer states, and kept for two checkpoints
    return min(rounds * a_round, clients + replaced)
