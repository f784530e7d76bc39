"""`model.py`: the code of a built-in model in one file that needs PyTorch and safetensors, but not fedskew."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable

from fedskew import __version__
from fedskew.export import raw_inputs, words
from fedskew.models import MODELS, base
from fedskew.models.concatenation import ConcatenatedEncoders

_LOAD = '''
HERE = Path(__file__).parent


def load(folder: str | Path = HERE) -> RawInputs:
    """The trained model on the CPU, in eval mode; `.model` is it without scaling and normalisation."""
    about = json.loads((Path(folder) / "model.json").read_text(encoding="utf-8"))
    form = about["inputs"]
    inputs = Inputs(tuple(form["shape"]), len(about["classes"]), form["vocabulary"])
    model = {made}
    model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    return RawInputs(model, form).eval()


def classes(folder: str | Path = HERE) -> list[str]:
    """The classes' names, in the order of the logits."""
    names: list[str] = json.loads((Path(folder) / "model.json").read_text(encoding="utf-8"))["classes"]
    return names
'''

_SIDE_BY_SIDE = '''
def side_by_side(parts: list[Classifier]) -> Classifier:
    """Their encoders under one head."""
    head = parts[0].head
    joined = nn.Linear(len(parts) * head.in_features, head.out_features, head.bias is not None)
    return Classifier(ConcatenatedEncoders([part.encoder for part in parts]), joined)
'''

_LOAD_WORDS = '''

def words(folder: str | Path = HERE) -> Words:
    """Makes the model's inputs of texts."""
    about = json.loads((Path(folder) / "model.json").read_text(encoding="utf-8"))
    listed = (Path(folder) / "words.txt").read_text(encoding="utf-8").splitlines()
    return Words(listed, about["inputs"]["shape"][0])
'''

_NEEDED = "import json\nfrom pathlib import Path\nfrom safetensors.torch import load_file"
_NEEDED_SIDE_BY_SIDE = "import torch\nfrom collections.abc import Sequence\nfrom torch import Tensor, nn"


def model_source(name: str, with_words: bool = False, encoders: int = 0) -> str:
    """The text of the file for model `name`, optionally with the vocabulary and with concatenated encoders."""
    factory = MODELS[name].factory
    modules = [base, sys.modules[factory.__module__], raw_inputs, *([words] if with_words else [])]
    parts = [_Source(inspect.getsource(module)) for module in modules]
    made = f"{factory.__name__}(inputs)"
    if encoders:
        parts.append(_side_by_side())
        made = f"side_by_side([{made} for _ in range({encoders})])"
    ending = _LOAD.replace("{made}", made) + (_LOAD_WORDS if with_words else "")
    lines = (
        f'"""The model {name!r}, trained with fedskew {__version__}: `load()` gives it. Apache-2.0."""',
        "from __future__ import annotations",
        _imports([node for part in (_Source(_NEEDED), *parts) for node in part.imports]),
        *(f"\n# {part.title}\n\n\n{part.body}" for part in parts),
        f"\n# What was trained\n{ending}",
    )
    return "\n\n".join(lines)


def _side_by_side() -> _Source:
    """FedConcat's model, without the code that builds it during a run."""
    title = (sys.modules[ConcatenatedEncoders.__module__].__doc__ or "").strip()
    texts = (f'"""{title}"""', _NEEDED_SIDE_BY_SIDE, inspect.getsource(ConcatenatedEncoders), _SIDE_BY_SIDE)
    return _Source("\n".join(texts))


class _Source:
    """The parts of a module's source."""

    def __init__(self, text: str) -> None:
        tree = ast.parse(text)
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        docstring = ast.get_docstring(tree) or ""
        self.title = docstring.partition(". ")[0].rstrip(".")
        self.imports = [node for node in imports if _package(node) not in ("fedskew", "__future__")]
        self.body = _without(text, [*imports, *(tree.body[:1] if docstring else [])])


def _package(node: ast.Import | ast.ImportFrom) -> str:
    name = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
    return (name or "").partition(".")[0]


def _without(text: str, dropped: Iterable[ast.stmt]) -> str:
    lines = text.splitlines()
    for node in dropped:
        for number in range(node.lineno - 1, node.end_lineno or node.lineno):
            lines[number] = ""
    return "\n".join(lines).strip()


def _imports(nodes: Iterable[ast.Import | ast.ImportFrom]) -> str:
    """One import statement per module, the standard library first."""
    whole: set[str] = set()
    names: dict[str, set[str]] = {}
    for node in nodes:
        spelled = {ast.unparse(alias) for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.setdefault(node.module or "", set()).update(spelled)
        else:
            whole |= spelled
    lines = [f"import {name}" for name in sorted(whole)]
    lines += [f"from {module} import {', '.join(sorted(found))}" for module, found in sorted(names.items())]
    standard = [line for line in lines if line.split()[1].partition(".")[0] in sys.stdlib_module_names]
    return "\n".join([*standard, "", *(line for line in lines if line not in standard)])
