"""`fedskew federate site`: check a site's data against a federation, and connect the site."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedskew.errors import UserError

if TYPE_CHECKING:
    from fedskew.data.federation import Federation
    from fedskew.flower.site_config import SiteConfig

EXAMPLES = (
    "fedskew federate site site.yaml --check my-federation",
    "fedskew federate site site.yaml --superlink fl.example.org:8000 --keys keys/sites/north",
)


def command(
    file: Annotated[str, typer.Argument(metavar="SITE.yaml", help="the site's own configuration")],
    check: Annotated[
        str | None, typer.Option("--check", metavar="APP", show_default=False,
                                 help="the federation's app, or its pyproject.toml, to check the data against")
    ] = None,
    superlink: Annotated[
        str | None, typer.Option("--superlink", metavar="HOST:PORT", help="connect to this server", show_default=False)
    ] = None,
    keys: Annotated[
        str | None, typer.Option("--keys", metavar="DIR", show_default=False,
                                 help="the site's ca.pem and node.key, as `federate certs` makes them")
    ] = None,
) -> None:  # fmt: skip
    """Check a site's configuration and data; with --superlink, connect the site and stay.

    Everything is checked before a connection is made: the data, the keys, the server's certificate.
    """
    from fedskew.flower.site_config import load_site

    config = load_site(file)
    held = config.federation()
    _show(config.name, held)
    if check is not None:
        _check(check, config, held)
    if superlink is None:
        return
    if keys is None:
        raise UserError("--superlink needs --keys; expected the folder with the site's ca.pem and node.key")
    _connect(Path(file), superlink, Path(keys))


def _show(name: str, held: Federation) -> None:
    from fedskew.cli.terminal import stdout

    counts = held.label_counts[0].tolist()
    own = ", ".join(f"{label} {count}" for label, count in zip(held.dataset.classes, counts, strict=True))
    stdout().print(f"{name}: {held.sizes[0]} training samples ({own})", soft_wrap=True, markup=False)


def _check(app: str, site: SiteConfig, held: Federation) -> None:
    from fedskew.cli.terminal import notice, stdout
    from fedskew.flower.disclosure import disclosures, noise_warning
    from fedskew.flower.planning import read_app
    from fedskew.flower.site_policy import DETAILS

    settings, contract, config = read_app(app)
    if site.name not in settings.sites:
        raise UserError(f"the site is called {site.name!r}; expected one of {', '.join(settings.sites)}")
    contract.admit(held.dataset)
    for line in disclosures(settings, config):
        stdout().print(line, soft_wrap=True, markup=False)
    if DETAILS.index(settings.site_metrics) > DETAILS.index(site.metrics):
        notice(f"this site allows metrics: {site.metrics}, so the results of its tests will be left out")
    if warning := noise_warning(settings, contract, config):
        notice(f"warning: {warning}")


def _connect(file: Path, superlink: str, folder: Path) -> None:
    from fedskew.cli.terminal import notice
    from fedskew.flower.credentials import NodeKeys
    from fedskew.flower.processes import free_ports
    from fedskew.flower.supernode import require_keys, require_trusted_server, run_supernode, supernode_command

    keys = NodeKeys(folder)
    require_keys(keys)
    require_trusted_server(superlink, keys)
    command = supernode_command(file, superlink, keys, free_ports(1)[0])
    notice(" ".join(command))
    run_supernode(command, keys)
