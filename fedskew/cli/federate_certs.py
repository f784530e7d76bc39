"""`fedskew federate certs`: keys and certificates for a test federation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedskew.cli.commands import Json, option, split_names

if TYPE_CHECKING:
    from fedskew.flower.credentials import Credentials

_REAL_FEDERATIONS = """These keys are for testing, because you know every site's private key. For a real federation,
- get the server's certificate from your organisation or a public authority;
- let each site create a key pair (ssh-keygen -t ecdsa -b 384 -N '' -f node.key) and send you only node.key.pub."""


def certs(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="folder for the keys; keys of existing sites are kept")],
    sites: Annotated[str, option("--sites", "A,B,C", "names of the sites")],
    hosts: Annotated[
        list[str] | None,
        option("--host", "NAME", "the server's name or address, besides localhost; repeatable"),
    ] = None,
    days: Annotated[int, typer.Option("--days", metavar="N", help="days until a new server certificate expires")] = 365,
    as_json: Json = False,
) -> None:
    """Create a certificate authority, a server certificate and the sites' keys for a test federation.

    To add a site or a host, repeat the command with it. The keys of the authority and of existing sites are kept.
    Only a new server certificate needs the authority's key.
    """
    from fedskew.cli.terminal import notice, print_json
    from fedskew.flower.credentials import expires_soon, make_credentials

    names = split_names(sites)
    credentials = make_credentials(folder, names, hosts or (), days)
    if expires_soon(credentials) and not credentials.authority_key.exists():
        notice(
            f"warning: {credentials.certificate} expires within a month; to renew it, put {credentials.authority_key} "
            "back and repeat this command"
        )
    if as_json:
        print_json(_certs_json(credentials, names))
        return
    _show_certs(credentials, names)
    notice(_REAL_FEDERATIONS)


def _certs_json(credentials: Credentials, sites: list[str]) -> dict[str, Any]:
    nodes = {
        site: {"authority": str(node.authority), "private": str(node.private), "public": str(node.public)}
        for site, node in ((site, credentials.node(site)) for site in sites)
    }
    server = {"authority": credentials.authority, "certificate": credentials.certificate, "key": credentials.key}
    return {"server": {name: str(path) for name, path in server.items()}, "sites": nodes}


def _show_certs(credentials: Credentials, sites: list[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    from fedskew.cli.terminal import stdout

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = [(f"{credentials.authority}", "the authority's certificate: public")]
    if credentials.authority_key.exists():
        rows += [(f"{credentials.authority_key}", "signs server certificates: store it offline")]
    rows += [(f"{credentials.certificate}, {credentials.key.name}", "for the server")]
    rows += [(f"{credentials.node(site).folder}/", f"for {site}: send it over a secure channel") for site in sites]
    for path, purpose in rows:
        table.add_row(Text(path), Text(purpose, style="dim"))
    stdout().print(table)
