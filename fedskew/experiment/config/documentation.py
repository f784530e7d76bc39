"""Append the configuration keys, with their defaults and help, to the docstrings of Python functions."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import fields
from typing import TypeVar

from fedskew.experiment.config.keys import Config

Function = TypeVar("Function", bound=Callable[..., object])
_NOT_LISTED = ("data", "data_params", "data_dir", "method", "method_params", "partition")
"""Keys that are not listed as settings. They choose data, method and partition, for which functions have parameters."""


def documents_settings(*excluded: str) -> Callable[[Function], Function]:
    """Append the settings, with their defaults from `Config`, to a function's docstring.

    Settings in `excluded` are left out, and so are settings that the function has as parameters.
    """

    def document(function: Function) -> Function:
        lines = [_describe_key(name) for name in setting_names(*excluded, *inspect.signature(function).parameters)]
        function.__doc__ = f"{inspect.getdoc(function)}\n\nSettings:\n" + "\n".join(lines) + "\n"
        return function

    return document


def document_config() -> None:
    """Append all keys with their defaults to the docstring of `Config`."""
    described = [spec.name for spec in fields(Config) if "help" in spec.metadata]
    text = "\n".join(map(_describe_key, described))
    Config.__doc__ = (
        f"{inspect.getdoc(Config)}\n\nKeys:\n{text}\n    partition: how the data are split; a PartitionConfig\n"
    )


def setting_names(*excluded: str) -> list[str]:
    """Return the keys of a configuration that functions list as `**settings`, except `excluded`."""
    return [spec.name for spec in fields(Config) if spec.name not in (*_NOT_LISTED, *excluded)]


def _describe_key(name: str) -> str:
    spec = next(spec for spec in fields(Config) if spec.name == name)
    text = f"{name}={getattr(Config(), name)!r}: {spec.metadata['help']}"
    return textwrap.indent(textwrap.fill(text, 96, subsequent_indent="    "), "    ")
