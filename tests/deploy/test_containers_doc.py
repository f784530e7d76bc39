"""docs/containers.md: its images, targets and commands are those of deploy/."""

from __future__ import annotations

import re
import shlex

import pytest
from command_lines import parse_fedskew, parse_flwr
from deployment_files import ROOT, read_compose, read_dockerfile
from doc_blocks import blocks

DOCUMENT = ROOT / "docs" / "containers.md"
IMAGE = read_dockerfile()
TARGETS = {"fedskew": "simulation", "fedskew-server": "server", "fedskew-site": "site", "fedskew-proxy": "proxy"}


def commands(*beginning: str) -> list[list[str]]:
    """The document's commands that begin with these words, without them."""
    text = "\n".join(block.text for block in blocks(DOCUMENT) if block.language == "bash")
    lines = [shlex.split(line) for line in text.replace("\\\n", " ").splitlines()]
    return [words[len(beginning) :] for words in lines if tuple(words[: len(beginning)]) == beginning]


def test_every_image_is_built_from_its_target() -> None:
    built = {words[words.index("-t") + 1]: words[words.index("--target") + 1] for words in commands("docker", "build")}
    assert built == TARGETS
    images = {service.values["image"]: service.target for service in read_compose()[1].values()}
    assert images.items() <= TARGETS.items()


def test_what_a_container_is_told_exists() -> None:
    parsed = 0
    for words in commands("docker", "run"):
        after_option = {index + 1 for index, word in enumerate(words) if word == "--entrypoint"}
        at = next(index for index, word in enumerate(words) if word in TARGETS and index not in after_option)
        target, arguments = TARGETS[words[at]], words[at + 1 :]
        entry = IMAGE.words(target, "ENTRYPOINT")
        if "--entrypoint" in words[:at]:
            entry = [words[words.index("--entrypoint") + 1]]
        if entry[0] == "fedskew":
            parse_fedskew([*entry[1:], *arguments])
            parsed += 1
    assert parsed == 5


def test_what_is_executed_in_the_server_exists() -> None:
    pytest.importorskip("flwr")
    parse = {"fedskew": parse_fedskew, "flwr": parse_flwr}
    compose = ("docker", "compose", "-f", "deploy/compose.yaml", "exec")
    found = [words[1:] for words in (*commands("docker", "exec"), *commands(*compose))]
    assert len(found) == 4
    for program, *arguments in found:
        parse[program](arguments)


def test_the_folders_are_those_of_the_images() -> None:
    rows = re.findall(r"^\| `(fedskew[\w-]*)` \| .* \| (.*) \|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(rows).keys() == TARGETS.keys()
    for image, folders in rows:
        target = TARGETS[image]
        declared = {*IMAGE.words(target, "VOLUME"), IMAGE.setting(target, "WORKDIR") or "/etc/fedskew"}
        assert set(re.findall(r"`(/[\w/]+)`", folders)) == declared
