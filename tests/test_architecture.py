"""What holds for the package as a whole: who imports whom, what a light start may load, what is never unpickled."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import fedskew
from fedskew.data import table_encoding
from fedskew.experiment.config import values

PACKAGE = Path(fedskew.__file__).parent
ROOT = PACKAGE.parent

PICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def test_dependencies_point_one_way() -> None:
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("the contract stands in pyproject.toml, which an installed package does not carry")
    command = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    "start",
    ["import fedskew", "import fedskew.cli", "from fedskew.cli import main; sys.argv = ['fedskew', '--help']; main()"],
    ids=["import", "import of the command line", "--help"],
)
def test_a_light_start_does_without_torch(start: str) -> None:
    script = f"import sys\ntry:\n    {start}\nexcept SystemExit:\n    pass\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_tests_mirror_the_package() -> None:
    tests = Path(__file__).parent
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    assert {str(folder) for folder in folders if not (PACKAGE / folder).is_dir()} == {"deploy"}  # a folder of files


def test_every_public_name_is_there() -> None:
    for name in fedskew.__all__:
        assert getattr(fedskew, name) is not None


def test_nothing_is_ever_unpickled() -> None:
    sources = sorted(PACKAGE.rglob("*.py"))
    found = {str(path): list(_unpicklings(ast.parse(path.read_text(encoding="utf-8")))) for path in sources}
    assert len(found) > 50
    assert not {path: calls for path, calls in found.items() if calls}
    assert issubclass(values._Loader, yaml.SafeLoader)
    assert issubclass(table_encoding._Loader, yaml.SafeLoader)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text, yaml.Loader)",
        "yaml.unsafe_load(text)",
        "eval(text)",
    ],
)
def test_the_check_would_find_it(code: str) -> None:
    assert list(_unpicklings(ast.parse(code)))


def _unpicklings(tree: ast.AST) -> Iterator[str]:
    """Whatever could run code that a file brings along."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in PICKLING)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PICKLING:
            yield node.module or ""
        elif isinstance(node, ast.Call) and not _is_safe(node):
            yield ast.unparse(node)


def _is_safe(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    said = {word.arg: ast.unparse(word.value) for word in call.keywords}
    if name in ("np.load", "numpy.load"):
        return said.get("allow_pickle") == "False"
    if name == "torch.load":
        return said.get("weights_only") == "True"
    if name == "yaml.load":
        return [ast.unparse(argument) for argument in call.args[1:]] == ["_Loader"]  # both are tested above
    return name not in ("yaml.unsafe_load", "yaml.full_load", "eval", "exec")


REPOSITORY = Path(__file__).parents[1]


def packages() -> set[str]:
    return {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def test_the_architecture_page_says_where_things_are() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    described, changes = text.split("## To change X, open Y")
    assert set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", described, re.MULTILINE)))) == packages()
    rows = re.findall(r"^\| ([^|]+) \| (\[[^|]+) \| ([^|]*) \|$", changes, re.MULTILINE)
    assert len(rows) == changes.count("\n| ") - 1 >= 18
    for change, opened, note in rows:
        files = [REPOSITORY / path for path in re.findall(r"\]\(\.\./([^)]+)\)", opened)]
        assert files, change
        for file in files:
            assert file.is_file(), f"{change}: {file}"
        beside = [file.parent for file in files]
        for name in re.findall(r"`([\w/]*(?:\.py|/))`", note):
            assert any((folder / name).exists() for folder in (PACKAGE, *beside)), f"{change}: {name}"
        source = "".join(file.read_text(encoding="utf-8") for file in files)
        for name in re.findall(r"`([A-Z]\w+(?:\.\w+)?)`", note):
            assert all(re.search(rf"(class|def) {part}\b", source) for part in name.split(".")), f"{change}: {name}"


def test_tools_and_benchmarks_import_names_that_exist() -> None:
    """Some of them need packages that are not installed here, so their imports are only compared."""
    imported = 0
    files = [path for folder in ("tools", "benchmarks") for path in (REPOSITORY / folder).rglob("*.py")]
    for file in sorted(path for path in files if ".venvs" not in path.parts):  # environments of the benchmarks' peers
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fedskew":
                module = importlib.import_module(node.module or "")
                for name in (alias.name for alias in node.names):
                    is_module = hasattr(module, "__path__") and importlib.util.find_spec(f"{node.module}.{name}")
                    assert hasattr(module, name) or is_module, f"{file}: {node.module} has no {name}"
                    imported += 1
    assert imported > 50


def test_the_picture_shows_every_package_and_the_modules_of_a_round() -> None:
    drawing = runpy.run_path(str(REPOSITORY / "tools" / "draw_architecture.py"))
    assert {name for row in drawing["PACKAGES"] for name, _ in row} == packages()
    for step, module, _, calls in drawing["ROUND"]:
        assert (PACKAGE / module).is_file(), step
        for called in re.findall(r"[\w/]+\.py", calls):
            assert (PACKAGE / called).is_file() or ((PACKAGE / module).parent / called).is_file(), f"{step}: {called}"
    drawn = drawing["PICTURE"].read_text(encoding="utf-8")
    assert drawn == drawing["picture"](), "python tools/draw_architecture.py draws it anew"


def test_a_run_and_a_round_enter_few_modules() -> None:
    """What a reader must open to follow them; lower the numbers when modules are joined."""
    tool = [sys.executable, str(REPOSITORY / "tools" / "modules_entered.py"), "--json"]
    done = subprocess.run(tool, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    entered = {name: account["modules"] for name, account in json.loads(done.stdout).items()}
    assert 10 < entered["fs.run, round 2"] <= 30
    assert 10 < entered["fedskew run, round 2"] <= 31  # one more, which shows progress in the terminal
    assert 30 < entered["fedskew run"] <= 60
