"""`fedskew partition`: inspect a split before training on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedskew.cli.commands import CONFIGURATION, SPLIT, Json, Settings, add_command, option, takes_settings

if TYPE_CHECKING:
    from fedskew.data import Federation

MAX_CLIENTS = 20
"""The maximum number of clients whose classes are listed without --all."""


def add_to(app: typer.Typer) -> None:
    add_command(
        app, "partition", _command,
        "fedskew partition --data digits --beta 0.1 --clients 20",
        "fedskew partition --partition shards --save split.json --save map.csv",
        "fedskew partition --partition labels --labels-per-client 3 --clients 30 --all",
    )  # fmt: skip


@takes_settings(SPLIT)
def _command(
    settings: Settings,
    save: Annotated[
        list[str] | None,
        option("--save", "FILE", "save a figure of the samples by client and class (.png, .svg, .pdf), their counts "
               "(.csv) or the split (.json); repeatable", CONFIGURATION),
    ] = None,
    list_all: Annotated[
        bool, typer.Option("--all", help=f"list the classes of all clients, not only the first {MAX_CLIENTS}",
                           rich_help_panel=CONFIGURATION)
    ] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show how many samples of each class each client has. To train on a saved split, use --partition saved."""
    from fedskew.cli.terminal import notice, print_json
    from fedskew.experiment.preparation import build_federation

    federation = build_federation(settings.config())
    for path in save or ():
        _save(federation, path)
    if as_json:
        print_json(_json(federation))
        return
    _show(federation, None if list_all else MAX_CLIENTS)
    for path in save or ():
        notice(f"saved {path}")


def _save(federation: Federation, path: str) -> None:
    from fedskew.errors import UserError
    from fedskew.report.partition_map import save_map

    kind = Path(path).suffix.lower()
    if kind == ".json":
        federation.save_split(path)
    elif kind in (".png", ".svg", ".pdf", ".csv"):
        save_map(federation, path)
    else:
        raise UserError(f"cannot save a split as {path!r}; expected .png, .svg, .pdf, .csv or .json")


def _show(federation: Federation, max_clients: int | None) -> None:
    from fedskew.cli.terminal import stdout
    from fedskew.errors import plural
    from fedskew.report.partition_map import PartitionMap, class_table

    console = stdout()
    for note in federation.notes:
        console.print(note, markup=False)
    console.print(PartitionMap(federation))
    console.print(class_table(federation, max_clients))
    if max_clients is not None and federation.clients > max_clients:
        console.print(f"only the first {max_clients} clients are listed; --all lists all", style="dim")
    summary = _summary(federation)
    console.print(
        f"{plural(summary['clients'], 'client')}, {plural(summary['samples'], 'sample')} used, "
        f"{summary['unused']} unused; "
        f"sizes from {summary['smallest']} to {summary['largest']}, median {summary['median']:g}; "
        f"on average {summary['mean_vacant']:.1f} vacant classes per client; split hash {summary['hash'][:12]}"
    )


def _summary(federation: Federation) -> dict[str, Any]:
    import numpy as np

    sizes = federation.sizes
    return {
        "clients": federation.clients,
        "samples": int(sizes.sum()),
        "unused": federation.unused,
        "smallest": int(sizes.min()),
        "median": float(np.median(sizes)),
        "largest": int(sizes.max()),
        "mean_vacant": float((federation.label_counts == 0).sum(axis=1).mean()),
        "hash": federation.hash,
    }


def _json(federation: Federation) -> dict[str, Any]:
    return {
        "data": federation.dataset.name,
        "classes": list(federation.dataset.classes),
        **({"notes": list(federation.notes)} if federation.notes else {}),
        "partition": dict(federation.partition),
        "seed": federation.seed,
        **_summary(federation),
        "label_counts": federation.label_counts.tolist(),
        "groups": [  # one entry per client, with its vacant, minority and majority classes
            {
                "client": client,
                **({"name": federation.client_names[client]} if federation.client_names else {}),
                "samples": int(federation.sizes[client]),
                **({"domain": federation.domains[client]} if federation.domains else {}),
                "vacant": list(federation.vacant(client)),
                "minority": list(federation.minority(client)),
                "majority": list(federation.majority(client)),
            }
            for client in range(federation.clients)
        ],
    }
