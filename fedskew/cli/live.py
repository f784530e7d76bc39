"""`fedskew live`: the report of runs that may still be going on, served to this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from fedskew.cli.run import examples

EXAMPLES = ("fedskew live runs", "fedskew live runs/my-sweep --wait")


def add_to(app: typer.Typer) -> None:
    app.command("live", epilog=examples(EXAMPLES))(_command)


def _command(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="run folders, or folders of them, such as a sweep's",
                                  show_default=False)
    ],
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", help="on 127.0.0.1 (default: 8765, or a free one)",
                                 show_default=False, min=0, max=65535)
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="for runs that have not begun yet")] = False,
) -> None:  # fmt: skip
    """Serve the report of runs on 127.0.0.1; the page keeps up with what they write. Ends with ^C."""
    import threading

    from fedskew.cli.terminal import stdout
    from fedskew.errors import UserError
    from fedskew.live.server import LiveServer

    if not wait:
        _expect_runs(runs)
    try:
        server = LiveServer(runs, port)
    except OSError as error:
        raise UserError(f"cannot serve on port {port}: {error.strerror or error}; choose another --port") from error
    server.start()
    stdout().print(f"live on {server.url}; ^C ends it", markup=False, soft_wrap=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.close()


def _expect_runs(paths: list[str]) -> None:
    """A page that waits for a misspelt folder would wait for ever."""
    from fedskew.errors import UserError
    from fedskew.report.recorded import find_runs

    for path in paths:
        try:
            find_runs([path])
        except UserError as error:
            raise UserError(f"{error}; --wait waits until it has begun") from error
