"""The weights of a centrally trained model, and a card about them.

`fedskew pretrain` writes these files, and `--init` reads the weights:

weights.safetensors  the weights, named as in the model's state_dict
weights.json         the card as JSON: data, classes, epochs, accuracy, command, digest and more
README.md            the card as text
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from fedskew.experiment.config import Config, with_values
from fedskew.experiment.result import Result
from fedskew.experiment.storage.files import reporting_os_errors, write_file, write_tensors
from fedskew.models import own_module, parameter_count

WEIGHTS = "weights.safetensors"
CARD = "weights.json"
CENTRAL = ("partition", "method", "rounds", "local_epochs", "clients_per_round")
"""The keys that `central_training` always sets. `fedskew pretrain` refuses them with `--set`. In the file of `-c`, they
have no effect."""
_TOTAL_DECAY = 0.01
"""All epochs together multiply the learning rate by this factor, unless the configuration's `lr_decay` is kept."""


def central_training(config: Config, epochs: int, keeps_lr_decay: bool) -> Config:
    """Return the configuration that trains the model on all training data: one client, one epoch per round.

    With `keeps_lr_decay`, the `lr_decay` of `config` is not replaced.
    """
    values: dict[str, Any] = {
        "partition": {"rule": "iid", "clients": 1},
        "method": "fedavg",
        "rounds": epochs,
        "local_epochs": 1,
        "clients_per_round": None,
    }
    if not keeps_lr_decay:
        values["lr_decay"] = _TOTAL_DECAY ** (1 / epochs)
    return with_values(config, values)


def write_pretrained(run: Result, folder: Path) -> dict[str, Any]:
    """Write the weights of a finished run and their card into `folder`. Return the card."""
    path = folder / WEIGHTS
    write_tensors(path, own_module(run.model).state_dict(), {"classes": run.classes})
    with reporting_os_errors("read", path):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    card = _card(run, digest)
    write_file(folder / CARD, json.dumps(card, indent=2, allow_nan=False) + "\n")
    write_file(folder / "README.md", _readme(card))
    return card


def _card(run: Result, digest: str) -> dict[str, Any]:
    config = run.config
    return {
        "format": 1,
        "file": WEIGHTS,
        "sha256": digest,
        "model": config.model,
        "parameters": parameter_count(run.model),
        "data": {"name": config.data, **config.data_params},
        "classes": list(run.classes),
        "inputs": run.inputs,
        "epochs": run.rounds,
        "augment": list(config.augment),
        "accuracy": run.accuracy,
        "seconds": run.seconds,
        "command": run.about.get("command", ""),
        "config": config.to_mapping(),
        "versions": run.about.get("versions", {}),
    }


def _readme(card: dict[str, Any]) -> str:
    data, classes, augment = card["data"]["name"], card["classes"], card["augment"]
    augmented = f" with augmentation {', '.join(augment)}" if augment else ""
    shown = ", ".join(classes[:10]) + (f" and {len(classes) - 10} more" if len(classes) > 10 else "")
    epochs = f"{card['epochs']} epoch{'s' * (card['epochs'] != 1)}"
    return f"""# {card["model"]} pretrained on {data}

{card["parameters"]:,} parameters, trained centrally for {epochs}{augmented} on the training part of \
{data}, with {len(classes)} classes: {shown}. Its accuracy on the test part is {100 * card["accuracy"]:.1f} %.

Use it as the start of a federated run:

```bash
fedskew run --model {card["model"]} --init {card["file"]}
```

Made by `{card["command"]}`. SHA-256 of `{card["file"]}`: `{card["sha256"]}`. `{CARD}` has the whole configuration.
"""
