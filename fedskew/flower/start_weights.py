"""The weights that a run with a frozen part starts from.

If sites train only the head or adapters, the rest of the model is frozen and is not sent in a round. Without `init`, a
site makes the frozen weights from the run's seed. With `init`, only the server has the file, so the server's greeting
has the weights. The site keeps them on its disk, because its worker may start again without another greeting.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from fedskew.errors import UserError
from fedskew.experiment.config import Config, config_hash
from fedskew.experiment.storage.files import Unreadable, read_tensors, reporting_os_errors, write_tensors
from fedskew.flower.site_state import StateUnusable
from fedskew.flower.tensors import from_bytes, require_like, to_bytes
from fedskew.flower.wire import Garbled
from fedskew.methods import Tensors

_NAME = "start.safetensors"


def needs_start(config: Config) -> bool:
    """Whether the server must send sites the weights that the run starts from."""
    return config.train != "all" and config.init_sha256 is not None


def start_payload(config: Config, model: nn.Module) -> bytes:
    """Return the weights to send with a greeting. Empty if sites need none."""
    return to_bytes({name: t.detach().cpu() for name, t in model.state_dict().items()}) if needs_start(config) else b""


def keep_start(folder: Path, config: Config, payload: bytes) -> None:
    """Keep the received weights.

    Refuse weights that differ from those that the run began with, because frozen weights must not change.
    """
    tensors, path = from_bytes(payload), _path(folder, config)
    known = _read(path)
    if known is None:
        try:
            with reporting_os_errors("write", path):
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_tensors(path, tensors, {})
        except UserError as error:
            raise StateUnusable(str(error)) from error
    elif to_bytes(known) != to_bytes(tensors):
        raise UserError("the server sends other weights than those that this run began with at this site")


def load_start(folder: Path, config: Config, model: nn.Module) -> None:
    """Load the weights that the run starts from into the model."""
    tensors = _read(_path(folder, config))
    if tensors is None:
        raise UserError("this site has not received the weights that the run starts from; restart the site to get them")
    try:
        require_like(tensors, {name: t.cpu() for name, t in model.state_dict().items()})
    except Garbled as problem:
        raise UserError(f"the weights that the run starts from do not fit the model: {problem}") from problem
    model.load_state_dict(tensors)


def _path(folder: Path, config: Config) -> Path:
    return folder / config_hash(config) / _NAME


def _read(path: Path) -> Tensors | None:
    if not path.exists():
        return None
    try:
        with reporting_os_errors("read", path):
            return read_tensors(path)[0]
    except Unreadable as error:
        raise StateUnusable(f"cannot use {path}: {error}; delete it, and restart the site") from error
    except UserError as error:
        raise StateUnusable(str(error)) from error
