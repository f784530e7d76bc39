"""`model.py`: the code of a model of ours in one file, which needs PyTorch and safetensors, but not fedskew."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable
from types import ModuleType

from fedskew import __version__
from fedskew.export import raw_inputs, words
from fedskew.models import MODELS, base

_LOAD = '''
HERE = Path(__file__).parent


def load(folder: str | Path = HERE) -> RawInputs:
    """The trained model on the CPU, in eval mode; `.model` is it without scaling and normalisation."""
    about = json.loads((Path(folder) / "model.json").read_text(encoding="utf-8"))
    form = about["inputs"]
    inputs = Inputs(tuple(form["shape"]), len(about["classes"]), form["vocabulary"])
    model = {factory}(inputs)
    model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    return RawInputs(model, form).eval()


def classes(folder: str | Path = HERE) -> list[str]:
    """The classes' names, in the order of the logits."""
    names: list[str] = json.loads((Path(folder) / "model.json").read_text(encoding="utf-8"))["classes"]
    return names
'''

_LOAD_WORDS = '''

def words(folder: str | Path = HERE) -> Words:
    """Makes the model's inputs of texts."""
    about = json.loads((Path(folder) / "model.json").read_text(encoding="utf-8"))
    listed = (Path(folder) / "words.txt").read_text(encoding="utf-8").splitlines()
    return Words(listed, about["inputs"]["shape"][0])
'''

_IMPORTS = ("import json", "from pathlib import Path", "from safetensors.torch import load_file")


def model_source(name: str, with_words: bool) -> str:
    """The file's text for the model called `name`; with the numbering of words for text."""
    factory = MODELS[name].factory
    modules = [base, sys.modules[factory.__module__], raw_inputs, *([words] if with_words else [])]
    parts = [_Source(module) for module in modules]
    imports = sorted({*_IMPORTS, *(line for part in parts for line in part.imports)}, key=_order)
    ending = _LOAD.replace("{factory}", factory.__name__) + (_LOAD_WORDS if with_words else "")
    lines = (
        f'"""The model {name!r}, trained with fedskew {__version__}: `load()` gives it. Apache-2.0."""',
        "from __future__ import annotations",
        "\n".join(imports),
        *(f"\n# {part.title}\n\n{part.body}" for part in parts),
        f"\n# What was trained{ending}",
    )
    return "\n\n".join(lines)


class _Source:
    """A module's text, taken apart."""

    def __init__(self, module: ModuleType) -> None:
        text = inspect.getsource(module)
        tree = ast.parse(text)
        statements = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        self.title = (ast.get_docstring(tree) or module.__name__).splitlines()[0]
        self.imports = [ast.unparse(node) for node in statements if not _ours(node)]
        self.body = _without(text, [tree.body[0], *statements])


def _ours(node: ast.Import | ast.ImportFrom) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("fedskew", "__future__")


def _without(text: str, dropped: Iterable[ast.stmt]) -> str:
    lines = text.splitlines()
    for node in dropped:
        for number in range(node.lineno - 1, node.end_lineno or node.lineno):
            lines[number] = ""
    return "\n".join(lines).strip()


def _order(line: str) -> tuple[bool, str]:
    """The standard library first."""
    package = line.split()[1].partition(".")[0]
    return package not in sys.stdlib_module_names, line
