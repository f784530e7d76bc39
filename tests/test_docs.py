"""The documentation holds: its Python runs, its commands exist, its tables name what there is.

How a block in README.md and docs/*.md is marked decides what is done with it:

    python           executed, the blocks of a document one after another in one namespace
    python no-run    not executed (large data, long runs)
    bash run         every `fedskew` command in it is executed
    bash             every `fedskew` command in it is parsed, and its method made
    file=NAME        the block is also written to that file first

A comment `# → TEXT` in Python says that TEXT is printed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from command_lines import parse_fedskew
from doc_blocks import Block, blocks

import fedskew as fs
from fedskew.cli import main
from fedskew.data import PARTITIONS
from fedskew.data.catalogue import DATASETS
from fedskew.experiment.config import Config, load_yaml, parse_assignments
from fedskew.methods import METHODS, make_method

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to be in. Modules that a document writes are forgotten."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


SLOW = {
    "choose.md", "metrics.md", "pretrained.md", "report.md", "runs.md", "sweeps.md", "tutorial-compare.md",
    "tutorial-see.md", "tutorial-sites.md",
}  # fmt: skip
"""Documents with many runs. `make test` parses their commands, and checks their links and tables."""


@pytest.mark.parametrize(
    "document",
    [pytest.param(path, id=path.name, marks=pytest.mark.slow if path.name in SLOW else ()) for path in DOCUMENTS],
)
def test_a_document_does_what_it_says(
    document: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace: dict[str, Any] = {"__name__": "document"}
    monkeypatch.setitem(sys.modules, "document", type(sys)("document"))
    for block in blocks(document):
        if block.file:
            (scratch / block.file).write_text(block.text, encoding="utf-8")
        if block.language == "python" and "no-run" not in block.marks:
            _execute(document, block, namespace, capsys)
        elif block.language == "bash":
            for arguments in block.commands:
                if "run" in block.marks:
                    assert main(arguments) == 0, f"{document.name}: {arguments}: {capsys.readouterr().err}"
                else:
                    _parse(arguments)
        elif block.language == "yaml":
            (scratch / "block.yaml").write_text(block.text, encoding="utf-8")
            load_yaml(scratch / "block.yaml")


@pytest.mark.parametrize("name", sorted(SLOW))
def test_the_commands_of_a_long_document_exist_and_its_python_compiles(name: str, scratch: Path) -> None:
    read = list(blocks(ROOT / "docs" / name))
    assert read
    for block in read:
        if block.file:
            (scratch / block.file).write_text(block.text, encoding="utf-8")
        if block.language == "python":
            compile(block.text, name, "exec", dont_inherit=True)
        for arguments in block.commands:
            _parse(arguments)


def _execute(document: Path, block: Block, namespace: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    if block.file:  # entered once, by import, as it is for the command line
        sys.path.insert(0, ".")
        try:
            module = __import__(Path(block.file).stem)
        finally:
            sys.path.remove(".")
        namespace.update(vars(module) | {"__name__": "document"})
    else:
        code = compile("\n" * block.line + block.text, str(document), "exec", dont_inherit=True)
        exec(code, namespace)
    printed = capsys.readouterr().out
    for said in re.findall(r"^# → (.*)$", block.text, re.MULTILINE):
        assert said in printed, f"{document.name} line {block.line}: {said!r} was not printed, but: {printed}"


def _parse(arguments: list[str]) -> None:
    """Refuse options and methods that there are not, without running anything."""
    given = parse_fedskew(arguments)
    if given.get("method"):
        settings = parse_assignments(given.get("set") or ())
        params = {key.removeprefix("method."): v for key, v in settings.items() if key.startswith("method.")}
        config = Config(method=given["method"], method_params=params)
        make_method(config.method, config.method_params)
    methods = given.get("methods") or ""
    for name in (methods if isinstance(methods, str) else ",".join(methods)).replace("all", "").split(","):
        without_settings = name.partition(":")[0] if "=" in name else name
        assert not name or make_method(without_settings)
    assert given.get("partition") in (None, *PARTITIONS)


def test_every_command_is_shown_somewhere() -> None:
    shown = {arguments[0] for document in DOCUMENTS for block in blocks(document) for arguments in block.commands}
    assert shown >= {"run", "compare", "partition", "datasets", "partitions", "bench"}


def _named(document: str) -> set[str]:
    return set(re.findall(r"`([^`\s]+)`", (ROOT / "docs" / document).read_text(encoding="utf-8")))


def test_every_method_rule_and_dataset_is_documented() -> None:
    assert _named("fidelity.md") >= METHODS.keys()
    assert _named("partitions.md") >= PARTITIONS.keys()
    assert _named("own-data.md") >= DATASETS.keys()


def test_every_parameter_of_a_rule_is_documented_with_its_default() -> None:
    text = (ROOT / "docs" / "partitions.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z-]+)` \|.*\| ([^|]*) \|$", text, re.MULTILINE))
    for name, rule in PARTITIONS.items():
        assert set(re.findall(r"`(\w+)`", rows[name])) == {field.name for field in fields(rule)}
        for parameter, default in re.findall(r"`(\w+)` \(([\d.]+)", rows[name]):
            assert float(default) == getattr(rule, parameter)


@pytest.mark.parametrize(("what", "of"), [("round", "rounds.jsonl"), ("summary", "summary.json")])
def test_every_key_that_is_recorded_is_explained(what: str, of: str) -> None:
    text = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    table = re.search(rf"<!-- keys of a {what} -->(.*?)<!-- end -->", text, re.DOTALL)
    assert table is not None
    explained = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (.*?) \|", table[1], re.MULTILINE))))
    federation = fs.federation("digits", fs.Dirichlet(clients=4, beta=0.5), seed=0)
    result = fs.run(federation, "fedavg", rounds=1, local_epochs=1, eval_local=True, client_test=0.2)
    recorded = result.history[-1].to_json().keys() if what == "round" else result.summary().keys()
    assert explained == set(recorded), of


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]*)(?:#([\w-]*))?\)", document.read_text(encoding="utf-8")):
            path = document.parent / target[0] if target[0] else document
            assert path.exists(), f"{document.name}: {target[0]}"
            if target[1] and path.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
                anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert target[1] in anchors, f"{document.name}: {target}"
