"""Limits how often a site trains the same round of a run's plan.

A server learns more each time that a site trains the same round from another model. So a site answers only a few
different requests per round. It needs to answer more than one, because a restarted server may ask for a round again,
perhaps with another model.

A request that is repeated while the site has the same state does not count again. Unless the site's data have changed,
its update is the same. But if the site adds noise, every request counts, because the noise is new each time. The site's
state folder has the counts, so they survive a restart of the worker.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from fedskew.flower.site_answers import AlreadyAnswered, SiteAnswers
from fedskew.flower.tensors import to_bytes
from fedskew.flower.wire import Facts, digest
from fedskew.methods import Tensors

FOLDER = "trainings"
_CHOSEN_BY_SERVER = ("notes", "companions", "kept")
"""The facts with which a server can change the update of a round. The request's tensors and the site's state can also
change it."""


@dataclass(frozen=True)
class SiteTrainings:
    """The trainings of one site. The site answers at most `most` different requests for the same round."""

    state_folder: Path
    most: int

    def require_allowed(self, round_name: str, request: Facts) -> None:
        """Refuse a request that `record` would refuse, before the site trains in vain."""
        if not self._answers.is_allowed(round_name, request, self.most):
            raise _too_often(round_name, self.most)

    def record(self, round_name: str, request: Facts) -> None:
        """Count a training before its update leaves, or refuse it."""
        try:
            # The answer is empty, because only the number of different requests matters.
            self._answers.answer_once(round_name, request, lambda: ({}, b""), self.most)
        except AlreadyAnswered as error:
            raise _too_often(round_name, self.most) from error

    @property
    def _answers(self) -> SiteAnswers:
        return SiteAnswers(self.state_folder, FOLDER)


def describe_round(run: str, facts: Facts) -> str:
    """Name the round that a request is for."""
    return f"round {facts['key']['round'] + 1} of stage {facts['stage']} in run {run}"


def training_request(facts: Facts, payload: bytes, kept: Tensors, has_noise: bool) -> Facts:
    """Return what may differ between requests for the same round. If the site adds noise, every request differs.

    `kept` is the state that the site continues from. The server names only the round of this state, and could have let
    the site replace or remove it since. So the state's digest is included.
    """
    chosen = {key: facts[key] for key in _CHOSEN_BY_SERVER}
    chosen |= {"tensors": digest(payload), "state": digest(to_bytes(kept))}
    return chosen | ({"noise": secrets.token_hex(16)} if has_noise else {})


def _too_often(round_name: str, most: int) -> AlreadyAnswered:
    return AlreadyAnswered(
        f"this site has trained {round_name} as often as policy.trainings_per_round allows ({most}); raise it at the "
        "site, or start a new run with another seed"
    )
