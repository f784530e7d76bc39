"""`fedskew export`: write a finished run's model in a form that needs neither the run nor fedskew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from fedskew.cli.commands import Json, add_command, option
from fedskew.errors import UserError


def add_to(app: typer.Typer) -> None:
    add_command(
        app, "export", _command,
        "fedskew export runs/first -o model",
        "fedskew export runs/first -o model --format onnx",
        "fedskew export runs/personal -o model-of-3 --site 3",
        "fedskew export runs/first --hub jane/skewed-digits --private --license cc-by-4.0",
    )  # fmt: skip


def _command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="folder of a finished run")],
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="DIR", help="folder for the model", show_default=False)
    ] = None,
    formats: Annotated[
        list[str] | None, option("--format", "onnx", "also write this format, and check its outputs against PyTorch")
    ] = None,
    site: Annotated[
        str | None,
        option(
            "--site",
            "NAME",
            "for methods that give each client its own model: export the model of this client; for a site of a "
            "federation, give the path of its site.yaml",
        ),
    ] = None,
    hub: Annotated[
        str | None, option("--hub", "OWNER/NAME", "upload the model to this repository of the Hugging Face Hub")
    ] = None,
    private: Annotated[
        bool, option("--private", None, "create the repository as private, and refuse one that is public")
    ] = False,
    licence: Annotated[
        str | None, option("--license", "ID", "the model's licence, for its card, such as cc-by-4.0")
    ] = None,
    as_json: Json = False,
) -> None:
    """Export a run's model: weights as safetensors, code as one PyTorch file, and a model card."""
    from fedskew.cli.terminal import notice, print_json, stdout
    from fedskew.export import export_run, upload
    from fedskew.export.hub import check_upload

    if out is None and hub is None:
        raise UserError("an export needs --out DIR, --hub OWNER/NAME or both")
    if private and hub is None:
        raise UserError("--private is for --hub; expected --hub OWNER/NAME, too")
    if hub is not None:
        check_upload(hub)
    name, kept = _read_site(run, site)
    with _folder(out) as folder:
        exported = export_run(run, folder, formats or (), site=name, kept=kept, licence=licence)
        address = None if hub is None else upload(exported, hub, private)
    if as_json:
        print_json(_json(exported, out, address))
        return
    console = stdout()
    for place in filter(None, (out, address)):
        console.print(f"{place}: {', '.join(exported.files)}", soft_wrap=True, markup=False)
    if exported.onnx_difference is not None:
        console.print(f"largest logit difference, ONNX Runtime vs PyTorch: {exported.onnx_difference:.1e} (relative)")
    for line in exported.notices:
        notice(line)


def _read_site(run: str, site: str | None) -> tuple[str | None, Any]:
    """Return the site's name. If `site` is the path of a site.yaml, also return the state that the site kept."""
    if site is None or not site.endswith((".yaml", ".yml")):
        return site, None
    from fedskew.flower.site_config import load_site
    from fedskew.flower.site_state import read_final_state

    config = load_site(site)
    return config.name, read_final_state(config.state_folder, run)


@contextmanager
def _folder(out: str | None) -> Iterator[str]:
    """Yield the folder for the model: `out`, or a temporary folder if the model is only uploaded."""
    if out is not None:
        yield out
        return
    with TemporaryDirectory(prefix="fedskew-") as folder:
        yield folder


def _json(exported: Any, out: str | None, address: str | None) -> dict[str, Any]:
    return {
        "folder": out,
        "hub": address,
        "files": list(exported.files),
        "onnx_difference": exported.onnx_difference,
        "notices": list(exported.notices),
    }
