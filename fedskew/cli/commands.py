"""How commands are registered: with examples in their help, and a hint when a command is misspelt."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from fedskew.errors import unknown

EXAMPLES: dict[str, tuple[str, ...]] = {}
"""The examples in each command's help, by command."""


class Commands(TyperGroup):
    """Refuses an unknown command with the nearest one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            raise unknown("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


def add_command(app: typer.Typer, name: str, command: Callable[..., None], *examples: str, group: str = "") -> None:
    """Register a command; the list of commands shows its first sentence, and its help ends with the examples."""
    EXAMPLES[f"{group} {name}".strip()] = examples
    heading = "Examples:" if len(examples) > 1 else "Example:"
    summary = re.split(r"(?<=[.])\s", (command.__doc__ or "").strip(), maxsplit=1)[0]
    app.command(name, short_help=summary, epilog="\n\n".join((heading, *examples)))(command)
