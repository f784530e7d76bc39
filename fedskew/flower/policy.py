"""The limits that a site sets, whatever the server requests, under `policy` in its site.yaml.

    policy:
      methods: [fedavg, fedvls]      # methods that may train here; default: all
      reveals: [label presence]      # what may be revealed; default: what the method declares about labels, or
                                     # nothing if the site demands noise
      smallest_group: 5              # column sums hide groups of fewer rows
      rounds: 200                    # largest number of rounds of a run
      noise: 1.0                     # smallest noise multiplier of local privacy; default: no noise needed
      clip: 2.0                      # largest clip of local privacy; needs `noise`
      epsilon: 8.0                   # privacy budget of the whole site, for all runs together; default: no budget
      example_epsilon: 8.0           # privacy budget of one sample, for all runs together; default: no budget
      delta: 1.0e-5                  # δ of the budgets
      trainings_per_round: 7         # how many different training requests the site answers for one round
      tests_per_round: 2             # how many models the site tests for one round; the second is for a restart
      survey: {round_to: 10}         # how answers to surveys before training hide single samples; default: no answers
      evaluate: {models: 1}          # how many finished models the site tests; default: none
      minutes: 120                   # longest time that the site works for a run
      hours: 20-6                    # hours of the day in which the site works, local time
      require: [secure-aggregation]  # what a run must use; default: nothing

`column sums` (counts, means, deviations and categories of a table's columns) and `local tests` (accuracies before and
after local training) leave a site only if `reveals` lists them.

A site whose policy has `epsilon`, `example_epsilon` or `noise` demands noise. Nothing about its data leaves it without
noise, except:

    what `reveals` lists        the two items above, `losses`, `updates` to which the server adds the noise, and what a
                                method reveals about labels
    tests                       if `metrics` in site.yaml allows them
    surveys before training     if the policy has `survey`
    tests of finished models    if the policy has `evaluate`
    the number of samples       always; with secure aggregation, only in a total over the sites

The site's worker checks every request against the policy.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, TypeVar, get_args

from fedskew.data.column_sums import SMALLEST_GROUP
from fedskew.errors import UserError, did_you_mean, expect, nearest, unknown
from fedskew.experiment.config import Config
from fedskew.flower.site_survey import SurveyRules
from fedskew.flower.wire import Facts
from fedskew.methods import METHODS
from fedskew.methods.class_weights import entries_name, entries_with_weights
from fedskew.methods.parts import Reveals

COLUMN_SUMS, LOCAL_TESTS = "column sums", "local tests"
"""Items that leave a site only if `reveals` lists them."""
LOSSES, UPDATES = "losses", "updates"
"""Items that have no noise when they leave a site. A site that demands noise sends them only if `reveals` lists them.

`updates` are those to which the server adds the noise. Updates to which the site adds it need no entry in `reveals`.
"""
SECURE_AGGREGATION = "secure-aggregation"
"""The only value of `require`."""
_HOURS = re.compile(r"(\d{1,2})-(\d{1,2})")

T = TypeVar("T", int, float)


@dataclass(frozen=True)
class EvaluationRules:
    """What `fedskew federate evaluate` may learn at the site."""

    models: int = 1
    """How many different models with the same classes and columns the site tests."""
    by_site: bool = True
    """Whether the site's own results may be listed. If not, they count only in the total. The site is always named."""


@dataclass(frozen=True)
class Policy:
    """The limits of one site. None means no limit, unless the field says otherwise."""

    methods: tuple[str, ...] | None = None
    reveals: tuple[str, ...] | None = None
    """None: what the method declares about labels, or nothing if the site demands noise."""
    rounds: int | None = None
    noise: float | None = None
    clip: float | None = None
    hours: tuple[int, int] | None = None
    epsilon: float | None = None
    """Privacy budget of the whole site, for all updates together. `site_ledger.py` keeps the account."""
    example_epsilon: float | None = None
    """Privacy budget of one sample, for all updates together."""
    delta: float = 1e-5
    minutes: float | None = None
    trainings_per_round: int = 7
    """How many different requests for the same round the site answers. The default is enough, because a server
    restarts at most six times in a row without a new update."""
    tests_per_round: int = 2
    """How many models the site tests for one round. If the round is repeated after a restart, its model may differ."""
    smallest_group: int = SMALLEST_GROUP
    """Column sums hide groups of fewer rows than this."""
    survey: SurveyRules | None = None
    """How the site answers surveys before training. None: it does not."""
    evaluate: EvaluationRules | None = None
    """None: the site does not test finished models."""
    require: tuple[str, ...] = ()
    """What a run must use."""

    def requires(self, item: str) -> bool:
        """Whether `require` lists this item."""
        return item in self.require

    @property
    def demands_noise(self) -> bool:
        """Whether the policy has a key that demands noise."""
        return self.noise_demand is not None

    @property
    def noise_demand(self) -> str | None:
        """The first key of the policy that demands noise. None if the policy has no such key."""
        return next((key for key in ("epsilon", "example_epsilon", "noise") if getattr(self, key) is not None), None)

    @property
    def allowed_labels(self) -> tuple[str, ...] | None:
        """What a method may reveal about labels. None means anything that it declares."""
        return () if self.reveals is None and self.demands_noise else self.reveals

    def allows(self, item: str) -> bool:
        """Whether `reveals` lists this item."""
        return item in (self.reveals or ())

    def require_run(self, config: Config) -> None:
        """Refuse a run if its method, what it reveals about labels, or its number of rounds is not allowed."""
        methods = [part.strip() for part in config.method.split("+")]
        for method in methods if self.methods is not None else ():
            if method not in (self.methods or ()):
                allowed = ", ".join(self.methods or ()) or "none"
                raise UserError(f"this site does not allow the method {method!r} (policy.methods: {allowed})")
        permitted = self.allowed_labels
        for item in revealed_by(config) if permitted is not None else ():
            if item not in (permitted or ()):
                allowed = ", ".join(permitted or ()) or "nothing"
                name = entries_name(entries_with_weights(config.method, config.class_weights))
                raise UserError(f"{name} reveals {item}; this site allows {allowed} (policy.reveals)")
        if self.rounds is not None and config.rounds > self.rounds:
            raise UserError(
                f"the run has {config.rounds} rounds; this site allows at most {self.rounds} (policy.rounds)"
            )

    def require_request(self, facts: Facts, now: datetime) -> None:
        """Refuse a wrong hour, a round beyond the limit, too little noise and too large a clip."""
        if self.hours is not None and not _within(now.hour, *self.hours):
            first, last = self.hours
            raise UserError(f"this site works from {first} to {last} o'clock only (policy.hours)")
        if facts["kind"] != "train":
            return
        round = facts["key"]["round"] + 1
        if self.rounds is not None and round > self.rounds:
            raise UserError(
                f"round {round} is requested; this site allows at most {self.rounds} rounds (policy.rounds)"
            )
        self.require_local_noise(facts["noise"])

    def refuse_items_without_noise(self, privacy: str, share_loss: bool) -> None:
        """If the site demands noise, refuse runs that send losses, or updates to which the server adds the noise.

        A run is not refused for an item that `reveals` lists. `privacy` is the run's: local, central, example or none.
        """
        if not self.demands_noise:
            return
        demand = f"this site demands noise (policy.{self.noise_demand})"
        if privacy == "central" and not self.allows(UPDATES):
            sample_noise_suffices = self.epsilon is None and self.noise is None
            kinds = "'example' or 'local'" if sample_noise_suffices else "'local'"
            raise UserError(
                f"{demand}, but the server adds it after the updates have left; expected federation.privacy = {kinds}, "
                f"or policy.reveals: [{UPDATES}]"
            )
        if share_loss and not self.allows(LOSSES):
            raise UserError(
                f"{demand}, but training losses have none; expected federation.share_loss = false, or policy.reveals: "
                f"[{LOSSES}]"
            )

    def require_secure_aggregation(self, is_used: bool) -> None:
        """Refuse a run without secure aggregation, if the site requires it."""
        if self.requires(SECURE_AGGREGATION) and not is_used:
            raise UserError(
                f"this site takes part only in runs with secure aggregation (policy.require: {SECURE_AGGREGATION}); "
                "expected federation.secure_aggregation = true"
            )

    def require_local_noise(self, noise: list[float] | None) -> None:
        """Refuse too little local noise or too large a clip. `noise` is the clip and the noise multiplier.

        `noise` is None if the run has no local noise.
        """
        if self.noise is None:
            return
        if noise is None:
            raise UserError("this site demands local noise (policy.noise); expected federation.privacy = 'local'")
        clip, multiplier = noise
        if multiplier < self.noise:
            raise UserError(
                f"the noise multiplier is {multiplier:g}; this site needs at least {self.noise:g} (policy.noise)"
            )
        if self.clip is not None and clip > self.clip:
            raise UserError(f"updates are clipped at {clip:g}; this site allows at most {self.clip:g} (policy.clip)")


def revealed_by(config: Config) -> list[str]:
    """List what a run's method and class weights reveal about labels, in the words of `reveals`."""
    entries = entries_with_weights(config.method, config.class_weights)
    words = [word for entry in entries for word in entry.reveals.split(", ")]
    return [word for word in words if word != "nothing"]


def _within(hour: int, first: int, last: int) -> bool:
    """Whether an hour is in [first, last). The interval may include midnight."""
    return first <= hour < last if first < last else hour >= first or hour < last


def policy_warnings(policy: Policy) -> list[str]:
    """Warn about names of `methods` and words of `reveals` that are not known here, because they may be misspelt.

    They are not refused: a newer version may know them, and a method of the user's own may have words of its own.
    """
    warnings = [
        f"policy.methods lists {name!r}, which is not a method of this version;{_meant_method(name)}"
        for name in policy.methods or ()
        if name not in METHODS and not _is_own_method(name)
    ]
    words = {word for entry in get_args(Reveals) for word in entry.split(", ")}
    words |= {COLUMN_SUMS, LOCAL_TESTS, LOSSES, UPDATES}
    return warnings + [
        f"policy.reveals lists {word!r}, which nothing in this version reveals;{_meant(word, words)}"
        for word in policy.reveals or ()
        if word not in words
    ]


def _is_own_method(name: str) -> bool:
    """Whether this is a single method of the user's own, as in `package.module:Class`, without settings."""
    return ":" in name and not {"+", "="} & set(name)


def _meant_method(name: str) -> str:
    if "+" in name:
        return " list the parts of a combination one by one, such as [fedlmd, fedprox]"
    known = METHODS | {alias: entry for entry in METHODS.values() for alias in entry.aliases}
    close = nearest(name, known)
    return _meant(name, METHODS) if close is None else f" did you mean {known[close].name!r}?"


def _meant(name: str, known: Iterable[str]) -> str:
    return did_you_mean(name, known) or f" known: {', '.join(sorted(known))}"


def read_policy(values: Any) -> Policy:
    """Read the policy in a site's YAML file. If there is none, return the defaults."""
    if values is None:
        return Policy()
    expect(isinstance(values, Mapping), "policy", values, "keys such as methods and rounds")
    known = {spec.name for spec in fields(Policy)}
    for key in values:
        if key not in known:
            raise unknown("policy", str(key), known)
    if values.get("clip") is not None and values.get("noise") is None:
        raise UserError(
            f"policy.clip is {values['clip']!r} without policy.noise; expected both, because clip limits only "
            "updates with noise"
        )
    return Policy(
        methods=_names("methods", values.get("methods")),
        reveals=_names("reveals", values.get("reveals")),
        rounds=_number("rounds", values.get("rounds"), int),
        noise=_number("noise", values.get("noise"), float),
        clip=_number("clip", values.get("clip"), float),
        hours=_hours(values.get("hours")),
        epsilon=_number("epsilon", values.get("epsilon"), float),
        example_epsilon=_number("example_epsilon", values.get("example_epsilon"), float),
        delta=_delta(values.get("delta")),
        minutes=_number("minutes", values.get("minutes"), float),
        trainings_per_round=_number("trainings_per_round", values.get("trainings_per_round"), int)
        or Policy.trainings_per_round,
        tests_per_round=_number("tests_per_round", values.get("tests_per_round"), int) or Policy.tests_per_round,
        smallest_group=_number("smallest_group", values.get("smallest_group"), int) or SMALLEST_GROUP,
        require=_requirements(values.get("require")),
        survey=_survey_rules(values.get("survey")),
        evaluate=_evaluation_rules(values.get("evaluate")),
    )


def _requirements(value: Any) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value or []
    is_known = isinstance(listed, list) and all(item == SECURE_AGGREGATION for item in listed)
    expect(is_known, "policy.require", value, SECURE_AGGREGATION)
    return tuple(listed)


def _survey_rules(value: Any) -> SurveyRules | None:
    values = _section("survey", value, SurveyRules)
    if values is None:
        return None
    return SurveyRules(
        hide_below=_number("survey.hide_below", values.get("hide_below"), int) or SurveyRules.hide_below,
        round_to=_number("survey.round_to", values.get("round_to"), int) or SurveyRules.round_to,
        epsilon=_number("survey.epsilon", values.get("epsilon"), float),
    )


def _evaluation_rules(value: Any) -> EvaluationRules | None:
    values = _section("evaluate", value, EvaluationRules)
    if values is None:
        return None
    by_site = values.get("by_site", True)
    expect(isinstance(by_site, bool), "policy.evaluate.by_site", by_site, "true or false")
    models = _number("evaluate.models", values.get("models"), int) or EvaluationRules.models
    return EvaluationRules(models, by_site)


def _section(key: str, value: Any, kind: type[SurveyRules | EvaluationRules]) -> Mapping[str, Any] | None:
    """Return the values of a section of the policy. None if it is absent."""
    if value is None:
        return None
    known = {spec.name for spec in fields(kind)}
    expect(isinstance(value, Mapping), f"policy.{key}", value, f"keys such as {min(known)}, or {{}} for the defaults")
    for name in value:
        if name not in known:
            raise unknown(f"policy.{key}", str(name), known)
    section: Mapping[str, Any] = value
    return section


def _names(key: str, value: Any) -> tuple[str, ...] | None:
    is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
    expect(value is None or is_list, f"policy.{key}", value, "a list of names")
    return None if value is None else tuple(value)


def _number(key: str, value: Any, kind: type[T]) -> T | None:
    is_positive = isinstance(value, int | kind) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
    expected = "a positive whole number" if kind is int else "a positive number"
    expect(value is None or is_positive, f"policy.{key}", value, expected)
    return None if value is None else kind(value)


def _delta(value: Any) -> float:
    delta = _number("delta", value, float)
    expect(delta is None or delta < 1, "policy.delta", value, "a number between 0 and 1")
    return Policy.delta if delta is None else delta


def _hours(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    found = _HOURS.fullmatch(str(value))
    hours = (int(found[1]), int(found[2])) if found else (24, 24)  # the next line refuses 24
    is_span = max(hours) < 24 and hours[0] != hours[1]
    expect(is_span, "policy.hours", value, "two different hours from 0 to 23, such as 20-6")
    return hours
