"""`fedskew federate`: a federation across machines, on Flower."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedskew.cli import federate_init, federate_site, federate_up
from fedskew.cli.flags import Json
from fedskew.cli.groups import Commands
from fedskew.cli.run import examples
from fedskew.errors import UserError

if TYPE_CHECKING:
    from fedskew.flower.credentials import Credentials

CERTS_EXAMPLES = ("fedskew federate certs keys --sites north,south,east --host fl.example.org",)

_IN_EARNEST = """These keys are for trials: whoever made them knows every site's secret. In earnest,
- take the server's certificate from your organisation's authority or a public one;
- let each site make its own pair, ssh-keygen -t ecdsa -b 384 -N '' -f node.key, and send you node.key.pub alone."""


def add_to(app: typer.Typer) -> None:
    group = typer.Typer(cls=Commands, help="Run a federation across machines, on Flower.", no_args_is_help=True)
    group.command("init", epilog=examples(federate_init.EXAMPLES))(with_flower(federate_init.command))
    group.command("up", epilog=examples(federate_up.EXAMPLES))(with_flower(federate_up.command))
    group.command("site", epilog=examples(federate_site.EXAMPLES))(with_flower(federate_site.command))
    group.command("certs", epilog=examples(CERTS_EXAMPLES))(with_flower(_certs))
    app.add_typer(group, name="federate")


def with_flower(command: Callable[..., None]) -> Callable[..., None]:
    """The command, which without the extra refuses in one line."""

    @wraps(command)
    def checked(*arguments: Any, **options: Any) -> None:
        require_flower()
        command(*arguments, **options)

    return checked


def require_flower() -> None:
    """Refuse, in one line, to go on without the extra."""
    if find_spec("flwr") is None:
        raise UserError("federations across machines need Flower: pip install 'fedskew[flower]'")


def _certs(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="folder for the keys; what is there stays")],
    sites: Annotated[
        str, typer.Option("--sites", metavar="A,B,C", help="the sites' names", show_default=False)
    ],
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="name or address under which sites reach the server; repeatable. "
                     "This machine's localhost is always one", show_default=False),
    ] = None,
    days: Annotated[
        int, typer.Option("--days", metavar="N", help="for which the server's certificate is valid")
    ] = 365,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Make the authority, the server's certificate and the sites' keys of a test federation.

    The same command with one more site or host adds it and keeps the rest.
    """
    from fedskew.cli.terminal import notice, print_json
    from fedskew.flower.credentials import make_credentials

    names = [site.strip() for site in sites.split(",") if site.strip()]
    made = make_credentials(folder, names, hosts or (), days)
    if as_json:
        print_json(_json(made, names))
        return
    _show(made, names)
    notice(_IN_EARNEST)


def _json(made: Credentials, sites: list[str]) -> dict[str, Any]:
    nodes = {
        site: {"authority": str(node.authority), "private": str(node.private), "public": str(node.public)}
        for site, node in ((site, made.node(site)) for site in sites)
    }
    server = {"authority": made.authority, "certificate": made.certificate, "key": made.key}
    return {"server": {name: str(path) for name, path in server.items()}, "sites": nodes}


def _show(made: Credentials, sites: list[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    from fedskew.cli.terminal import stdout

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = [
        (f"{made.authority}", "the authority: public, for everybody"),
        (f"{made.authority_key}", "signs server certificates: keep it off the network"),
        (f"{made.certificate}, {made.key.name}", "for the server"),
    ]
    rows += [(f"{made.node(site).folder}/", f"for {site}, over a safe channel") for site in sites]
    for path, purpose in rows:
        table.add_row(Text(path), Text(purpose, style="dim"))
    stdout().print(table)
