"""The files in deploy/ as data: the Dockerfile's stages, the services of compose.yaml, and systemd units."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


@dataclass
class Stage:
    """A stage of a Dockerfile: its base, and its own instructions in order."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def values(self, instruction: str) -> list[str]:
        return [value for name, value in self.instructions if name == instruction]

    def last(self, instruction: str) -> str | None:
        found = self.values(instruction)
        return found[-1] if found else None


class Dockerfile:
    """The stages of a Dockerfile."""

    def __init__(self, text: str) -> None:
        self.arguments: dict[str, str] = {}
        """The arguments before the first stage, with their defaults."""
        self.stages: dict[str, Stage] = {}
        lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
        for line in filter(None, re.sub(r"\\\n\s*", "", lines).splitlines()):
            instruction, value = line.split(maxsplit=1)
            if instruction == "FROM":
                base, _, name = value.partition(" AS ")
                self.stages[name] = stage = Stage(name, base)
            elif not self.stages:
                name, _, default = value.partition("=")
                self.arguments[name] = default
            else:
                stage.instructions.append((instruction, value))

    def base(self, stage: Stage, **arguments: str) -> str:
        """The base of a stage, with the values of arguments."""
        for name, value in (self.arguments | arguments).items():
            stage = Stage(stage.name, stage.base.replace(f"${{{name}}}", value))
        return stage.base

    def chain(self, target: str) -> list[Stage]:
        """The stages that a target builds on, the first one first, and the target itself."""
        stage = self.stages[target]
        base = self.base(stage)
        return [*(self.chain(base) if base in self.stages else ()), stage]

    def environment(self, target: str) -> dict[str, str]:
        """The variables of a target's containers."""
        lines = (line for stage in self.chain(target) for line in stage.values("ENV"))
        return dict(word.split("=", 1) for line in lines for word in shlex.split(line))

    def setting(self, target: str, instruction: str) -> str | None:
        """The last value of an instruction in a target or in what it builds on."""
        found = (stage.last(instruction) for stage in reversed(self.chain(target)))
        return next((value for value in found if value is not None), None)

    def words(self, target: str, instruction: str) -> list[str]:
        """ENTRYPOINT, CMD, VOLUME or the check of HEALTHCHECK, in the exec form."""
        value = self.setting(target, instruction)
        if value is None:
            return []
        words = json.loads(value[value.index("[") :])
        assert isinstance(words, list)
        return words


def read_dockerfile() -> Dockerfile:
    return Dockerfile((DEPLOY / "Dockerfile").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Service:
    """A service of compose.yaml, together with its image."""

    name: str
    values: Mapping[str, Any]
    image: Dockerfile

    @property
    def target(self) -> str:
        target: str = self.values["build"]["target"]
        return target

    @property
    def command(self) -> list[str]:
        """The whole command. A service with its own entry point does not get the image's arguments."""
        entry = self.values.get("entrypoint")
        default = self.image.words(self.target, "CMD") if entry is None else []
        return [*(entry or self.image.words(self.target, "ENTRYPOINT")), *self.values.get("command", default)]

    @property
    def mounts(self) -> dict[str, str]:
        """Volumes and folders beside compose.yaml, by the path in the container."""
        pairs = (text.split(":")[:2] for text in self.values.get("volumes", ()))
        return {path: source for source, path in pairs}

    @property
    def once(self) -> bool:
        """Whether the service ends by itself."""
        return "restart" not in self.values

    @property
    def needs(self) -> dict[str, str]:
        """The conditions under which the service starts, by the other service's name."""
        return {name: needed["condition"] for name, needed in self.values.get("depends_on", {}).items()}


def read_compose() -> tuple[dict[str, Any], dict[str, Service]]:
    """The whole file, and its services by name."""
    content = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    image = read_dockerfile()
    return content, {name: Service(name, values, image) for name, values in content["services"].items()}


def shell_commands(script: Path, program: str) -> list[list[str]]:
    """The arguments of a program's commands in a shell script."""
    lines = script.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    found = [line.split() for line in map(str.strip, lines) if line.startswith(f"{program} ")]
    return [words[1:] for words in found]


def read_unit(name: str) -> dict[str, list[str]]:
    """The values of each key of a systemd unit. No key is in two sections."""
    text = (DEPLOY / "systemd" / name).read_text(encoding="utf-8")
    values: dict[str, list[str]] = {}
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            values.setdefault(key, []).append(value)
    return values
