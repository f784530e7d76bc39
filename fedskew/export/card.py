"""The model card: how the model was trained, how good it is, and its limits."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedskew.data.catalogue import DATASETS
from fedskew.errors import UserError
from fedskew.export.onnx_file import INPUT_NAMES
from fedskew.methods import Entry
from fedskew.methods.catalogue import UPDATES_REVEAL
from fedskew.methods.class_weights import describe_weights, entries_with_weights, sent_by_clients
from fedskew.metrics.confusion import lost_classes
from fedskew.models import MODELS, parameter_count
from fedskew.models.concatenation import count_encoders
from fedskew.results import Result

_HEADER = """---
library_name: pytorch
tags: [federated-learning, label-skew, fedskew]
metrics: [accuracy]
---"""

_SIMULATED = "The run was simulated: nothing left the machine. Across machines, the method reveals the following. "


def model_card(run: Result, onnx_difference: float | None, with_words: bool, site: str | None = None) -> str:
    """Write the README.md of an exported model, with the metadata header for model hubs."""
    sections = (
        _HEADER,
        f"# {_title(run, site)}\n\n{_lead(run) if site is None else _site_lead(run, site)}",
        f"## Use\n\n{_use(run, onnx_difference is not None, with_words)}",
        f"## Inputs and outputs\n\n{_inputs(run, with_words)}",
        f"## Accuracy\n\n{_accuracy(run) if site is None else _site_accuracy(run, site)}",
        f"## Label distribution\n\n{_coverage(run)}",
        f"## Training\n\n{_training(run)}",
        f"## What clients reveal\n\n{_revealed(run)}",
        f"## Checks\n\n{_checks(onnx_difference, site)}",
        f"## Citation\n\n{_citation(run)}",
    )
    return "\n\n".join(sections) + "\n"


def method_entries(run: Result) -> list[Entry]:
    """The catalogue entries of the method's parts and class weights. A user's own method has none."""
    try:
        return entries_with_weights(run.config.method, run.config.class_weights)
    except UserError:
        return []


def percent(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{100 * value:.1f} %"


def _title(run: Result, site: str | None) -> str:
    whose = "" if site is None else f" of {_cell(site)}"
    return f"{run.config.model}{whose} trained by {run.config.method}"


def _site_lead(run: Result, site: str) -> str:
    return (
        f"A classifier for {len(run.classes)} classes ({parameter_count(run.model):,} parameters), trained by "
        f"federated learning on {_data(run)}: {run.rounds} rounds. It is the model of {_cell(site)}, whose personal "
        "tensors never left it. It fits the data of that site, and may be worse elsewhere."
    )


def _site_accuracy(run: Result, site: str) -> str:
    """Report the test of a site's model on that site's held-out samples, if the run has one."""
    score = run.site_scores.get(site)
    if score is None:
        return f"The run has no tests of this model. Outputs: {', '.join(map(_cell, run.classes))}."
    rows = [("accuracy", percent(score.accuracy)), ("AUROC", "–" if score.auroc is None else f"{score.auroc:.3f}")]
    return (
        f"On {score.samples:,} held-out samples of {_cell(site)}, after the last round:\n\n"
        f"{_table(('measure', 'value'), rows)}\n\nOutputs: {', '.join(map(_cell, run.classes))}."
    )


def _lead(run: Result) -> str:
    evaluation = run.evaluation
    lost = [run.classes[c] for c in lost_classes(run.class_accuracy)]
    encoders = count_encoders(run.model)
    in_encoders = f" in {encoders} concatenated encoders" if encoders else ""
    size = f"{parameter_count(run.model):,} parameters{in_encoders}"
    lead = (
        f"A classifier for {len(run.classes)} classes ({size}), trained by federated learning on {_data(run)}: "
        f"{run.rounds} rounds, accuracy {percent(evaluation.accuracy)}, "
        f"{'results by class unknown' if evaluation.totals else f'worst class {percent(evaluation.worst_class)}'}."
    )
    return lead + (f" **It does not recognise {', '.join(map(_cell, lost))}.**" if lost else "")


def _data(run: Result) -> str:
    contributors = sum(number > 0 for number in run.site_rounds.values())
    return f"the data of {contributors} site{'s' * (contributors != 1)}" if run.sites else run.config.data


def _use(run: Result, onnx: bool, with_words: bool) -> str:
    blocks = [_python_use(run, with_words)]
    if onnx:
        name = INPUT_NAMES[run.inputs["kind"]]
        argument = "inputs.numpy()" if has_named_columns(run) and run.config.model in MODELS else name
        blocks.append(
            "With ONNX Runtime:\n\n```python\nimport onnxruntime\n\n"
            'session = onnxruntime.InferenceSession("model.onnx")\n'
            f'(logits,) = session.run(None, {{"{name}": {argument}}})  # {_array(run)}\n```'
        )
    return "\n\n".join(blocks)


def _python_use(run: Result, with_words: bool) -> str:
    if run.config.model not in MODELS:
        return (
            f"The model's code is not part of fedskew: `{run.config.model}`. With that code:\n\n```python\n"
            "from safetensors.torch import load_file\n\n"
            'model.load_state_dict(load_file("model.safetensors"))\n```\n\n'
            "The model expects normalised inputs, as described below."
        )
    name = INPUT_NAMES[run.inputs["kind"]]
    prepared = f'{name} = words()(["a text", "another"])' if with_words else f"# {name}: {_array(run)}"
    imported = "classes, load, words" if with_words else "classes, load"
    if has_named_columns(run):
        name, imported = "inputs", "classes, load, rows"
        example = ", ".join(f"{json.dumps(c['name'])}: {_example(c)}" for c in _columns(run))
        prepared = f"inputs = rows()([{{{example}}}])  # one dictionary per row; None is a gap"
    return (
        "`model.py` in this folder needs only PyTorch and safetensors:\n\n```python\n"
        f"from model import {imported}\n\nmodel = load()\n{prepared}\n"
        f"logits = model({name})\n{_names(run)}\n```"
    )


def has_named_columns(run: Result) -> bool:
    """Whether the inputs are the named columns of a table, which the export can encode."""
    return run.inputs["kind"] == "table" and bool(run.inputs.get("columns")) and bool(run.inputs.get("scaling"))


def _columns(run: Result) -> list[dict[str, Any]]:
    """Describe the columns of the table that the inputs are made of."""
    encoding: list[dict[str, Any]] | None = run.inputs.get("encoding")
    if encoding is not None:
        return encoding
    plain = zip(run.inputs["columns"], run.inputs["scaling"], strict=True)
    return [{"name": name, "mean": mean, "std": std} for name, (mean, std) in plain]


def _example(column: Mapping[str, Any]) -> str:
    """Write a value that the column may have."""
    categories = column.get("categories")
    if categories is None:
        return f"{column['mean']:.4g}"
    return json.dumps(categories[0], ensure_ascii=False) if categories else "None"


def _column_table(run: Result) -> str:
    rows = [
        (
            _cell(column["name"]),
            f"number, mean {column['mean']:.4g}, standard deviation {column['std']:.4g}"
            if column.get("categories") is None
            else f"category: {', '.join(map(_cell, column['categories']))}",
            "marked by a further input" if column.get("marks_gaps") else "not in the training data",
        )
        for column in _columns(run)
    ]
    return _table(("column", "values", "gaps"), rows)


def _names(run: Result) -> str:
    if run.config.task == "multi-label":
        return "names = [[n for n, z in zip(classes(), row) if z > 0] for row in logits]"
    return "names = [classes()[c] for c in logits.argmax(1)]"


def _array(run: Result) -> str:
    number = {"image": "uint8", "table": "float64", "text": "int64"}[run.inputs["kind"]]
    return f"{number}, [n, {', '.join(map(str, run.inputs['shape']))}]"


def _inputs(run: Result, with_words: bool) -> str:
    inputs = run.inputs
    if inputs.get("fields"):
        listed = (f"`{name}` [n, {', '.join(map(str, shape))}]" for name, shape, _ in inputs["fields"])
        described = f"Several inputs by name: {', '.join(listed)}."
    elif inputs["kind"] == "image":
        pairs = zip(inputs["mean"], inputs["std"], strict=True)
        described = (
            f"Images as bytes, {_array(run)}: channels, height, width. Scaling to [0, 1] and normalisation are part of "
            f"the exported model. Mean and standard deviation per channel: "
            f"{', '.join(f'({mean:.6g}, {std:.6g})' for mean, std in pairs)}."
        )
    elif inputs["kind"] == "table":
        standardised = "The exported model standardises the columns; `model.json` has the statistics."
        as_given = "fedskew did not standardise the columns: scale them as in training."
        columns = f": {', '.join(map(_cell, inputs['columns']))}" if inputs.get("columns") else ""
        scaling = standardised if inputs.get("scaling") else as_given
        described = f"Rows of {inputs['shape'][0]} numbers, {_array(run)}{columns}. {scaling}"
        if inputs.get("encoding"):
            encoded = "`rows()` makes these numbers from the table's columns: one number per category, and gaps filled."
            described = f"{encoded}\n\n{_column_table(run)}\n\n{described}"
    else:
        known = "`words.txt` lists the words, starting at index 2." if with_words else "The vocabulary is not included."
        described = (
            f"Word indices, {_array(run)}: 0 is padding, and 1 is any word outside the vocabulary of "
            f"{inputs['vocabulary'] - 2:,} words. {known}"
        )
    several = run.config.task == "multi-label"
    ending = (
        f"Outputs are logits, [n, {len(run.classes)}], in the order of the classes below. "
        f"{'Sigmoid' if several else 'Softmax'} turns them into probabilities"
        f"{', one for each label: a sample may have several.' if several else '.'}"
    )
    batch = (
        " BatchNorm uses the statistics of the batch, so a prediction depends on the other samples in the batch: "
        "use large batches."
        if _depends_on_batch(run)
        else ""
    )
    return f"{described} {ending}{batch}"


def _depends_on_batch(run: Result) -> bool:
    """Whether a prediction depends on the other samples of its batch, because BatchNorm keeps no statistics."""
    return any(getattr(layer, "track_running_stats", True) is False for layer in run.model.modules())


def _accuracy(run: Result) -> str:
    evaluation = run.evaluation
    rows = [
        ("accuracy", percent(evaluation.accuracy)),
        ("mean over classes", percent(evaluation.mean_class)),
        ("worst class", percent(evaluation.worst_class)),
        ("best class", percent(evaluation.best_class)),
        ("macro F1", "–" if math.isnan(evaluation.macro_f1) else f"{evaluation.macro_f1:.3f}"),
        *_scores(run),
    ]
    table = _table(("measure", "value"), rows)
    return f"On {evaluation.samples:,} test samples, after the last round:\n\n{table}\n\n{_by_class(run)}"


def _scores(run: Result) -> list[tuple[str, str]]:
    """List the metrics of the model's probabilities. Unknown ones are left out."""
    scores = run.scores
    if scores is None:
        return []
    whose = "mean of each class against the rest" if scores.positive is None else _cell(run.classes[scores.positive])
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
        return f"The sites reported no results by class. Outputs: {', '.join(map(_cell, run.classes))}."
    test_samples = evaluation.class_samples
    rows: list[tuple[Any, ...]] = []
    for number, (name, accuracy) in enumerate(zip(run.classes, evaluation.class_accuracy, strict=True)):
        rows.append(
            (number, _cell(name), percent(accuracy), f"{test_samples[number]:,}", *_training_cells(run, number))
        )
    headings = ("output", "class", "accuracy", "test samples")
    return _table((*headings, *(("held by", "training samples") if run.label_counts is not None else ())), rows)


def _training_cells(run: Result, label: int) -> tuple[str, ...]:
    """Return how many clients hold a class, and its number of training samples. Empty if they are unknown."""
    if run.label_counts is None:
        return ()
    counts = run.label_counts[:, label]
    return f"{(counts > 0).sum()} of {len(counts)}", f"{counts.sum():,}"


def _coverage(run: Result) -> str:
    counts = run.label_counts
    if counts is None:
        return _labels_of_sites(run)
    present, sizes, holders = (counts > 0).sum(axis=1), counts.sum(axis=1), (counts > 0).sum(axis=0)
    held_by_one = [name for name, clients in zip(run.classes, holders, strict=True) if clients == 1]
    held_by_none = [name for name, clients in zip(run.classes, holders, strict=True) if clients == 0]
    sentences = [
        f"{len(counts)} clients held {sizes.min():,} to {sizes.max():,} samples, {sizes.sum():,} in total, "
        f"from {present.min()} to {present.max()} of the {len(run.classes)} classes. "
        f"On average a client lacked {(len(run.classes) - present).mean():.1f} classes."
    ]
    sentences += [f"Classes held by only one client: {', '.join(map(_cell, held_by_one))}."] if held_by_one else []
    sentences += [f"**Classes held by no client: {', '.join(map(_cell, held_by_none))}.**"] if held_by_none else []
    return " ".join(sentences)


def _labels_of_sites(run: Result) -> str:
    """Say what the server learned about the sites' labels, and which sites took part."""
    learned = ", ".join(dict.fromkeys(entry.reveals for entry in method_entries(run) if entry.reveals != "nothing"))
    words = [f"The method needs {learned} of each site, so the server learned that." if learned else ""]
    if _tests_by_class(run):
        words.append(
            "The sites reported their test results by class, which reveal the label counts of their test parts."
        )
    if not any(words):
        words.append("The label counts stayed at the sites. The server did not receive them.")
    words.append(_participation(run))
    return " ".join(word for word in words if word)


def _participation(run: Result) -> str:
    """Say which sites' data the model was trained on, and which sites tested it."""
    rounds = run.site_rounds
    trained = [f"{_cell(name)} ({number} of {run.rounds} rounds)" for name, number in rounds.items() if number]
    never = [_cell(name) for name, number in rounds.items() if not number]
    words = [f"The model was trained on the data of {', '.join(trained)}." if trained else ""]
    words.append(f"Sites that never contributed: {', '.join(never)}." if never else "")
    words.append(f"Sites that tested it: {', '.join(map(_cell, run.testing_sites))}." if run.testing_sites else "")
    return " ".join(word for word in words if word)


def _training(run: Result) -> str:
    config = run.config
    partition = {key: value for key, value in config.partition.to_mapping().items() if value is not None}
    split = ("split", ", ".join(f"{key} {value}" for key, value in partition.items()))
    params = ", ".join(f"{name} = {value}" for name, value in config.method_params.items())
    rows = [
        ("method", config.method + (f" ({params})" if params else "")),
        ("data", _data(run)),
        ("sites", f"{sum(n > 0 for n in run.site_rounds.values())} of {len(run.sites)}") if run.sites else split,
        ("rounds", run.rounds),
        ("clients per round", config.clients_per_round or "all"),
        ("local epochs, batch size", f"{config.local_epochs}, {config.batch_size}"),
        ("learning rate, decay per round", f"{config.lr}, {config.lr_decay}"),
        ("optimiser, momentum, weight decay", f"{config.optimizer}, {config.momentum}, {config.weight_decay}"),
        ("augmentation", ", ".join(config.augment) or "none"),
        ("class weights, batches", f"{describe_weights(config.class_weights)}, {config.batches}"),
        ("discarded updates (not finite)", run.diverged),
        ("seed", config.seed),
        ("SHA-256 of the split", (run.federation or {}).get("split", "–")),
        ("versions", ", ".join(f"{name} {number}" for name, number in run.about.get("versions", {}).items())),
        ("started", run.about.get("begun", "–")),
    ]
    return _table(("what", "value"), rows) + "\n\nThe complete configuration is in `model.json`."


def _revealed(run: Result) -> str:
    entries = method_entries(run)
    if not entries:
        return f"{run.config.method} is not in fedskew's catalogue, so what it sends is not known here."
    sends = sent_by_clients(entries)
    revealed = ", ".join(dict.fromkeys(entry.reveals for entry in entries if entry.reveals != "nothing"))
    return (
        f"{'' if run.sites else _SIMULATED}In each round, a participating client sends the server: {sends}. "
        f"Besides what updates can reveal, the server learns about its labels: {revealed or 'nothing'}. "
        f"{_reported_sums(run)}{_reported_tests(run)}{_private(run)}"
    )


def _reported_sums(run: Result) -> str:
    """Say which sites sent sums for the encoding. Empty if the encoding was agreed, and for a simulation."""
    senders = (run.federation or {}).get("column_sums", ())
    if not senders:
        return ""
    return (
        f"The encoding of the table was fitted to sums that {', '.join(map(_cell, senders))} sent once. For a column "
        "of numbers, these are the count of values and gaps, the mean and the sum of squared deviations. For a column "
        "of categories, these are the values that occur often enough, and whether there are gaps. "
    )


def _reported_tests(run: Result) -> str:
    """Say which test results the sites reported. Empty for a simulation."""
    if not run.history[-1].sites:
        return ""
    if not _tests_by_class(run):
        return f"The sites reported the accuracy of their tests. {_reported_local_tests(run)}"
    return (
        "The sites reported their test results by class, which reveal the label counts of their test parts. "
        f"{_reported_local_tests(run)}"
    )


def _reported_local_tests(run: Result) -> str:
    names = [name for name, found in run.client_tests.items() if "after" in found]
    if not names:
        return ""
    return f"These sites also reported the accuracy before and after local training: {', '.join(map(_cell, names))}. "


def _tests_by_class(run: Result) -> bool:
    return any("confusion" in results for results in (run.history[-1].sites or {}).values())


def _private(run: Result) -> str:
    if run.privacy is None:
        return f"Training was not differentially private. {UPDATES_REVEAL}, including users of this model."
    kind, epsilon, delta = (run.privacy[key] for key in ("kind", "epsilon", "delta"))
    whom = "everyone who has the models" if kind == "central" else "the server and everyone who has the models"
    return (
        f"Training was differentially private towards {whom}: ε = {epsilon:.3g} at δ = {delta:g} for a whole site "
        "that took part in every round, compared with a run in which its data are replaced by any others. Which sites "
        "took part is public. The guarantee covers the models, but not sample counts, losses or test results. Other "
        "runs on the same data weaken it."
    )


def _checks(onnx_difference: float | None, site: str | None) -> str:
    whose = "the run's last global model" if site is None else f"the last model of {_cell(site)}"
    lines = [f"- `model.safetensors` holds {whose}, in float32."]
    if onnx_difference is not None:
        lines.append(
            f"- `model.onnx` was compared with PyTorch on random batches of 1, 2 and 7. Its logits differ by at most "
            f"{onnx_difference:.1e}, relative to the largest logit."
        )
    return "\n".join(lines)


def _citation(run: Result) -> str:
    lines = [f"- method: {entry.name}, {entry.paper}" for entry in method_entries(run) if entry.paper]
    known = None if run.sites else DATASETS.get(run.config.data.lower())
    if known is not None:
        lines.append(f"- data: {known.name}, {known.citation}; licence: {known.licence}")
    versions = run.about.get("versions", {})
    lines.append(f"- software: fedskew {versions.get('fedskew', '')}".rstrip())
    return "\n".join(lines)


def _table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _cell(text: str) -> str:
    """Escape a name for Markdown: one line, with escaped bars."""
    return " ".join(text.replace("|", "\\|").split())
