"""The methods that `make test` runs on every engine use every hook that any method uses."""

from __future__ import annotations

from method_cases import KINDS, by_kind

from fedskew.methods import METHODS, Objective, Personal, Regulariser, Schedule, ServerRule, Solver, Weighting

WORDS = {"reveals", "sends", "shares", "extra_compute", "check", "plain_gradient"}
"""Declarations for readers and checks before training: no engine acts on them."""

ELSEWHERE = {
    "Objective.proximal", "Objective.class_outputs", "Solver.changes_state", "ServerRule.needs_server_data",
}  # fmt: skip
"""Hooks of single methods, which test_fedsmoo.py, test_fedrod.py and test_fedlaw.py run on both engines."""


def hooks(method: str) -> set[str]:
    """The hooks and declarations that its parts override, each with the kind of part."""
    found = set()
    for part in METHODS[method].parts:
        kinds = (Objective, Schedule, Regulariser, Solver, Personal, Weighting, ServerRule)
        kind = next(base for base in kinds if issubclass(part, base))
        names = [name for name in dir(kind) if not name.startswith("_") and name not in WORDS]
        found |= {f"{kind.__name__}.{name}" for name in names if getattr(part, name) is not getattr(kind, name)}
    return found


def test_the_methods_of_a_push_use_every_hook() -> None:
    every, pushed = (set().union(*map(hooks, methods)) for methods in (METHODS, KINDS.values()))
    assert len(every) > 25
    assert every <= pushed | ELSEWHERE
    assert every >= ELSEWHERE


def test_the_full_matrix_has_every_method() -> None:
    parameters = by_kind(METHODS)
    assert [parameter.values[0] for parameter in parameters] == list(METHODS)
    assert {parameter.values[0] for parameter in parameters if not parameter.marks} == set(KINDS.values())
