"""`fedskew pretrain`: train a model centrally, on all training data, as a start for federated runs."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from fedskew.cli.commands import (
    CONFIGURATION,
    TRAINING,
    Json,
    Live,
    Log,
    Quiet,
    Settings,
    add_command,
    option,
    takes_settings,
)
from fedskew.errors import UserError, plural

_FLAGS = (
    "data", "data_dir", "augment", "model", "init", "batch_size", "lr", "lr_decay", "optimizer", "momentum",
    "weight_decay", "seed", "eval_every", "engine", "device", "precision", "compile",
)  # fmt: skip
_DEFAULTS = {"batch_size": 128, "weight_decay": 5e-4}
_HELP = {
    "batch_size": "batch size (default: 128)",
    "lr": "learning rate in the first epoch (default: 0.05)",
    "lr_decay": "factor applied to the learning rate after every epoch (default: all epochs together divide it by 100)",
    "weight_decay": "weight decay (default: 0.0005)",
    "eval_every": "test every N epochs (default: 1)",
    "optimizer": "optimiser: sgd, nesterov, adam or adamw (default: sgd)",
    "momentum": "momentum of the optimiser; beta1 of adam and adamw (default: 0.9)",
}


def add_to(app: typer.Typer) -> None:
    add_command(
        app, "pretrain", _command,
        "fedskew pretrain --data digits --model dnn --epochs 5 --out pretrained/digits",
    )  # fmt: skip


@takes_settings(_FLAGS, _HELP)
def _command(
    settings: Settings,
    epochs: Annotated[str, option("--epochs", "N", "passes over the training data (default: 50)", TRAINING)] = "50",
    out: Annotated[
        str | None, option("--out", "FOLDER", "folder for weights and model card (default: pretrained/DATA-MODEL)",
                           CONFIGURATION)
    ] = None,
    live: Live = False,
    log: Log = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Train a model centrally, on all training data, and write its weights for --init. Repeat the command to resume.

    With -c, keys that the file does not set have the defaults of `fedskew run`. The file's method, split, rounds, local
    epochs and clients per round do not count.
    """
    from fedskew.cli.running import Observers, run_one
    from fedskew.cli.terminal import notice, print_json, stdout
    from fedskew.experiment.config.values import integer
    from fedskew.experiment.preparation import prepare
    from fedskew.export.pretrained import CENTRAL, WEIGHTS, central_training, write_pretrained

    number = integer(1)("epochs", epochs)
    if fixed := [key for key in settings.values if key.partition(".")[0] in CENTRAL]:
        raise UserError(f"pretrain sets {', '.join(fixed)} itself; expected --epochs and other keys")
    given = settings.values if settings.file else {**_DEFAULTS, **settings.values}
    config = Settings(settings.file, given).config()
    prepared = prepare(central_training(config, number, bool(settings.file) or "lr_decay" in settings.values))
    folder = Path(out or f"pretrained/{Path(prepared.config.data).stem}-{prepared.config.model}")
    run = run_one(prepared, folder, as_json or quiet, Observers(live, log))
    card = write_pretrained(run, folder)
    if run.diverged:
        notice(
            f"warning: {run.diverged} of {plural(number, 'epoch')} had no effect, because training was not finite; try "
            "a lower --lr, with another --out"
        )
    if as_json:
        print_json({"folder": str(folder), **card})
        return
    classes, accuracy = len(card["classes"]), 100 * card["accuracy"]
    stdout().print(
        f"{card['model']} on {card['data']['name']} ({classes} classes), {plural(number, 'epoch')}: "
        f"accuracy {accuracy:.1f} %\nuse it with --model {card['model']} --init {quote(str(folder / WEIGHTS))}",
        markup=False, soft_wrap=True, highlight=False,
    )  # fmt: skip
