"""The model card's section on privacy: what clients send, what the server learned, and what the model may reveal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedskew.errors import UserError
from fedskew.experiment.storage.files import reporting_os_errors
from fedskew.markdown import escape
from fedskew.methods import Entry
from fedskew.methods.catalogue import MODELS_REVEAL, UPDATES_REVEAL
from fedskew.methods.class_weights import entries_with_weights, revealed_labels, sent_by_clients
from fedskew.results import Result

_SIMULATED = "The run was simulated: nothing left the machine. Across machines, the method reveals the following. "


_SURVEY = (
    "In a survey, which was a run of its own, {names} sent label counts of the training part, with small counts hidden "
    "and all rounded, or with noise. For a table, the answers without noise also had each column's rounded "
    "range or frequent categories, and its share of missing values."
)
_EVALUATION = (
    "In a test of a finished model, which was a run of its own, {names} sent score histograms by class, whose sums are "
    "the label counts of the test part."
)
_INQUIRIES = {("survey", "survey.json", "sites"): _SURVEY, ("evaluate", "evaluation.json", "tested_by"): _EVALUATION}
"""What sites sent about their labels in `fedskew federate survey` and `evaluate`. Each key has three parts: the suffix
of the folder of answers, the file in it, and the entry of that file that lists the sites."""


def method_entries(run: Result) -> list[Entry]:
    """The entries of the run's methods and class weights. Empty if a method is unknown or cannot be imported."""
    try:
        return entries_with_weights(run.config.method, run.config.class_weights)
    except UserError:
        return []


def describe_learned_labels(run: Result) -> str:
    """Say what the server learned about the labels of the sites."""
    sentences = [_learned_from_method(run)]
    if _tests_by_class(run):
        sentences.append(
            "The sites reported their test results by class, which reveal the label counts of their test parts."
        )
    found = [*filter(None, sentences)]
    return " ".join([*(found or ["In this run, the label counts stayed at the sites."]), *_inquiries(run)])


def _inquiries(run: Result) -> Iterator[str]:
    """Say what the server learned in other runs of the same federation, whose folders are beside this run's."""
    if run.folder is None or not run.sites:
        return
    for (purpose, file, key), sentence in _INQUIRIES.items():
        path = run.folder.with_name(f"{run.folder.name}-{purpose}") / file
        if path.exists():
            names = _read_inquiry(path, key)
            yield sentence.format(names=", ".join(map(escape, names)))


def _read_inquiry(path: Path, key: str) -> list[str]:
    """Read which sites answered."""
    try:
        with reporting_os_errors("read", path):
            return list(json.loads(path.read_text(encoding="utf-8"))[key])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged; restore it, or move it away") from error


def _learned_from_method(run: Result) -> str:
    """Say what the method revealed about the labels of the sites. Empty if it revealed nothing."""
    entries = method_entries(run)
    if not entries:
        return f"{_unknown(run)}, so what the server learned about the sites' labels is not known here."
    learned = revealed_labels(entries)
    return "" if learned == "nothing" else f"With this method, the server learned for each site: {learned}."


def _unknown(run: Result) -> str:
    return f"{run.config.method} cannot be imported here"


def describe_disclosures(run: Result) -> str:
    """Say what clients send, and what can be learned from their updates and from the model."""
    if (run.federation or {}).get("secure_aggregation"):
        loss = ", their mean training loss" if _reported_losses(run) else ""
        return (
            f"Training used secure aggregation. In each round, the server learned the mean of the sites' updates{loss} "
            "and the total of their sample counts. If the sites tested the model, the server also learned the totals "
            f"of their test results. The server learned no single site's values. {_private(run)}"
        )
    entries = method_entries(run)
    others = "Other runs revealed more: see the label distribution. " if any(_inquiries(run)) else ""
    reported = f"{others}{_reported_sums(run)}{_reported_tests(run)}{_private(run)}"
    if not entries:
        return f"{_unknown(run)}, so what it sends is not known here. {reported}"
    sends = sent_by_clients(entries) + (" and the mean training loss" if _reported_losses(run) else "")
    besides = "Besides what updates can reveal, the" if _sends_updates(entries) else "The"
    return (
        f"{'' if run.sites else _SIMULATED}In each round, a participating client sends the server: {sends}. "
        f"{besides} server learns about the client's labels: {revealed_labels(entries)}. "
        f"{reported}"
    )


def _sends_updates(entries: Sequence[Entry]) -> bool:
    """Whether clients send updates. False for a reference bound, even with class weights."""
    return all(entry.sends_updates for entry in entries)


def _reported_losses(run: Result) -> bool:
    """Whether the sites of a federation sent their training losses. False for a simulation."""
    return bool(run.sites) and any(row.loss is not None for row in run.history)


def _reported_sums(run: Result) -> str:
    """Say which sites sent column sums. Empty if none did."""
    senders = (run.federation or {}).get("column_sums", ())
    if not senders:
        return ""
    return (
        f"The encoding of the table was fitted to sums that {', '.join(map(escape, senders))} sent once. For a column "
        "of numbers, these are the count of values and gaps, the mean and the sum of squared deviations. For a column "
        "of categories, these are the values that occur often enough, and whether there are gaps. "
    )


def _reported_tests(run: Result) -> str:
    """Say which test results the sites reported. Empty if they reported none, as in a simulation."""
    if not _site_results(run):
        return ""
    results = (
        "their test results by class, which reveal the label counts of their test parts"
        if _tests_by_class(run)
        else "the number of their test samples and of correct predictions"
    )
    return f"The sites reported {results}. {_reported_own_tests(run)}{_reported_local_tests(run)}"


def _reported_own_tests(run: Result) -> str:
    names = _sites_that_reported(run, "personal")
    return f"These sites also reported the accuracy of their own model: {', '.join(names)}. " if names else ""


def _reported_local_tests(run: Result) -> str:
    names = _sites_that_reported(run, "after")
    if not names:
        return ""
    return f"These sites also reported the accuracy before and after local training: {', '.join(names)}. "


def _sites_that_reported(run: Result, kind: str) -> list[str]:
    """List the sites with an accuracy of this kind in any round. The kinds are those of `Result.client_tests`."""
    tests = [row.client_tests or {} for row in run.history]
    reported = [found[kind] for found in tests if kind in found]
    return [
        escape(name)
        for client, name in enumerate(run.client_labels)
        if any(accuracies[client] is not None for accuracies in reported)
    ]


def _tests_by_class(run: Result) -> bool:
    return any("confusion" in results for results in _site_results(run))


def _site_results(run: Result) -> list[dict[str, Any]]:
    """List the test results that the sites reported in any round."""
    return [results for row in run.history for results in (row.sites or {}).values()]


def _private(run: Result) -> str:
    if run.privacy is None:
        reveal = UPDATES_REVEAL if _sends_updates(method_entries(run)) else MODELS_REVEAL
        return f"Training was not differentially private. {reveal}, including users of this model."
    kind, epsilon, delta = (run.privacy[key] for key in ("kind", "epsilon", "delta"))
    if kind == "example":
        return _private_examples(run, epsilon, delta)
    readers = "everyone who has the models" if kind == "central" else "the server and everyone who has the models"
    return (
        f"Training was differentially private towards {readers}: ε = {epsilon:.3g} at δ = {delta:g} for a whole site "
        "that took part in every round, compared with a run in which its data are replaced by any others. Which sites "
        "took part is public. The guarantee covers the models, but not sample counts, losses or test results. Other "
        "runs on the same data weaken it."
    )


def _private_examples(run: Result, epsilon: float, delta: float) -> str:
    """Describe example-level privacy. In a simulation, anyone who knows the seed can compute the noise."""
    simulated = "" if run.sites else "The noise of this simulation follows from its seed, so it protects nobody. "
    would = "was" if run.sites else "would be"
    return (
        f"{simulated}Training {would} differentially private for single training samples, towards the server and "
        f"everyone who has the models: ε = {epsilon:.3g} at δ = {delta:g} for one sample of a site that took part in "
        "every round, compared with a run in which it is replaced by any other. A person with several samples has a "
        "larger ε, and a whole site has no finite one. The number of samples of a site is public. The guarantee covers "
        "the models, but not losses or test results. Other runs on the same data weaken it."
    )
