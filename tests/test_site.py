"""The documentation site: generated pages are complete, and the whole site builds without a warning or broken link."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest
from typer.main import get_command

import fedskew
from fedskew.cli.app import app
from fedskew.experiment.config import KEYS
from fedskew.methods import METHODS

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def generators() -> Iterator[dict[str, ModuleType]]:
    """The modules of tools/site that need no MkDocs."""
    sys.path.insert(0, str(ROOT / "tools" / "site"))
    names = ("repository_pages", "method_pages", "reference_pages")
    yield {name: importlib.import_module(name) for name in names}
    sys.path.remove(str(ROOT / "tools" / "site"))
    for name in names:
        del sys.modules[name]


def test_every_method_has_a_page_with_its_facts(generators: dict[str, ModuleType]) -> None:
    pages = generators["method_pages"].method_pages()
    assert set(pages) == {"methods/index.md", *(f"methods/{name}.md" for name in METHODS)}
    for name, entry in METHODS.items():
        page = pages[f"methods/{name}.md"]
        assert f"# {name}\n" in page
        for heading in ("**paper**", "**leaves the client**", "**reveals about labels**", "**extra compute"):
            assert heading in page
        assert f"[{name}]({name}.md)" in pages["methods/index.md"]
        assert ("Updates and models can reveal" in page) == (name not in ("centralised", "local-only"))
        assert entry.summary
    fedvls = pages["methods/fedvls.md"]
    assert "| `distill_weight` | `0.1` | λ, the weight of the distillation; the paper's value" in fedvls
    assert re.search(r"above FedAvg in \d+ of \d+ reruns", fedvls)
    assert "[fidelity](../fidelity.md)" in fedvls


def test_a_gain_on_a_page_is_that_of_the_reruns(generators: dict[str, ModuleType]) -> None:
    from fedskew.lab.diagnosis.reruns import shipped_reruns

    (rerun,) = [
        rerun for rerun in shipped_reruns() if rerun.method == "fedvls" and rerun.setting.dataset == "fashion-mnist"
        and dict(rerun.setting.params).get("beta") == 0.05 and rerun.setting.per_round == 2
    ]  # fmt: skip
    gain = sum(rerun.gains) / len(rerun.gains)
    rows = generators["method_pages"].method_pages()["methods/fedvls.md"].splitlines()
    (row,) = [row for row in rows if row.startswith("| fashion-mnist | dirichlet beta 0.05 | 2 of 20")]
    assert row.endswith(f"| {gain:+.1f} |")


def test_every_command_and_option_has_a_row(generators: dict[str, ModuleType]) -> None:
    pages = generators["reference_pages"].command_pages()
    root = get_command(app)
    for name, command in root.commands.items():
        for sub in getattr(command, "commands", {"": command}).values():
            for parameter in sub.params:
                assert getattr(parameter, "hidden", False) or any(
                    option in pages[f"commands/{name}.md"]
                    for option in [*parameter.opts, parameter.human_readable_name]
                )
    assert "## fedskew federate certs" in pages["commands/federate.md"]
    assert "`--data NAME|PATH`" in pages["commands/run.md"]


def test_every_configuration_key_has_a_row(generators: dict[str, ModuleType]) -> None:
    page = generators["reference_pages"].configuration_page()
    assert set(re.findall(r"^\| `(\w+)` ", page, re.MULTILINE)) == set(KEYS)
    assert "| `rounds` | `60` | `--rounds` | communication rounds |" in page


def test_every_public_name_is_on_a_page_of_the_api(generators: dict[str, ModuleType]) -> None:
    names = " ".join(generators["reference_pages"].API.values()).split()
    assert sorted(names) == sorted(fedskew.__all__)
    text = "".join(generators["reference_pages"].api_pages().values())
    assert "::: fedskew.experiment.run.run\n" in text
    assert text.count(":::") == len(names)


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        ("[a](../benchmarks/peers/README.md#x)", "docs/speed.md", "[a](benchmarks/peers/index.md#x)"),
        ("[a](choose.md)", "docs/speed.md", "[a](choose.md)"),
        ("[a](docs/choose.md)", "README.md", "[a](choose.md)"),
        ("![a](results/map.png)", "RESULTS.md", "![a](results/map.png)"),
        ("[a](../peers-cpu.md)", "benchmarks/peers/README.md", "[a](../peers-cpu.md)"),
        ("[a](../README.md)", "docs/speed.md", "[a](index.md)"),
        ("[a](../fedskew/task.py)", "docs/speed.md", "[a](source/fedskew/task.py.md)"),
        ("[a](https://flower.ai) [b](#here)", "README.md", "[a](https://flower.ai) [b](#here)"),
        ("```bash run\n[a](b.md)\n```", "README.md", "```bash\n[a](b.md)\n```"),
        ("```text file=a.csv\n```", "README.md", '```text title="a.csv"\n```'),
    ],
)
def test_links_and_code_blocks_are_adapted(
    generators: dict[str, ModuleType], text: str, path: str, expected: str
) -> None:
    assert generators["repository_pages"].adapt(text, path) == expected


class _Links(HTMLParser):
    """The targets and the anchors of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value and not re.match(r"[a-z]+:|//", value):
                self.targets.append(value)


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_no_link_is_broken(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {page: _Links(page) for page in (tmp_path / "site").rglob("*.html") if page.name != "404.html"}
    assert len(pages) > 150
    broken = [
        (page, target) for page, links in pages.items() for target in links.targets if not _leads(page, target, pages)
    ]
    assert broken == []
    index = (tmp_path / "site" / "search" / "search_index.json").read_text(encoding="utf-8")
    assert "vacant-class distillation" in index


def _leads(page: Path, target: str, pages: dict[Path, _Links]) -> bool:
    address, _, anchor = unquote(target).partition("#")
    found = (page.parent / address.partition("?")[0]).resolve() if address else page
    found = found / "index.html" if found.is_dir() else found
    if not found.exists():
        return False
    return not anchor or found not in pages or anchor in pages[found].anchors
