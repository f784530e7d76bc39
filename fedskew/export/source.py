"""The text of `model.py`: a built-in model's code in one file that needs PyTorch and safetensors, but not fedskew."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable

from fedskew import __version__
from fedskew.export import raw_inputs, rows, words
from fedskew.models import MODELS, base, heads
from fedskew.models.concatenation import ConcatenatedEncoders

# The code that loads the model, at the end of model.py. `{construction}` becomes the expression that makes the model.
_LOAD = '''
HERE = Path(__file__).parent


def load(folder: str | Path = HERE) -> RawInputs:
    """Load the trained model on the CPU, in eval mode. It takes raw samples, and its `.model` takes normalised ones."""
    about = json.loads((Path(folder) / "model.json").read_text(encoding="utf-8"))
    form = about["inputs"]
    data = DataShape(tuple(form["shape"]), len(about["classes"]), form["vocabulary"])
    model = {construction}
    model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    return RawInputs(model, form).eval()


def classes(folder: str | Path = HERE) -> list[str]:
    """The class names, in the order of the logits."""
    names: list[str] = json.loads((Path(folder) / "model.json").read_text(encoding="utf-8"))["classes"]
    return names
'''

# For models that concatenate encoders.
_SIDE_BY_SIDE = '''
def side_by_side(parts: list[Classifier]) -> Classifier:
    """Concatenate the models' encoders under one head."""
    head = parts[0].head
    joined = nn.Linear(len(parts) * head.in_features, head.out_features, head.bias is not None)
    return Classifier(ConcatenatedEncoders([part.encoder for part in parts]), joined)
'''

_LOAD_WORDS = '''

def words(folder: str | Path = HERE) -> Words:
    """Return a callable that turns texts into the model's inputs."""
    about = json.loads((Path(folder) / "model.json").read_text(encoding="utf-8"))
    listed = (Path(folder) / "words.txt").read_text(encoding="utf-8").splitlines()
    return Words(listed, about["inputs"]["shape"][0])
'''

_LOAD_ROWS = '''

def rows(folder: str | Path = HERE) -> Rows:
    """Return a callable that turns rows, such as {"age": 61, "sex": "f"}, into the model's inputs."""
    form = json.loads((Path(folder) / "model.json").read_text(encoding="utf-8"))["inputs"]
    plain = zip(form["columns"], form["scaling"], strict=True)
    return Rows(form.get("encoding") or [{"name": name, "mean": mean, "std": std} for name, (mean, std) in plain])
'''

_IMPORTS = "import json\nfrom pathlib import Path\nfrom safetensors.torch import load_file"
_SIDE_BY_SIDE_IMPORTS = "import torch\nfrom collections.abc import Sequence\nfrom torch import Tensor, nn"


# The first line of model.py. `_MADE_HERE` is the part by which the file is recognised.
_MADE_HERE = "trained with fedskew"
_FIRST_LINE = '"""The model {name!r}, {made} {version}. `load()` returns it. Apache-2.0."""'


def is_model_source(content: bytes) -> bool:
    """Whether this is the content of a file that `model_source` made."""
    return _MADE_HERE.encode() in content.partition(b"\n")[0]


def model_source(
    name: str, with_words: bool = False, encoders: int = 0, with_rows: bool = False, head: str = "auto"
) -> str:
    """Return the text of the file for model `name`.

    `with_words` adds code that encodes texts, and `with_rows` adds code that encodes rows of a table. `encoders` is the
    number of encoders that the model concatenates, or 0. `head` is the kind of head that the run was configured with.
    """
    factory = MODELS[name].factory
    replaces_head = head in heads.HEADS
    modules = [
        base,
        *([heads] if replaces_head else []),
        sys.modules[factory.__module__],
        raw_inputs,
        *([words] if with_words else []),
        *([rows] if with_rows else []),
    ]
    parts = [_Source(inspect.getsource(module)) for module in modules]
    construction = f"replace_head({factory.__name__}(data), {head!r})" if replaces_head else f"{factory.__name__}(data)"
    if encoders:
        parts.append(_side_by_side())
        construction = f"side_by_side([{construction} for _ in range({encoders})])"
    ending = _LOAD.replace("{construction}", construction) + (_LOAD_WORDS if with_words else "")
    ending += _LOAD_ROWS if with_rows else ""
    lines = (
        _FIRST_LINE.format(name=name, made=_MADE_HERE, version=__version__),
        "from __future__ import annotations",
        _merge_imports([node for part in (_Source(_IMPORTS), *parts) for node in part.imports]),
        *(f"\n# {part.title}\n\n\n{part.body}" for part in parts),
        f"\n# Loading the trained model\n{ending}",
    )
    return "\n\n".join(lines)


def _side_by_side() -> _Source:
    """Return the source of concatenated encoders, without the code that builds them during a run."""
    title = (sys.modules[ConcatenatedEncoders.__module__].__doc__ or "").strip()
    texts = (f'"""{title}"""', _SIDE_BY_SIDE_IMPORTS, inspect.getsource(ConcatenatedEncoders), _SIDE_BY_SIDE)
    return _Source("\n".join(texts))


class _Source:
    """A module's source, split into title, imports and body. Imports from fedskew and `__future__` are dropped."""

    def __init__(self, text: str) -> None:
        tree = ast.parse(text)
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        docstring = ast.get_docstring(tree) or ""
        self.title = docstring.partition("\n")[0].partition(". ")[0].rstrip(".")
        self.imports = [node for node in imports if _package(node) not in ("fedskew", "__future__")]
        self.body = _remove_statements(text, [*imports, *(tree.body[:1] if docstring else [])])


def _package(node: ast.Import | ast.ImportFrom) -> str:
    name = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
    return (name or "").partition(".")[0]


def _remove_statements(text: str, statements: Iterable[ast.stmt]) -> str:
    """Empty the lines of these statements."""
    lines = text.splitlines()
    for node in statements:
        for number in range(node.lineno - 1, node.end_lineno or node.lineno):
            lines[number] = ""
    return "\n".join(lines).strip()


def _merge_imports(nodes: Iterable[ast.Import | ast.ImportFrom]) -> str:
    """Merge imports into one statement per module, the standard library first."""
    modules: set[str] = set()
    names: dict[str, set[str]] = {}
    for node in nodes:
        spelled = {ast.unparse(alias) for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.setdefault(node.module or "", set()).update(spelled)
        else:
            modules |= spelled
    lines = [f"import {name}" for name in sorted(modules)]
    lines += [f"from {module} import {', '.join(sorted(found))}" for module, found in sorted(names.items())]
    standard = [line for line in lines if line.split()[1].partition(".")[0] in sys.stdlib_module_names]
    return "\n".join([*standard, "", *(line for line in lines if line not in standard)])
