"""`flower-supernode` with ClientApps that start by forking.

    python -m fedskew.flower.node --superlink HOST:PORT --port PORT ...      # the options of flower-supernode

Flower's SuperNode starts a second program, the SuperExec, which starts a new Python process for every message. Each
process imports Flower again, which takes more than a second of CPU time and 90 MB. Here, one process imports Flower.
The SuperExec and the ClientApps are forks of this process, so they start within milliseconds and share its memory.

If a SuperLink or a proxy restarts, a connection may end during the TLS handshake. Flower then gives up on the server.
Here, the SuperNode tries again, unless the certificate was refused.

Before an app is installed or imported, its files are compared with those that the site has approved, if the site has a
list of approvals. An app that is not on the list does not run. Nor does any app run without such a list, if the site's
policy requires secure aggregation. Instead, a ClientApp of this module replies with the refusal.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.supercore.constant import TaskType
from flwr.supercore.exit import exit_handler
from flwr.supercore.retry import RetryInvoker, make_simple_http_retry_invoker
from flwr.supercore.superexec import run_superexec as superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supernode import fleet_http_connection
from flwr.supernode import main as runtime_api  # noqa: F401  # imported here so that the forks share it
from flwr.supernode.cli import flower_supernode
from flwr.supernode.runtime import run_clientapp as runtime

from fedskew.errors import UserError
from fedskew.flower import client_app  # the app imports it too, so the forks share it
from fedskew.flower.approved_apps import app_hash, file_hashes, refusal
from fedskew.flower.audit import describe_reply, describe_request, site_log
from fedskew.flower.wire import Garbled, from_records, to_records
from fedskew.platforms import fork, wait_for_end

_GRACE_SECONDS = 30.0
"""Seconds in which a SuperNode must end after its parent was killed."""
_SIGNALS = ("SIGINT", "SIGTERM", "SIGQUIT")


class ForkingExecutor(SubprocessExecutor):
    """Runs each ClientApp in a fork of this process."""

    def __init__(self, site: Path) -> None:
        """`site` is the site's configuration, site.yaml."""
        self._site = site

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        if spec.task_type != TaskType.CLIENT_APP:
            return LaunchResult.failed(f"this site runs ClientApps only, no {spec.task_type}")
        if fork() == 0:  # safe: the only other thread here is Flower's, which waits for the SuperNode's end
            _run_client_app(spec, self._site)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Reap the ClientApps that ended."""
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _run_client_app(spec: ExecutionSpec, site: Path) -> None:
    """Answer one message and end this process. The exit handlers that the fork inherited must not run."""
    status = 1
    try:
        exit_handler.registered_exit_handlers.clear()
        for name in _SIGNALS:
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        _allow_only_approved_app(site)
        runtime.run_clientapp(spec.runtime_api_address, spec.token, insecure=True, parent_pid=spec.parent_pid)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _allow_only_approved_app(site: Path) -> None:
    """Patch Flower's runtime in this process, so that it installs and loads only an app that the site accepts."""
    install, get_loader = runtime.install_from_fab, runtime.get_load_client_app_fn  # type: ignore[attr-defined]
    reported: str | None = None
    """Why the app is refused, as the server learns it. None if the app is accepted."""

    def install_if_approved(archive: bytes, **options: Any) -> None:
        nonlocal reported
        try:
            problem = reported = refusal(site, archive)
        except UserError as error:  # the text names the site's files, so it stays in the site's log
            reported = "the site's approvals or its configuration cannot be read; the reason is in its log"
            problem = str(error)
        client_app.app_hash = _hash(archive)
        if reported is None:
            install(archive, **options)
        else:
            print(f"fedskew: warning: {problem}", file=sys.stderr, flush=True)

    def load_or_refuse(**options: Any) -> Any:
        return get_loader(**options) if reported is None else lambda *_: refusing_app(reported, site)

    runtime.install_from_fab = install_if_approved  # type: ignore[attr-defined, assignment]
    runtime.get_load_client_app_fn = load_or_refuse  # type: ignore[attr-defined, assignment]


def _hash(archive: bytes) -> str | None:
    """Compute the hash of an app from its archive. None if the archive is damaged."""
    try:
        return app_hash(file_hashes(archive))
    except (UserError, zipfile.BadZipFile):
        return None


def refusing_app(reason: str, site: Path) -> ClientApp:
    """Make a ClientApp that refuses every message. Refusals are in the site's audit log, if it can be written."""
    app = ClientApp()

    def refuse(message: Message, _: Context) -> Message:
        reply = {"refused": reason}
        with suppress(UserError, Garbled):  # a refusal says nothing about the data, so it may leave without a log entry
            request = describe_request(from_records(message.content)[0])
            site_log(site).append(request | describe_reply(reply, b"") | {"app": client_app.app_hash})
        return Message(to_records(reply, None), reply_to=message)

    for register in (app.query, app.train, app.evaluate):
        register()(refuse)
    return app


def _run_superexec(address: str, supernode: int, site: Path) -> None:
    """Start a ClientApp for every message that the SuperNode receives, until the SuperNode ends."""
    superexec.get_executor = lambda *_, **__: ForkingExecutor(site)  # type: ignore[attr-defined]
    superexec.run_superexec(address, insecure=True, parent_pid=supernode)


def patient_retry_invoker() -> RetryInvoker:
    """Make a retry invoker like Flower's that also retries if a connection ends during the TLS handshake."""
    invoker = make_simple_http_retry_invoker()
    flower_gives_up = invoker.should_giveup

    def gives_up(error: Exception) -> bool:
        if isinstance(error, httpx.TransportError) and "certificate" not in str(error).lower():
            return False
        return flower_gives_up is not None and flower_gives_up(error)

    invoker.should_giveup = gives_up
    return invoker


def _end_with_parent(parent: int) -> None:
    """End the SuperNode when the command that started it is killed, so that the site can be started again."""
    if parent > 1:
        wait_for_end(parent)
        os.kill(os.getpid(), signal.SIGTERM)  # so that the server learns of the SuperNode's end
        time.sleep(_GRACE_SECONDS)
        os._exit(1)


def main(options: list[str]) -> None:
    port = options[options.index("--port") + 1]
    site = json.loads(options[options.index("--node-config") + 1].removeprefix("site="))
    supernode = os.getpid()
    gc.collect()
    gc.freeze()  # otherwise, a collection would write to every object, and so copy the pages that the forks share
    if fork() == 0:
        sys.argv = ["flower-superexec"]
        _run_superexec(f"127.0.0.1:{port}", supernode, Path(site))
        return
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    sys.argv = ["flower-supernode", *options, "--isolation", "process"]  # Flower reads the program's name when it exits
    fleet_http_connection.make_simple_http_retry_invoker = patient_retry_invoker  # type: ignore[attr-defined]
    flower_supernode()
    # Flower gave up on the server. The SuperNode would stay alive without another attempt to connect, so no service
    # manager would start it again.
    print("fedskew: the SuperNode lost its server and ends", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
