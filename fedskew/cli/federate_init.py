"""`fedskew federate init`: the Flower app of a federation."""

from __future__ import annotations

from typing import Annotated

import typer

from fedskew.cli.flags import FLAGS, Settings, takes_settings
from fedskew.errors import UserError

EXAMPLES = (
    "fedskew federate init my-federation --sites north,south,east --data digits --method fedvls --rounds 20",
    "fedskew federate init scans --sites a,b --classes benign,malignant --shape 1,64,64 --federation minimum=2",
)
FEDERATION = "Federation"

_TRAINING = [name for name, flag in FLAGS.items() if not flag.key.startswith("partition") and name not in (
    "engine", "device", "compile", "eval_local")]  # fmt: skip

Own = Annotated[
    list[str] | None,
    typer.Option("--federation", metavar="KEY=VALUE", rich_help_panel=FEDERATION, show_default=False,
                 help="minimum, round_timeout, evaluation, site_metrics, share_loss, test_data, folder …; repeatable"),
]  # fmt: skip


@takes_settings(_TRAINING)
def command(
    settings: Settings,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="folder for the app; it must not exist")],
    sites: Annotated[
        str, typer.Option("--sites", metavar="A,B,C", help="the sites' names", rich_help_panel=FEDERATION,
                          show_default=False)
    ],
    classes: Annotated[
        str | None, typer.Option("--classes", metavar="A,B", rich_help_panel=FEDERATION, show_default=False,
                                 help="the classes' names, where no data like the sites' are at hand")
    ] = None,
    shape: Annotated[
        str | None, typer.Option("--shape", metavar="C,H,W", rich_help_panel=FEDERATION, show_default=False,
                                 help="of an image, or the number of a table's columns; with --classes")
    ] = None,
    federation: Own = None,
) -> None:  # fmt: skip
    """Write the Flower app of a federation, with a README for its operators.

    Its contract (classes, form and normalisation of inputs) is that of --data, or of --classes and --shape.
    """
    from fedskew.cli.terminal import notice, stdout
    from fedskew.data import load
    from fedskew.experiment.config import assigned
    from fedskew.flower.app_folder import write_app
    from fedskew.flower.contract import Contract
    from fedskew.flower.disclosure import noise_warning
    from fedskew.flower.planning import described_contract, resolved, settings_of

    config = settings.config()
    names = [name.strip() for name in sites.split(",") if name.strip()]
    if (classes is None) != (shape is None):
        raise UserError("--classes and --shape go together; expected both, or neither and --data")
    if classes is not None and shape is not None:
        contract = described_contract(classes, shape)
    else:
        contract = Contract.of(load(config.data, config.data_dir, **config.data_params))
    own = settings_of(names, assigned(federation or ()))
    whole = resolved(config, contract, names)
    path = write_app(folder, own, contract, whole)
    if warning := noise_warning(own, contract, whole):
        notice(f"warning: {warning}")
    stdout().print(f"{path}: a Flower app for {', '.join(names)}", soft_wrap=True, markup=False)
    notice(f"its operators read {path / 'README.md'}; every setting is in {path / 'pyproject.toml'}")
