"""YAML as people write it: 1e-3 is a number, a key given twice is an error, a mistake has a line and a column."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from fedskew.errors import UserError


class _Loader(yaml.SafeLoader):
    """Safe loading with YAML 1.2's floats and without silently overwritten keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+\Z"),
    list("-+.0123456789"),
)


def parse_yaml(source: str, where: str) -> Any:
    """The value that YAML text spells; `where` names it in an error."""
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
    """The value in a YAML file."""
    try:
        source = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; expected a YAML text file") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    return parse_yaml(source, str(path))
