"""Register the keys of all sites of a trial with its SuperLink, in one process.

    python -m fedskew.flower.registration CONNECTION NAME=node.pub ...

This module replaces `flwr supernode register`, which imports Flower for every key and so takes more than a second of
CPU time. Flower's command also refuses a key that is already registered. Here, such a key is left as it is, so that a
trial can be started again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
from flwr.cli.flower_config import read_superlink_connection
from flwr.cli.supernode.register import try_load_public_key
from flwr.cli.utils import flwr_cli_exc_handler, init_http_client_from_connection
from flwr.proto.control_pb2 import RegisterNodeRequest
from flwr.supercore.error import ApiErrorCode

_IN_USE = f"[code: {ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE.value}]"


def main(connection: str, keys: list[str]) -> None:
    client = init_http_client_from_connection(read_superlink_connection(connection))
    for entry in keys:
        name, _, path = entry.partition("=")
        try:
            with flwr_cli_exc_handler():
                response = client.RegisterNode(
                    RegisterNodeRequest(public_key=try_load_public_key(Path(path)), name=name)
                )
        except click.ClickException as error:
            if _IN_USE in error.message:
                print(f"the key of {name} is already registered")
                continue
            sys.exit(f"{name}: {error.message}")
        print(f"{name} is registered as SuperNode {response.node_id}")
    client.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
