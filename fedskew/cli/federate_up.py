"""`fedskew federate up`: a whole federation on one machine, for trying it out."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from fedskew.cli import INTERRUPTED
from fedskew.cli.federate_init import FEDERATION, Own
from fedskew.cli.flags import FLAGS, Json, Quiet, Settings, takes_settings

EXAMPLES = (
    "fedskew federate up trial --sites 3 --data digits --method fedvls --rounds 5",
    "fedskew federate up trial2 --sites 4 --partition labels --labels-per-client 3 --rounds 3 --clients-per-round 2",
)

_OF_A_TRIAL = [name for name in FLAGS if name not in ("clients", "engine", "compile", "eval_local")]


@takes_settings(_OF_A_TRIAL)
def command(
    settings: Settings,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="folder for keys, app, logs and the run")] = "federation",
    sites: Annotated[
        int, typer.Option("--sites", metavar="N", min=1, help="sites that the data are split over",
                          rich_help_panel=FEDERATION)
    ] = 3,
    federation: Own = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Run a whole federation on this machine, as separate processes with real TLS and node keys.

    The same command again goes on where the last one stopped.
    """
    from fedskew.cli.terminal import notice, print_json, stdout
    from fedskew.experiment.config import assigned, with_values
    from fedskew.flower.disclosure import noise_warning
    from fedskew.flower.planning import read_app
    from fedskew.flower.trial import follow, plan_trial

    def say(line: str) -> None:
        if not (quiet or as_json):
            notice(line)

    config = with_values(settings.config(), {"partition.clients": sites})
    trial = plan_trial(Path(folder), config, assigned(federation or ()))
    if warning := noise_warning(*read_app(trial.app)):
        say(f"warning: {warning}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # however it is ended, it ends what it started
    try:
        with trial:
            say(f"starting a SuperLink on port {trial.port} and {len(trial.sites)} SuperNodes; logs in {folder}/logs")
            trial.start()
            summary = follow(trial, trial.start_run(), say)
    except KeyboardInterrupt as interrupt:
        notice("stopped; the same command goes on after the last round that was saved")
        raise typer.Exit(INTERRUPTED) from interrupt
    if as_json:
        print_json(summary | {"folder": str(Path(folder) / "run")})
        return
    stdout().print(
        f"{summary['method']}: accuracy {100 * summary['accuracy']:.2f} % after {summary['rounds']} rounds; "
        f"the run is in {Path(folder) / 'run'}", soft_wrap=True, markup=False)  # fmt: skip
