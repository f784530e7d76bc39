"""`fedskew export`: a finished run's model for those who have neither the run nor fedskew."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fedskew.cli.flags import Json
from fedskew.cli.run import examples

EXAMPLES = ("fedskew export runs/first -o model", "fedskew export runs/first -o model --format onnx")


def add_to(app: typer.Typer) -> None:
    app.command("export", epilog=examples(EXAMPLES))(_command)


def _command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="the folder of a finished run")],
    out: Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="folder for the model", show_default=False)],
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", metavar="onnx", help="write this, too; it is checked against PyTorch",
                     show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Export a run's model: weights as safetensors, its code as one PyTorch file, a model card."""
    from fedskew.cli.terminal import notice, print_json, stdout
    from fedskew.export import export_run

    exported = export_run(run, out, formats or ())
    if as_json:
        print_json(_json(exported))
        return
    console = stdout()
    console.print(f"{exported.folder}: {', '.join(exported.files)}", soft_wrap=True, markup=False)
    if exported.onnx_difference is not None:
        console.print(f"ONNX Runtime's logits are PyTorch's up to {exported.onnx_difference:.1e} of the largest")
    for line in exported.notices:
        notice(line)


def _json(exported: Any) -> dict[str, Any]:
    return {
        "folder": str(exported.folder),
        "files": list(exported.files),
        "onnx_difference": exported.onnx_difference,
        "notices": list(exported.notices),
    }
