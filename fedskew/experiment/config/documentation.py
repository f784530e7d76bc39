"""Documentation of the settings that Python functions take as keyword arguments, with their defaults."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import fields
from typing import TypeVar

from fedskew.experiment.config.keys import Config

Function = TypeVar("Function", bound=Callable[..., object])
_OBJECTS = ("data", "data_params", "data_dir", "method", "method_params", "model", "partition")
"""Keys that these functions take as objects, under parameters of their own."""


def documents_settings(*left_out: str) -> Callable[[Function], Function]:
    """Append all settings with their defaults to a function's docstring, from the fields of `Config`."""

    def document(function: Function) -> Function:
        lines = [_line(name) for name in setting_names(*left_out)]
        function.__doc__ = f"{inspect.getdoc(function)}\n\nSettings:\n" + "\n".join(lines) + "\n"
        return function

    return document


def document_config() -> None:
    """Append all keys with their defaults to the docstring of `Config`."""
    described = [spec.name for spec in fields(Config) if "help" in spec.metadata]
    text = "\n".join(map(_line, described))
    Config.__doc__ = (
        f"{inspect.getdoc(Config)}\n\nKeys:\n{text}\n    partition: how the data are split; a PartitionConfig\n"
    )


def setting_names(*left_out: str) -> list[str]:
    """Return the keys of a configuration that are passed as keyword arguments."""
    return [spec.name for spec in fields(Config) if spec.name not in (*_OBJECTS, *left_out)]


def _line(name: str) -> str:
    spec = next(spec for spec in fields(Config) if spec.name == name)
    text = f"{name}={getattr(Config(), name)!r}: {spec.metadata['help']}"
    return textwrap.indent(textwrap.fill(text, 96, subsequent_indent="    "), "    ")
