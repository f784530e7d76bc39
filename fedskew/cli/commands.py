"""How commands are registered: with examples in their help, and a hint when a command is misspelt."""

from __future__ import annotations

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
    """Register a command; its help ends with the examples."""
    EXAMPLES[f"{group} {name}".strip()] = examples
    heading = "Examples:" if len(examples) > 1 else "Example:"
    app.command(name, epilog="\n\n".join((heading, *examples)))(command)
