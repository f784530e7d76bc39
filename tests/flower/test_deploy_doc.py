"""docs/deploy.md and the installed Flower agree: its commands exist, its files are read, its names are known.

That `fedskew` commands exist is for tests/test_docs.py to say.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from command_lines import parse_flwr, parse_superlink
from doc_blocks import Block, blocks

from fedskew.cli import main
from fedskew.flower.policy import Policy
from fedskew.flower.releases import Release
from fedskew.flower.settings import FederationSettings
from fedskew.flower.site_config import load_site
from fedskew.flower.site_ledger import SiteLedger
from fedskew.methods import METHODS

DOCS = Path(__file__).parents[2] / "docs"
DEPLOY = DOCS / "deploy.md"
PROXY = DOCS.parent / "deploy" / "nginx.conf"
TEXT = DEPLOY.read_text(encoding="utf-8")


def commands(program: str) -> list[list[str]]:
    """The arguments of a program's commands in the document."""
    lines = [line for block in blocks(DEPLOY) if block.language == "bash" for line in _lines(block)]
    return [words[1:] for words in lines if words and words[0] == program]


def _lines(block: Block) -> list[list[str]]:
    return [shlex.split(line, comments=True) for line in block.text.replace("\\\n", " ").splitlines()]


def _superlink(arguments: list[str]) -> None:
    module, *arguments = arguments[1:]
    assert module == "fedskew.flower.superlink"
    given = parse_superlink(arguments)
    assert given.enable_supernode_auth
    assert not given.insecure
    assert (given.host, given.port) == ("127.0.0.1", 9093)


@pytest.mark.parametrize(("program", "parse", "least"), [("python", _superlink, 1), ("flwr", parse_flwr, 4)])
def test_flower_knows_the_commands(program: str, parse: Callable[[list[str]], Any], least: int) -> None:
    found = commands(program)
    assert len(found) >= least
    for arguments in found:
        parse(arguments)


def test_commands_in_the_text_exist() -> None:
    mentioned = set(re.findall(r"`flwr ((?:supernode )?[a-z]+)", TEXT))
    assert mentioned >= {"log", "stop", "supernode unregister", "supernode list"}
    numbered = {"log", "stop", "supernode unregister"}
    for words in mentioned - {"supernode register"}:  # which is among the commands above, with its arguments
        parse_flwr([*words.split(), *(["7"] if words in numbered else [])])


def test_ports_are_those_of_the_proxy() -> None:
    proxy = PROXY.read_text(encoding="utf-8")
    assert "listen 9092 ssl;" in proxy
    assert "server 127.0.0.1:9093;" in proxy
    (connection,) = (tomllib.loads(block.text) for block in blocks(DEPLOY) if block.language == "toml")
    default = connection["superlink"]["default"]
    assert connection["superlink"][default]["address"] == "127.0.0.1:9093"
    (connect,) = re.findall(r"--superlink (\S+) --keys", TEXT)
    assert connect == "fl.example.org:9092"


def test_settings_and_the_site_s_file_are_read(tmp_path: Path) -> None:
    known = {field.name for field in fields(FederationSettings)}
    assert set(re.findall(r"`federation\.(\w+)`", TEXT)) | set(re.findall(r"--federation (\w+)=", TEXT)) <= known
    site, secure = (block.text for block in blocks(DEPLOY) if block.language == "text")
    (tmp_path / "site.yaml").write_text(site, encoding="utf-8")
    assert load_site(tmp_path / "site.yaml").data_params == {"label": "diagnosis"}
    (tmp_path / "site.yaml").write_text(site + secure, encoding="utf-8")
    assert load_site(tmp_path / "site.yaml").policy.requires("secure-aggregation")


def test_the_example_of_a_budget_is_what_the_program_prints(tmp_path: Path) -> None:
    ledger = SiteLedger(tmp_path, Policy(epsilon=1.0))
    assert f"`{ledger.describe_plan(Release('', 0, 'local', 20.0), 10)[0]}`" in TEXT
    of_samples = SiteLedger(tmp_path, Policy(example_epsilon=4.0))
    assert f"`{of_samples.describe_plan(Release('', 0, 'example', 4.0), 10)[0]}`" in TEXT


def test_the_tests_behind_the_answers_about_security_exist() -> None:
    text = (DOCS / "security.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", text)
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| question")]
    assert len(rows) >= 20
    assert all("::" in row for row in rows)
    for file, name in named:
        (path,) = Path(__file__).parents[1].rglob(file)
        assert f"def {name}(" in path.read_text(encoding="utf-8"), f"{file}::{name}"


def test_the_list_of_what_leaves_a_site_names_every_method_that_reveals_something_about_labels() -> None:
    text = (DOCS / "federation.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("- For some methods, as `fedskew methods` shows")]
    named = {
        kind: set(re.findall(r"`([a-z0-9-]+)`", part)) for kind, part in re.findall(r"(label \w+)[^(]*\((.*?)\)", line)
    }
    assert len(named) == 3
    for kind, methods in named.items():
        assert methods == {entry.name for entry in METHODS.values() if kind in entry.reveals}, kind


def test_the_proxy_s_calls_are_as_many_as_the_text_says() -> None:
    (listed,) = re.findall(r"\^/v1/fleet/\(([a-z|-]+)\)", PROXY.read_text(encoding="utf-8"))
    assert len(listed.split("|")) == 10
    assert "the ten calls" in TEXT


def test_the_app_s_own_instructions_start_the_same_superlink_behind_the_same_proxy(tmp_path: Path) -> None:
    assert main(["federate", "init", str(tmp_path / "app"), "--sites", "a,b", "--data", "digits"]) == 0
    text = (tmp_path / "app" / "README.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.replace("\\\n", " ").splitlines() if "flower.superlink" in line]
    assert [shlex.split(line)[1:]] == commands("python")
    assert "--superlink SERVER:9092" in text
