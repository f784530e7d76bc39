"""The app with all commands, in the order of `fedskew --help`, and `main`, which runs one of them.

`main` reports a user's mistake, or a full disk, in one line on stderr and returns exit status 2.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.main import get_command

from fedskew import __version__
from fedskew.cli import (
    bench,
    catalogues,
    choose,
    compare,
    demo,
    diagnose,
    doctor,
    export,
    federate,
    partition,
    pretrain,
    report,
    reproduce,
    run,
    sweep,
)
from fedskew.cli.commands import BROKEN_PIPE, EXAMPLES, INTERRUPTED, USAGE_ERROR, Commands
from fedskew.cli.terminal import allow_any_encoding
from fedskew.errors import UserError, nearest

__all__ = ["EXAMPLES", "app", "main"]

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

app = typer.Typer(
    cls=Commands,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with:\n\nfedskew demo",
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"fedskew {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _fedskew(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - handled by its callback
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Federated learning when clients' labels are skewed."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


_PANELS = {
    "Start here": (demo, diagnose, choose, run, export, doctor),
    "Compare": (compare, sweep),
    "Inspect": (report, partition, catalogues),
    "Lab": (reproduce, pretrain, bench),
    "Federation": (federate,),
}
for _panel, _modules in _PANELS.items():
    for _module in _modules:
        _module.add_to(app)
    # Only the commands that were just added have no panel yet.
    for _command in app.registered_commands:
        _command.rich_help_panel = _command.rich_help_panel or _panel
    for _group in app.registered_groups:
        _group.rich_help_panel = _group.rich_help_panel or _panel


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status. By default, the arguments are those of the process."""
    # Let OpenMP's idle threads sleep. On a busy machine, spinning threads can make rounds twenty times slower. OpenMP
    # reads this variable once, when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    allow_any_encoding()
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]  # click's UsageError, or that of typer's copy of click
    try:
        status = get_command(app).main(args=arguments, prog_name="fedskew", standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        return _print_error(str(error))
    except usage_error as error:
        return _print_error(_usage_message(error))
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except (BrokenPipeError, SystemExit) as end:
        # Rich and click answer a closed pipe with SystemExit(1). That status would mean that something failed.
        if not isinstance(end, BrokenPipeError) and not isinstance(end.__context__, BrokenPipeError):
            raise
        _discard_output()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        try:
            sys.stdout.flush()
        except OSError:  # stdout is the file that cannot be written
            _discard_output()
        return _print_error(f"cannot write{f' {error.filename}' if error.filename else ''}: {error.strerror}")
    return status if isinstance(status, int) else 0


def _discard_output() -> None:
    """Discard what stdout has not written yet. Otherwise Python would try to write it at exit, and fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_error(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return USAGE_ERROR


def _usage_message(error: Any) -> str:
    """Describe a usage error in one line."""
    context = error.ctx
    if hasattr(error, "possibilities") and context is not None:
        options = [name for parameter in context.command.params for name in parameter.opts]
        hint = nearest(error.option_name, options)
        advice = f"did you mean {hint!r}?" if hint else f"{context.command_path} --help lists the options"
        return f"unknown option {error.option_name!r}; {advice}"
    return " ".join(str(error.format_message()).split())
