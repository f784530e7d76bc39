"""YAML as people write it: 1e-3 is a number, a repeated key is an error, and errors name line and column."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from fedskew.errors import UserError


class _Loader(yaml.SafeLoader):
    """A safe loader with YAML 1.2 floats that refuses repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is repeated", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+\Z"),
    list("-+.0123456789"),
)


def parse_yaml(source: str, where: str) -> Any:
    """Parse YAML text; errors begin with `where`."""
    try:
        return yaml.load(source, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        raise UserError(f"{where}:{place} {error.problem or error.context}; expected YAML") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2024-99-99
        raise UserError(f"{where}: {error}; expected YAML") from error
    except RecursionError as error:
        raise UserError(f"{where}: nested too deeply; expected YAML") from error


def read_yaml(path: str | Path) -> Any:
    """Read a YAML file."""
    try:
        source = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; expected a YAML text file") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    return parse_yaml(source, str(path))
