"""What several parts do together: the server's step, and the passes over clients' data that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fedskew.methods.parts import Objective, Part, ServerRule, Tensors, Updates


def server_step(
    rule: ServerRule, parts: Sequence[Part], sent: Tensors, updates: Updates, state: Tensors
) -> tuple[Tensors, Tensors]:
    """The next global parameters by the rule, and the server's next state by all parts."""
    params, after = rule.aggregate(sent, updates, state)
    after = {**state, **after}
    for part in parts:
        after |= part.next_server_state(updates, state)
    return params, after


Hook = Literal["opening", "closing", "perturbed"]


def asks_for(part: Part, hook: Hook) -> bool:
    """Whether a part, or one that it is made of, does something in this hook."""
    return any(_overrides(member, hook) for member in part.members)


def _overrides(part: Part, hook: Hook) -> bool:
    owner = Objective if hook == "perturbed" else Part
    return getattr(type(part), hook, None) not in (None, getattr(owner, hook))


def pass_visits(parts: Sequence[Part]) -> float:
    """What the passes over a client's data cost, a sample, in forward and backward passes of a local step."""
    members = [member for part in parts for member in part.members]
    closing = [member for member in members if _overrides(member, "closing")]
    forward = 1 / 3
    opened = forward if any(_overrides(member, "opening") for member in members) else 0.0
    if not closing:
        return opened
    return opened + (1.0 if any(member.needs_gradient for member in closing) else forward)
