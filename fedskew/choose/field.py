"""The field of a race: its candidates. A candidate is a method with settings and a learning rate."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedskew.errors import UserError, expect
from fedskew.experiment.config import Config, with_values
from fedskew.methods import BUILT_IN, Method, Schedule, canonical_name, find, make_method

BASELINE = "fedavg"

Settings = Mapping[str, Any]

DEFAULT_FIELD: dict[str, Sequence[Settings]] = {
    "fedavg": (),
    "fedprox": ({"mu": 0.1}, {"mu": 0.001}),
    "fedavgm": ({"server_momentum": 0.9}, {"server_momentum": 0.4}),
    "fedadam": ({"server_lr": 0.003}, {"server_lr": 0.03}),
    "fedexp": (),
    "scaffold": ({"server_lr": 0.5},),
    "feddyn": ({"alpha": 0.01},),
    "fedsam": ({"rho": 0.03},),
    "fedlc": ({"tau": 1.0},),
    "fedrs": ({"alpha": 0.5}, {"alpha": 0.9}),
    "fedntd": ({"beta": 0.3},),
    "fedlmd": ({"beta": 0.3},),
    "fedlmd-tf": ({"beta": 0.3},),
    "fedvls": ({"distill_weight": 0.0, "suppress_weight": 0.0}, {"distill_weight": 0.5}),
}
"""The methods that are raced by default. Each is tried with its default settings and, if the budget allows, with the
settings listed here.

The list has the usual server rules, and the methods that were best, or within a point of the best, in some setting of
RESULTS.md.
"""

LR_FACTORS = (1.0, 1 / 3, 3.0)
"""Every method, including FedAvg, is tried with the configured learning rate times each of these. The products with
1/3 and 3 are rounded to two significant digits."""


@dataclass(frozen=True)
class Candidate:
    """A method with its settings and a learning rate."""

    method: str
    lr: float
    params: Settings = field(default_factory=dict)
    """The settings that differ from the defaults."""

    @property
    def key(self) -> str:
        """A file name that identifies the candidate."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return f"{self.method.replace(':', '_')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    @property
    def is_baseline(self) -> bool:
        return self.method == BASELINE

    @property
    def label(self) -> str:
        """The method and its settings, without the learning rate."""
        listed = ", ".join(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
                           for name, value in self.params.items())  # fmt: skip
        return f"{self.method} ({listed})" if listed else self.method

    def __hash__(self) -> int:
        return hash(self.key)

    def config(self, base: Config) -> Config:
        """The configuration of a run of this candidate."""
        return with_values(base, {"method": {"name": self.method, **self.params}, "lr": self.lr})

    def to_json(self) -> dict[str, Any]:
        return {"method": self.method, "params": dict(self.params), "lr": self.lr}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Candidate:
        return cls(content["method"], content["lr"], dict(content["params"]))


def field_methods(names: Iterable[str] | None) -> tuple[str, ...]:
    """Check the names and return the methods of a race. FedAvg is always among them, as the baseline."""
    names = _names(names)
    chosen = [BASELINE, *(DEFAULT_FIELD if names is None else map(canonical_name, names))]
    if set(chosen) == {BASELINE}:
        raise UserError(f"methods has no method besides {BASELINE}, which always takes part; expected at least one")
    for name in chosen:
        _check_method(make_method(name))
    return tuple(dict.fromkeys(chosen))


def _names(names: Iterable[str] | None) -> list[str] | None:
    """Return the names as a list. Refuse names with settings, and anything that is not a list of names."""
    if names is None:
        return None
    listed = list(names) if isinstance(names, Iterable) and not isinstance(names, str) else names
    are_names = isinstance(listed, list) and all(isinstance(name, str) for name in listed)
    expect(are_names, "methods", listed, "a list of names, for example ['fedprox', 'fedvls']")
    if (given := next((name for name in listed if ":" in name and "=" in name), None)) is not None:
        raise UserError(f"methods has {given!r}; expected names without settings, because a race tries settings itself")
    return list(listed)


def _check_method(method: Method) -> None:
    """Refuse a method that a race would misjudge."""
    if isinstance(method.objective, Schedule):
        raise UserError(
            f"method {method.name!r} trains in stages and cannot be raced, because its rounds are not comparable "
            "with those of other methods; expected methods without stages, or `fedskew compare` for this one"
        )
    if method.calibration is not None:
        raise UserError(
            f"method {method.name!r} corrects its model in the last round only and cannot be raced, because a race "
            "compares means over several rounds; expected methods without a calibration, or `fedskew compare` for "
            "this one"
        )
    if method.personal is not None and not method.personal.has_global_model:
        raise UserError(
            f"method {method.name!r} has no global model and cannot be raced, because a race tests a model on the "
            "samples of all clients; expected methods with a global model, or `fedskew compare --client-test 0.2` for "
            "this one"
        )


def are_known_everywhere(methods: Iterable[str]) -> bool:
    """Whether every process finds these methods. A method that the user's program registers is known only there."""
    return {find(single).name for name in methods for single in name.split("+") if ":" not in single} <= BUILT_IN


def make_field(methods: Sequence[str], lr: float, settings: int) -> list[Candidate]:
    """Return all candidates: every method with its default settings and every learning rate.

    If `settings` is 1, the settings in `DEFAULT_FIELD` are tried too, with the configured learning rate. If it is 2,
    they are tried with every learning rate.
    """
    rates = [lr if factor == 1 else _rounded(lr * factor) for factor in LR_FACTORS]
    found = [Candidate(method, rate) for method in methods for rate in rates]
    for method in methods if settings else ():
        tried_rates = rates if settings > 1 else rates[:1]
        found += [Candidate(method, rate, params) for params in DEFAULT_FIELD.get(method, ()) for rate in tried_rates]
    return found


def _rounded(rate: float) -> float:
    """Round to two significant digits, which are easier to read."""
    return float(f"{rate:.2g}")
