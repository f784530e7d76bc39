"""The command line. A user's mistake is one line on stderr and exit status 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from fedskew.errors import UserError, nearest

USAGE_ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    # Let idle threads sleep: on a busy machine, spinning threads made rounds twenty times slower. OpenMP reads this
    # once, when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import typer
    from typer.main import get_command

    from fedskew.cli.app import app
    from fedskew.cli.terminal import allow_any_encoding

    allow_any_encoding()
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]  # click's class, or that of typer's copy of click
    try:
        status = get_command(app).main(args=arguments, prog_name="fedskew", standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        return _print_error(str(error))
    except usage_error as error:
        return _print_error(_usage_message(error))
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # prevents a traceback at exit
        return BROKEN_PIPE
    return status if isinstance(status, int) else 0


def _print_error(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return USAGE_ERROR


def _usage_message(error: Any) -> str:
    """Describe a usage error in one line."""
    context = error.ctx
    if hasattr(error, "possibilities") and context is not None:
        options = [name for parameter in context.command.params for name in parameter.opts]
        hint = nearest(error.option_name, options)
        meant = f"did you mean {hint!r}?" if hint else f"{context.command_path} --help lists them"
        return f"unknown option {error.option_name!r}; {meant}"
    return " ".join(str(error.format_message()).split())
