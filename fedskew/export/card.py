"""The model card: how the model was trained, how good it is, and its limits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from fedskew.errors import plural
from fedskew.export.card_disclosures import describe_disclosures, describe_learned_labels, method_entries
from fedskew.export.card_metadata import metadata_header, name_site, published_dataset
from fedskew.export.card_usage import describe_inputs, describe_use
from fedskew.export.site_model import own_accuracy
from fedskew.markdown import escape, percent, table
from fedskew.methods import is_reference_bound
from fedskew.methods.class_weights import describe_weights
from fedskew.metrics.confusion import lost_classes
from fedskew.models import parameter_count
from fedskew.models.concatenation import count_encoders
from fedskew.results import Result


def model_card(
    run: Result,
    onnx_difference: float | None,
    with_words: bool,
    site: str | None = None,
    licence: str | None = None,
) -> str:
    """Write the README.md of an exported model, with a metadata header for the Hugging Face Hub.

    `onnx_difference` is that of `Exported`, and `with_words` says whether there is a words.txt. If the model is a
    site's own, `site` is the site's name. `licence` is the model's licence.
    """
    title = _title(run, site)
    sections = (
        metadata_header(run, title, site, licence),
        f"# {escape(title)}\n\n{_lead(run) if site is None else _site_lead(run, site)}",
        f"## Use\n\n{describe_use(run, onnx_difference is not None, with_words)}",
        f"## Inputs and outputs\n\n{describe_inputs(run, onnx_difference is not None, with_words)}",
        f"## Accuracy\n\n{_accuracy(run) if site is None else _site_accuracy(run, site)}",
        f"## Label distribution\n\n{_label_distribution(run)}",
        f"## Training\n\n{_training(run)}",
        f"## What clients reveal\n\n{describe_disclosures(run)}",
        f"## Checks\n\n{_checks(onnx_difference, site)}",
        f"## Citation\n\n{_citation(run)}",
    )
    return "\n\n".join(sections) + "\n"


def _title(run: Result, site: str | None) -> str:
    whose = "" if site is None else f" of {name_site(site)}"
    return f"{run.config.model}{whose} trained by {run.config.method}"


def _site_lead(run: Result, site: str) -> str:
    kept = "Its personal tensors never left that site. " if run.sites else ""
    return (
        f"A classifier for {len(run.classes)} classes ({parameter_count(run.model):,} parameters), {_trained(run)} "
        f"on {escape(_data(run))}: {_rounds(run)}. It is the model of {escape(name_site(site))}. {kept}"
        "It fits the data of that site, and may be worse elsewhere."
    )


def _site_accuracy(run: Result, site: str) -> str:
    """Report the test of a site's model on that site's held-out samples, if the run has one."""
    accuracy, score = own_accuracy(run, site), run.site_scores.get(site)
    outputs = f"Outputs: {', '.join(map(escape, run.classes))}."
    if accuracy is None:
        return f"This card has no test results of the model. {outputs}"
    samples = "the held-out samples" if score is None else f"{score.samples:,} held-out samples"
    auroc = "–" if score is None or score.auroc is None else f"{score.auroc:.3f}"
    rows = [("accuracy", percent(accuracy)), ("AUROC", auroc)]
    return (
        f"On {samples} of {escape(name_site(site))}, after the last round:\n\n"
        f"{table(('measure', 'value'), rows)}\n\n{outputs}"
    )


def _lead(run: Result) -> str:
    evaluation = run.evaluation
    lost = [run.classes[c] for c in lost_classes(run.class_accuracy)]
    encoders = count_encoders(run.model)
    in_encoders = f" in {encoders} concatenated encoders" if encoders else ""
    size = f"{parameter_count(run.model):,} parameters{in_encoders}"
    lead = (
        f"A classifier for {len(run.classes)} classes ({size}), {_trained(run)} on {escape(_data(run))}: "
        f"{_rounds(run)}, accuracy {percent(evaluation.accuracy)}, "
        f"{'results by class unknown' if evaluation.totals else f'worst class {percent(evaluation.worst_class)}'}."
    )
    return lead + (f" **It hardly recognises {', '.join(map(escape, lost))}.**" if lost else "")


def _trained(run: Result) -> str:
    """Say whether the model was trained by federated learning or as a reference bound."""
    if is_reference_bound(run.method):
        return f"trained without federated learning, as the reference bound {run.method},"
    return "trained by federated learning"


def _rounds(run: Result) -> str:
    return plural(run.rounds, "round")


def _data(run: Result) -> str:
    contributors = sum(number > 0 for number in run.site_rounds.values())
    return f"the data of {plural(contributors, 'site')}" if run.sites else run.config.data


def _accuracy(run: Result) -> str:
    evaluation = run.evaluation
    rows = [
        ("accuracy", percent(evaluation.accuracy)),
        ("mean over classes", percent(evaluation.mean_class)),
        ("worst class", percent(evaluation.worst_class)),
        ("best class", percent(evaluation.best_class)),
        ("macro F1", "–" if math.isnan(evaluation.macro_f1) else f"{evaluation.macro_f1:.3f}"),
        *_score_rows(run),
    ]
    measures = table(("measure", "value"), rows)
    return f"On {evaluation.samples:,} test samples, at the last evaluation:\n\n{measures}\n\n{_by_class(run)}"


def _score_rows(run: Result) -> list[tuple[str, str]]:
    """List the known metrics of the model's probabilities."""
    scores = run.scores
    if scores is None:
        return []
    whose = "mean of each class against the rest" if scores.positive is None else escape(run.classes[scores.positive])
    rows = [
        (f"AUROC, {whose}", scores.auroc),
        (f"AUPRC, {whose}", scores.auprc),
        (f"sensitivity at specificity {scores.target_specificity:g}", scores.sensitivity_at_specificity),
        ("Brier score", scores.brier),
        ("expected calibration error", scores.calibration_error),
        ("log loss", run.evaluation.log_loss),
    ]
    return [(name, f"{value:.3f}") for name, value in rows if value is not None]


def _by_class(run: Result) -> str:
    evaluation = run.evaluation
    if evaluation.totals is not None:
        return f"The sites reported no results by class. Outputs: {', '.join(map(escape, run.classes))}."
    test_samples = evaluation.class_samples
    rows: list[tuple[Any, ...]] = []
    for number, (name, accuracy) in enumerate(zip(run.classes, evaluation.class_accuracy, strict=True)):
        rows.append(
            (number, escape(name), percent(accuracy), f"{test_samples[number]:,}", *_training_cells(run, number))
        )
    headings = ("output", "class", "accuracy", "test samples")
    return table((*headings, *(("held by", "training samples") if run.label_counts is not None else ())), rows)


def _training_cells(run: Result, label: int) -> tuple[str, ...]:
    """Return how many clients hold a class, and its number of training samples. Empty if label counts are unknown."""
    if run.label_counts is None:
        return ()
    counts = run.label_counts[:, label]
    return f"{(counts > 0).sum()} of {len(counts)}", f"{counts.sum():,}"


def _label_distribution(run: Result) -> str:
    counts = run.label_counts
    if counts is None:
        return f"{describe_learned_labels(run)} {_participation(run)}".rstrip()
    present, sizes, holders = (counts > 0).sum(axis=1), counts.sum(axis=1), (counts > 0).sum(axis=0)
    held_by_one = [name for name, clients in zip(run.classes, holders, strict=True) if clients == 1]
    held_by_none = [name for name, clients in zip(run.classes, holders, strict=True) if clients == 0]
    sentences = [
        f"{plural(len(counts), 'client')} held {sizes.min():,} to {sizes.max():,} samples each "
        f"({sizes.sum():,} in total), from {present.min()} to {present.max()} of the {len(run.classes)} classes. "
        f"On average a client lacked {(len(run.classes) - present).mean():.1f} classes."
    ]
    sentences += [f"Classes held by only one client: {', '.join(map(escape, held_by_one))}."] if held_by_one else []
    sentences += [f"**Classes held by no client: {', '.join(map(escape, held_by_none))}.**"] if held_by_none else []
    return " ".join(sentences)


def _participation(run: Result) -> str:
    """Say which sites' data the model was trained on, and which sites tested it."""
    rounds = run.site_rounds
    trained = [f"{escape(name)} ({number} of {_rounds(run)})" for name, number in rounds.items() if number]
    never = [escape(name) for name, number in rounds.items() if not number]
    words = [f"The model was trained on the data of {', '.join(trained)}." if trained else ""]
    words.append(f"Sites that never contributed: {', '.join(never)}." if never else "")
    words.append(f"Sites that tested it: {', '.join(map(escape, run.testing_sites))}." if run.testing_sites else "")
    return " ".join(word for word in words if word)


def _training(run: Result) -> str:
    config = run.config
    partition = {key: value for key, value in config.partition.to_mapping().items() if value is not None}
    split = [("split", ", ".join(f"{key} {value}" for key, value in partition.items()))]
    sites = [("sites", f"{sum(n > 0 for n in run.site_rounds.values())} of {len(run.sites)}")]
    split_hash = [("SHA-256 of the split", (run.federation or {}).get("split", "–"))]
    params = ", ".join(f"{name} = {value}" for name, value in config.method_params.items())
    held = [("training samples at the server", f"{config.server_data:.2%}")] if config.server_data else []
    start = [("initial weights", f"{Path(config.init).name}, SHA-256 {config.init_sha256}")] if config.init else []
    part = [("trained part", config.train)] if config.train != "all" else []
    rows = [
        ("method", config.method + (f" ({params})" if params else "")),
        ("data", _data(run)),
        *(sites if run.sites else split),
        *held,
        *start,
        *part,
        ("rounds", run.rounds),
        ("clients per round", config.clients_per_round or "all"),
        ("local epochs, batch size", f"{config.local_epochs}, {config.batch_size}"),
        ("learning rate, decay per round", f"{config.lr}, {config.lr_decay}"),
        ("optimiser, momentum, weight decay", f"{config.optimizer}, {config.momentum}, {config.weight_decay}"),
        ("augmentation", ", ".join(config.augment) or "none"),
        ("class weights, batches", f"{describe_weights(config.class_weights)}, {config.batches}"),
        ("updates discarded because of values that were not finite", run.diverged),
        ("seed", config.seed),
        *([] if run.sites else split_hash),  # in a federation, it is only that of the sites' names
        ("versions", ", ".join(f"{name} {number}" for name, number in run.about.get("versions", {}).items())),
        ("started", run.about.get("begun", "–")),
    ]
    cells = [(what, escape(str(value))) for what, value in rows]
    return table(("what", "value"), cells) + "\n\nThe complete configuration is in `model.json`."


def _checks(onnx_difference: float | None, site: str | None) -> str:
    whose = "the run's last global model" if site is None else f"the last model of {escape(name_site(site))}"
    lines = [f"- `model.safetensors` holds {whose}, in float32."]
    if onnx_difference is not None:
        lines.append(
            f"- `model.onnx` was compared with PyTorch on random batches of 1, 2 and 7. Its logits differ by at most "
            f"{onnx_difference:.1e}, relative to the largest logit, or to 1 if that is larger."
        )
    return "\n".join(lines)


def _citation(run: Result) -> str:
    lines = [f"- method: {entry.name}, {entry.paper}" for entry in method_entries(run) if entry.paper]
    known = published_dataset(run)
    if known is not None:
        lines.append(f"- data: {known.name}, {known.citation}; licence: {known.licence}")
    versions = run.about.get("versions", {})
    lines.append(f"- software: fedskew {versions.get('fedskew', '')}".rstrip())
    return "\n".join(lines)
