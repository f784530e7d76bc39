"""What the engines and the server ask of all parts together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fedskew.methods.parts import Objective, Part, ServerRule, Tensors, Updates


def server_step(
    rule: ServerRule, parts: Sequence[Part], sent: Tensors, updates: Updates, state: Tensors
) -> tuple[Tensors, Tensors]:
    """Return the next global parameters, from the server rule, and the next server state, from all parts."""
    params, after = rule.aggregate(sent, updates, state)
    after = {**state, **after}
    for part in parts:
        after |= part.next_server_state(updates, state)
    return params, after


Hook = Literal["opening", "closing", "perturbed"]
"""The hooks that cost something even if they do nothing; the engines skip them unless a part overrides them."""


def uses_hook(part: Part, hook: Hook) -> bool:
    """Whether the part, or one of its members, overrides this hook."""
    return any(_overrides(member, hook) for member in part.members)


def _overrides(part: Part, hook: Hook) -> bool:
    base = Objective if hook == "perturbed" else Part
    return getattr(type(part), hook, None) not in (None, getattr(base, hook))


def pass_visits(parts: Sequence[Part]) -> float:
    """The cost per sample of the passes over a client's data, in units of one local step on that sample.

    A local step is a forward and a backward pass, and a forward pass is a third of it.
    """
    members = [member for part in parts for member in part.members]
    closing = [member for member in members if _overrides(member, "closing")]
    forward = 1 / 3
    opened = forward if any(_overrides(member, "opening") for member in members) else 0.0
    if not closing:
        return opened
    return opened + (1.0 if any(member.needs_gradient for member in closing) else forward)
