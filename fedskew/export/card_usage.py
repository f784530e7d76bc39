"""The model card's sections on use: how to call the exported model, and what its inputs and outputs are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedskew.export.onnx_file import INPUT_NAMES
from fedskew.markdown import escape, table
from fedskew.models import MODELS
from fedskew.results import Result


def describe_use(run: Result, onnx: bool, with_words: bool) -> str:
    """Show code that calls the model with PyTorch, and with ONNX Runtime if `model.onnx` was written."""
    blocks = [_python_use(run, with_words)]
    if onnx:
        name = INPUT_NAMES[run.inputs["kind"]]
        encoded = "inputs" if has_named_columns(run) else name if with_words else ""  # made by the code for PyTorch
        argument = f"{encoded}.numpy()" if encoded and run.config.model in MODELS else name
        blocks.append(
            "With ONNX Runtime:\n\n```python\nimport onnxruntime\n\n"
            'session = onnxruntime.InferenceSession("model.onnx")\n'
            f'(logits,) = session.run(None, {{"{name}": {argument}}})  # {_array_type(run)}\n```'
        )
    return "\n\n".join(blocks)


def _python_use(run: Result, with_words: bool) -> str:
    if run.config.model not in MODELS:
        return (
            f"The model's code is not part of fedskew: `{run.config.model}`. With that code:\n\n```python\n"
            "from safetensors.torch import load_file\n\n"
            'model.load_state_dict(load_file("model.safetensors"))\n```\n\n'
            "The next section says how the inputs must be prepared."
        )
    name = INPUT_NAMES[run.inputs["kind"]]
    prepared = f'{name} = words()(["a text", "another"])' if with_words else f"# {name}: {_array_type(run)}"
    imported = "classes, load, words" if with_words else "classes, load"
    if has_named_columns(run):
        name, imported = "inputs", "classes, load, rows"
        example = ", ".join(f"{json.dumps(c['name'])}: {_example_value(c)}" for c in _columns(run))
        prepared = f"inputs = rows()([{{{example}}}])  # one dictionary per row; None is a missing value"
    return (
        "`model.py` in this folder needs only PyTorch and safetensors:\n\n```python\n"
        f"from model import {imported}\n\nmodel = load()\n{prepared}\n"
        f"logits = model({name})\n{_naming_code(run)}\n```"
    )


def has_named_columns(run: Result) -> bool:
    """Whether the inputs are the named columns of a table, which the export can encode."""
    return run.inputs["kind"] == "table" and bool(run.inputs.get("columns")) and bool(run.inputs.get("scaling"))


def _columns(run: Result) -> list[dict[str, Any]]:
    """Describe the table's columns, from which the inputs are made."""
    encoding: list[dict[str, Any]] | None = run.inputs.get("encoding")
    if encoding is not None:
        return encoding
    plain = zip(run.inputs["columns"], run.inputs["scaling"], strict=True)
    return [{"name": name, "mean": mean, "std": std} for name, (mean, std) in plain]


def _example_value(column: Mapping[str, Any]) -> str:
    """Write an example of a value of the column."""
    categories = column.get("categories")
    if categories is None:
        return f"{column['mean']:.4g}"
    return json.dumps(categories[0], ensure_ascii=False) if categories else "None"


def _column_table(run: Result) -> str:
    rows = [
        (
            escape(column["name"]),
            f"number, mean {column['mean']:.4g}, standard deviation {column['std']:.4g}"
            if column.get("categories") is None
            else f"category: {', '.join(map(escape, column['categories']))}",
            "marked by a further input" if column.get("marks_gaps") else "not marked",
        )
        for column in _columns(run)
    ]
    return table(("column", "values", "missing values"), rows)


def _naming_code(run: Result) -> str:
    if run.config.task == "multi-label":
        return "names = [[n for n, z in zip(classes(), row) if z > 0] for row in logits]"
    return "names = [classes()[c] for c in logits.argmax(1)]"


def _array_type(run: Result) -> str:
    number = {"image": "uint8", "table": "float64", "text": "int64"}[run.inputs["kind"]]
    return f"{number}, [n, {', '.join(map(str, run.inputs['shape']))}]"


def describe_inputs(run: Result, onnx: bool, with_words: bool) -> str:
    """Describe the arrays that the model takes and the logits that it returns."""
    inputs, is_built_in = run.inputs, run.config.model in MODELS
    by_caller = " before you call the model. `model.onnx` does this itself." if onnx else " before you call the model."
    if inputs.get("fields"):
        listed = (f"`{name}` [n, {', '.join(map(str, shape))}]" for name, shape, _ in inputs["fields"])
        described = f"Several inputs by name: {', '.join(listed)}."
    elif inputs["kind"] == "image":
        pairs = zip(inputs["mean"], inputs["std"], strict=True)
        scaling = (
            "Scaling to [0, 1] and normalisation are part of the exported model."
            if is_built_in
            else f"Scale them to [0, 1] and normalise them{by_caller}"
        )
        described = (
            f"Images as bytes, {_array_type(run)}: channels, height, width. {scaling} Mean and standard deviation per "
            f"channel: {', '.join(f'({mean:.6g}, {std:.6g})' for mean, std in pairs)}."
        )
    elif inputs["kind"] == "table":
        standardised = (
            "The exported model standardises them; `model.json` has the statistics."
            if is_built_in
            else f"Standardise them with the statistics in `model.json`{by_caller}"
        )
        as_given = "fedskew did not standardise them: scale them as in training."
        columns = f": {', '.join(map(escape, inputs['columns']))}" if inputs.get("columns") else ""
        scaling = standardised if inputs.get("scaling") else as_given
        described = f"Rows of {inputs['shape'][0]} numbers, {_array_type(run)}{columns}. {scaling}"
        if inputs.get("encoding"):
            made_by = "`rows()` makes the inputs" if is_built_in else "The inputs are made"
            encoded = (
                f"{made_by} from the table's columns. A column of numbers gives one input, and a column of "
                "categories gives one per category. Missing numbers become the mean."
            )
            described = f"{encoded}\n\n{_column_table(run)}\n\n{described}"
    else:
        known = "`words.txt` lists the words, starting at index 2." if with_words else "The vocabulary is not included."
        described = (
            f"Word indices, {_array_type(run)}: 0 is padding, and 1 is any word outside the vocabulary of "
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
