"""Surveys that a method defines as a `Part`. At the end of a stage, sites run the part's hooks and send the results."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import torch

from fedskew.errors import UserError
from fedskew.experiment.round.aggregate import server_key
from fedskew.experiment.round.plan import RoundPlan
from fedskew.flower.model_message import work_tensors
from fedskew.flower.site_replies import Reply, require_any_reply, usable_replies
from fedskew.flower.sites import Sites
from fedskew.flower.tensors import forms, from_bytes, to_bytes
from fedskew.flower.wire import Facts, Garbled
from fedskew.methods import Survey, Tensors


def ask_survey(sites: Sites, plan: RoundPlan, seconds: float) -> Survey:
    """Send the survey of a stage to the connected sites. `plan` is the round in which the sites answer."""
    facts = {a.client: _facts(plan, a.client) for a in plan.work.assignments if a.client in sites.online}
    payload = to_bytes(work_tensors(plan.work, plan.stage.concatenates))
    replies = sites.request("survey", facts, payload, seconds)
    require_any_reply(replies, sites.names, "with its answers")
    answers: dict[int, Tensors] = {}
    for client, reply in usable_replies(replies):
        try:
            answers[client] = _read(reply)
        except Garbled as problem:
            sites.log(f"warning: the answers of {sites.names[client]} are discarded: {problem}")
    if not answers:
        raise UserError(f"no site sent usable answers to the survey of stage {plan.stage.name!r}")
    usual = Counter(map(forms, answers.values())).most_common(1)[0][0]
    for client in [client for client, found in answers.items() if forms(found) != usual]:
        sites.log(
            f"warning: the answers of {sites.names[client]} are discarded: their form differs from that of other sites"
        )
        del answers[client]
    first = next(iter(answers.values()))
    stacked = {name: torch.stack([found[name] for found in answers.values()]) for name in first}
    return Survey(answers=stacked, clients=tuple(answers), key=server_key(plan.work.key))


def _facts(plan: RoundPlan, client: int) -> Facts:
    return {
        "client": client,
        "stage": plan.before.stage,
        "notes": plan.before.notes,
        "local": asdict(plan.work.local),
        "key": asdict(plan.work.key),
    }


def _read(reply: Reply) -> Tensors:
    """Return a site's answers. Raise `Garbled` if a number is not finite."""
    tensors = from_bytes(reply.payload)
    if not all(bool(t.isfinite().all()) for t in tensors.values()):
        raise Garbled("they have numbers that are not finite")
    return tensors
