"""`fedskew export`: write a finished run's model in a form that needs neither the run nor fedskew."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fedskew.cli.commands import Json, add_command, option


def add_to(app: typer.Typer) -> None:
    add_command(
        app, "export", _command,
        "fedskew export runs/first -o model",
        "fedskew export runs/first -o model --format onnx",
        "fedskew export runs/personal -o model-of-3 --site 3",
    )  # fmt: skip


def _command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="folder of a finished run")],
    out: Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="folder for the model", show_default=False)],
    formats: Annotated[
        list[str] | None, option("--format", "onnx", "also write this format, and check its outputs against PyTorch")
    ] = None,
    site: Annotated[
        str | None,
        option(
            "--site",
            "NAME",
            "export the model of this client, or of the site with this site.yaml, if the method gives each its own",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Export a run's model: weights as safetensors, code as one PyTorch file, and a model card."""
    from fedskew.cli.terminal import notice, print_json, stdout
    from fedskew.export import export_run

    name, kept = _read_site(run, site)
    exported = export_run(run, out, formats or (), site=name, kept=kept)
    if as_json:
        print_json(_json(exported))
        return
    console = stdout()
    console.print(f"{exported.folder}: {', '.join(exported.files)}", soft_wrap=True, markup=False)
    if exported.onnx_difference is not None:
        console.print(f"largest logit difference, ONNX Runtime vs PyTorch: {exported.onnx_difference:.1e} (relative)")
    for line in exported.notices:
        notice(line)


def _read_site(run: str, site: str | None) -> tuple[str | None, Any]:
    """Return the name of the site, and what it kept if `site` is the path of its site.yaml."""
    if site is None or not site.endswith((".yaml", ".yml")):
        return site, None
    from fedskew.flower.site_config import load_site
    from fedskew.flower.site_state import read_final_state

    config = load_site(site)
    return config.name, read_final_state(config.state_folder, run)


def _json(exported: Any) -> dict[str, Any]:
    return {
        "folder": str(exported.folder),
        "files": list(exported.files),
        "onnx_difference": exported.onnx_difference,
        "notices": list(exported.notices),
    }
