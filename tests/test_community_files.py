"""Files for GitHub, PyPI and journals: they parse, agree with the package, and name files and commands that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from fedskew import __version__
from fedskew.cli.app import app
from fedskew.methods import METHODS

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
PAGES = ["CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "paper.md", ".github/pull_request_template.md"]
YAML_FILES = [
    ROOT / "CITATION.cff",
    ROOT / ".pre-commit-config.yaml",
    *sorted(GITHUB.rglob("*.yml")),
]


WHERE_GITHUB_LOOKS = [
    "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "CITATION.cff",
    ".github/pull_request_template.md", ".github/ISSUE_TEMPLATE/config.yml", ".github/workflows/ci.yml",
]  # fmt: skip


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", WHERE_GITHUB_LOOKS)
def test_a_file_is_where_github_looks_for_it(name: str) -> None:
    assert read(name).strip()


def test_the_citation_agrees_with_the_package() -> None:
    citation = read_yaml(ROOT / "CITATION.cff")
    project = tomllib.loads(read("pyproject.toml"))["project"]
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "type", "authors"} <= citation.keys()
    assert str(citation["version"]) == __version__
    assert citation["license"] == project["license"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in project["authors"]]
    assert set(citation["keywords"]) == set(project["keywords"])


def test_the_changelog_has_a_section_for_this_version_and_for_the_next() -> None:
    sections = re.findall(r"^## \[(.*?)\]", read("CHANGELOG.md"), re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert __version__ in sections
    kinds = set(re.findall(r"^### (\w+)$", read("CHANGELOG.md"), re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.parametrize("path", sorted(GITHUB.glob("ISSUE_TEMPLATE/*.yml")), ids=lambda path: path.stem)
def test_an_issue_form_has_what_github_needs(path: Path) -> None:
    form = read_yaml(path)
    if path.stem == "config":
        assert form.keys() <= {"blank_issues_enabled", "contact_links"}
        return
    assert {"name", "description", "body"} <= form.keys()
    ids = [item["id"] for item in form["body"] if item["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 0
    for item in form["body"]:
        assert item["type"] in {"markdown", "input", "textarea", "dropdown", "checkboxes"}
        assert ("value" if item["type"] == "markdown" else "label") in item["attributes"]


@pytest.mark.parametrize("path", sorted(GITHUB.glob("workflows/*.yml")), ids=lambda path: path.stem)
def test_a_workflow_has_jobs_whose_steps_run_or_use_something(path: Path) -> None:
    workflow = read_yaml(path)
    assert True in workflow, "YAML reads the key `on` as true"
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["runs-on"]
        assert set(job.get("needs", "").split()) <= workflow["jobs"].keys()
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert "@" in step.get("uses", "@")


def test_tests_run_on_three_systems_and_on_every_python_of_the_classifiers() -> None:
    matrix = read_yaml(GITHUB / "workflows" / "ci.yml")["jobs"]["tests"]["strategy"]["matrix"]
    classifiers = tomllib.loads(read("pyproject.toml"))["project"]["classifiers"]
    assert set(matrix["python"]) == {c.rpartition(" ")[2] for c in classifiers if re.search(r":: 3\.\d+$", c)}
    assert {system.partition("-")[0] for system in matrix["os"]} == {"ubuntu", "macos", "windows"}


@pytest.mark.parametrize("name", [*PAGES, *(str(path.relative_to(ROOT)) for path in YAML_FILES)])
def test_files_commands_and_targets_that_are_named_exist(name: str) -> None:
    text = read(name)
    named = re.findall(r"(?<![\w./-])((?:docs|tools|benchmarks|\.ci)/[\w./-]*\w)", text)
    named += re.findall(r"\]\(([\w./-]+)[)#]", text) + re.findall(r"(?<![\w/])([A-Z_]{4,}\.(?:md|cff))\b", text)
    assert [path for path in named if not (ROOT / path).exists()] == []
    commands: Any = get_command(app)
    shown = re.findall(r"(?:`|^ {10})fedskew ([a-z]+)", text, re.MULTILINE)
    assert set(shown) - commands.commands.keys() == set()
    targets = set(re.findall(r"(?:`|run: )make ([\w-]+)", text))
    assert targets <= set(re.findall(r"^([\w-]+)(?: [\w-]+)*:", read("Makefile"), re.MULTILINE)) | {"test-all"}


PAPER_SECTIONS = [
    "Summary", "Statement of need", "State of the field", "Software design", "Research impact statement",
    "Limitations", "AI usage disclosure", "Acknowledgements", "References",
]  # fmt: skip
"""Those that the Journal of Open Source Software requires since 2026, and the limitations."""


def test_the_paper_cites_what_its_bibliography_has_and_counts_the_methods() -> None:
    text = read("paper.md")
    header, body = text.split("---\n", 2)[1:]
    about = yaml.safe_load(header)
    assert {"title", "tags", "authors", "affiliations", "date", "bibliography"} <= about.keys()
    assert set(re.findall(r"@(\w+)", body)) == set(
        re.findall(r"^@\w+\{(\w+),", read(about["bibliography"]), re.MULTILINE)
    )
    claimed = re.search(r"more than (\d+) methods", body)
    assert claimed is not None
    assert int(claimed[1]) < len(METHODS)
    assert re.findall(r"^# (.*)$", body, re.MULTILINE) == PAPER_SECTIONS
    assert 750 <= len(body.split()) <= 1750, "the length that the journal asks for"


def test_the_paper_quotes_times_that_were_measured() -> None:
    paragraph = next(line for line in read("paper.md").splitlines() if line.startswith("Its speed"))
    measured = read("benchmarks/peers-h200.md") + read("benchmarks/peers-cpu.md")
    quoted = re.findall(r"\b0\.\d{3}\b", paragraph)
    assert len(quoted) >= 10
    assert [time for time in quoted if f"| {time} |" not in measured] == []
