"""What the command line as a whole and its groups of commands have in common."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from fedskew.errors import unknown


class Commands(TyperGroup):
    """Refuses an unknown command with the nearest one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            raise unknown("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)
