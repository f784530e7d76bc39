"""Describe what a site reveals, for `federate site --check`, `federate approve` and the app's README.

`settings_warnings` says which settings hardly let a model learn, or do not do what they seem to do.
"""

from __future__ import annotations

import math

from fedskew.data.column_sums import SMALLEST_GROUP
from fedskew.data.dataset import Dataset
from fedskew.data.table_encoding import columns_with_rare_categories
from fedskew.errors import plural, shorten
from fedskew.experiment.config import Config
from fedskew.experiment.preparation import data_shape
from fedskew.experiment.trained_part import trained_model
from fedskew.flower.contract import Contract
from fedskew.flower.policy import COLUMN_SUMS, LOCAL_TESTS
from fedskew.flower.privacy import NEIGHBOURS, noise_to_signal
from fedskew.flower.releases import run_epsilon
from fedskew.flower.secure.identity import fingerprint
from fedskew.flower.secure.terms import SecureTerms
from fedskew.flower.settings import FederationSettings
from fedskew.methods import make_method
from fedskew.methods.class_weights import entries_name, entries_with_weights, revealed_labels, sent_by_clients
from fedskew.methods.personal import personal_names
from fedskew.methods.robust import TrimmedMean
from fedskew.models import has_features, make_model

_TESTS = {
    "class": "results and score histograms by class, whose sums are the label counts of the site's test part",
    "total": "the number of test samples and of correct predictions",
    "none": "nothing",
}
"""What a site sends of its tests, by `federation.site_metrics`."""
_COLUMN_SUMS = (
    f"if its policy.reveals lists {COLUMN_SUMS!r}, it sends column sums of its training part, once, before the first "
    "round: for each column of numbers the counts of values and gaps, the mean and the sum of squared deviations; for "
    "each column of categories the values that occur, and whether there are gaps; a number, category or gap in fewer "
    f"rows than its policy.smallest_group (default: {SMALLEST_GROUP}) is left out or replaced by a nearby value; but "
    "if no number of a column is in that many rows and most of them differ, its sums are exact, so a number that is "
    "far larger than all others shows in them"
)
_SURVEY = (
    "if its policy has 'survey', it answers a survey before training, once: label counts of its training part, and "
    "ranges, frequent categories and shares of gaps of a table's columns; small counts are hidden and all numbers are "
    "rounded, or it sends only the counts, with noise"
)
_EVALUATE_ONLY = (
    "if its policy has 'evaluate', it tests finished models and sends score histograms by class, whose sums are the "
    "label counts of its test part"
)


def learned_labels(settings: FederationSettings, config: Config) -> str:
    """List what the server learns about a site's labels from the method and from the reported tests."""
    learned = revealed_labels(entries_with_weights(config.method, config.class_weights))
    if settings.site_metrics != "class":
        return learned
    return ", ".join([learned] * (learned != "nothing") + ["label counts of its test part"])


def disclosures(settings: FederationSettings, contract: Contract, config: Config) -> list[str]:
    """Describe what leaves a site, one line for each kind of data."""
    entries = entries_with_weights(config.method, config.class_weights)
    loss = " and the mean training loss" if settings.share_loss else ""
    if settings.secure_aggregation:
        return _secure_disclosures(settings, config, entries_name(entries))
    tests, labels = _TESTS[settings.site_metrics], learned_labels(settings, config)
    personal = make_method(config.method, config.method_params).personal
    if settings.site_metrics != "none" and personal is not None and personal.tests_both_models:
        tests += "; also how many predictions of its own model are correct"
    if settings.local_tests:
        tests += (
            f"; in each evaluated round, if its policy.reveals lists {LOCAL_TESTS!r}, also how many predictions are "
            "correct before and after its local training"
        )
    sources = ["updates", *(["answers to surveys"] if settings.survey else [])]
    sources += ["tests of finished models"] if settings.evaluate_only else []
    return [
        *([_SURVEY] if settings.survey else []),
        *([_EVALUATE_ONLY] if settings.evaluate_only else []),
        *([_COLUMN_SUMS] if contract.column_sums else []),
        f"{entries_name(entries)} sends: {sent_by_clients(entries)}{loss}",
        f"tests: {tests}",
        f"besides what {' or '.join(sources)} can reveal, the server learns about the site's labels: {labels}",
        f"privacy: {describe_privacy(settings, config)}",
    ]


def _secure_disclosures(settings: FederationSettings, config: Config, method: str) -> list[str]:
    """Describe what leaves a site with secure aggregation."""
    loss = ", their mean training loss" if settings.share_loss else ""
    fewest = SecureTerms.from_settings(settings, config).needed
    return [
        f"{method} sends only masked numbers: from at least {fewest} sites per round, the server learns the mean of "
        f"their updates{loss} and the total of their sample counts; it cannot read a single site's update, unless at "
        "least a third of the round's sites help it",
        "tests: " + ("totals over all sites" if settings.evaluation == "sites" else "nothing"),
        "sums can still reveal something about a site, to everyone who has the model",
        f"privacy: {describe_privacy(settings, config)}",
        *(f"node key of {name}: {fingerprint(key)}" for name, key in (settings.node_keys or {}).items()),
    ]


def describe_privacy(settings: FederationSettings, config: Config) -> str:
    """Describe the kind of privacy of a run, and its ε."""
    if settings.privacy == "none":
        return "no noise is added; model updates can reveal something about the training data"
    spent, rounds = run_epsilon(settings, config, config.rounds), plural(config.rounds, "round")
    return (
        f"{settings.privacy}, ε = {spent:.3g} at δ = {settings.delta:g} after {rounds}, {NEIGHBOURS[settings.privacy]}"
    )


def settings_warnings(settings: FederationSettings, contract: Contract, config: Config) -> list[str]:
    """List warnings about an app's settings, to be shown before a run begins."""
    found = (noise_warning(settings, contract, config), trimming_warning(settings, config))
    return [warning for warning in found if warning is not None]


def encoding_warnings(dataset: Dataset) -> list[str]:
    """Warn about rare categories in the coordinator's table. A contract that describes the table names them."""
    if dataset.encoding is None:
        return []
    parts = dataset.train.x, dataset.test.x
    rare = columns_with_rare_categories(dataset.encoding, parts, SMALLEST_GROUP)
    if not rare:
        return []
    has = "has categories" if len(rare) == 1 else "have categories"
    return [
        f"the app names all categories of this table to every site, and {shorten(rare)} {has} of fewer than "
        f"{SMALLEST_GROUP} rows, which may point to single persons; to leave a column out, use --set data.drop=NAME "
        "here and drop at the sites, or list the categories yourself with --encoding"
    ]


def trimming_warning(settings: FederationSettings, config: Config) -> str | None:
    """Return a warning if a trimmed mean has too few sites to leave out any update."""
    server = make_method(config.method, config.method_params).server
    sites = min(config.clients_per_round or len(settings.sites), len(settings.sites))
    if not isinstance(server, TrimmedMean) or server.trim == 0 or int(server.trim * sites + 1e-9) > 0:
        return None
    enough = math.ceil(100 / sites) / 100
    expected = f"trim of at least {enough:g}, or median" if sites > 2 else "at least 3 sites per round"
    return (
        f"trimmed-mean with trim = {server.trim:g} leaves out none of {plural(sites, 'update')}, so it is a plain "
        f"mean; expected {expected}"
    )


def noise_warning(settings: FederationSettings, contract: Contract, config: Config) -> str | None:
    """Return a warning if the noise of a round is larger than any possible change of the model."""
    if settings.privacy not in ("central", "local"):
        return None
    sites = min(config.clients_per_round or len(settings.sites), len(settings.sites))
    model = make_model(config.model, data_shape(contract.blank()), head=config.head)
    if config.train != "all" and has_features(model):
        model = trained_model(config, model)
    personal = make_method(config.method, config.method_params).personal
    unsent = frozenset[str]() if personal is None else personal_names(personal, model)
    parameters = sum(p.numel() for name, p in model.named_parameters() if p.requires_grad and name not in unsent)
    ratio = noise_to_signal(settings.privacy, settings.noise, sites, parameters)
    if ratio <= 1:
        return None
    times = f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"
    return (
        f"the noise on a round's mean is {times} times as large as the largest possible change of the model, so "
        f"the model will hardly learn: federation.noise is {settings.noise:g} for {plural(sites, 'site')} and "
        f"{parameters:,} parameters; expected more sites, less noise or a smaller model"
    )
