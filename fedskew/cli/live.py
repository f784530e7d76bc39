"""`fedskew live`: the report of runs that may still be going on, served to this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from fedskew.cli.run import examples

EXAMPLES = ("fedskew live runs",)


def add_to(app: typer.Typer) -> None:
    app.command("live", epilog=examples(EXAMPLES))(_command)


def _command(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="run folders, or folders of them, such as a sweep's; they "
                                  "need not exist yet", show_default=False)
    ],
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", help="on 127.0.0.1 (default: 8765, or a free one)",
                                 show_default=False, min=0, max=65535)
    ] = None,
) -> None:  # fmt: skip
    """Serve the report of runs on 127.0.0.1; the page keeps up with what they write. Ends with ^C."""
    import threading

    from fedskew.cli.terminal import stdout
    from fedskew.errors import UserError
    from fedskew.live.server import LiveServer

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
