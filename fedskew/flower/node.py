"""`flower-supernode` with ClientApps that start by forking.

    python -m fedskew.flower.node --superlink HOST:PORT --port PORT ...      # the options of flower-supernode

Flower's SuperNode starts a second program, the SuperExec, which starts a new Python process for every message. Each of
them imports Flower again, which takes more than a second of CPU time and 90 MB. Here Flower is imported once: the
SuperExec and the ClientApps are forks of that process, start within milliseconds and share its memory.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
import warnings
from contextlib import suppress

from flwr.supercore.constant import TaskType
from flwr.supercore.exit import exit_handler
from flwr.supercore.superexec import run_superexec as superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supernode import main as runtime_api  # noqa: F401  # imported here so that the forks share it
from flwr.supernode.cli import flower_supernode
from flwr.supernode.runtime.run_clientapp import run_clientapp

from fedskew.flower import client_app  # noqa: F401  # what the app imports

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)


class ForkingExecutor(SubprocessExecutor):
    """Runs each ClientApp in a fork of this process."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        if spec.task_type != TaskType.CLIENT_APP:
            return LaunchResult.failed(f"this site runs ClientApps only, no {spec.task_type}")
        if _fork() == 0:
            _run_client_app(spec)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Reap the ClientApps that ended."""
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _fork() -> int:
    with warnings.catch_warnings():
        # The only other thread waits for the SuperNode's end and holds no lock.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _run_client_app(spec: ExecutionSpec) -> None:
    """Answer one message and end this process. The SuperExec's handlers, which the fork inherited, must not run."""
    status = 1
    try:
        exit_handler.registered_exit_handlers.clear()
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        run_clientapp(spec.runtime_api_address, spec.token, insecure=True, parent_pid=spec.parent_pid)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run_superexec(address: str, supernode: int) -> None:
    """Start a ClientApp for every message that the SuperNode receives, until the SuperNode ends."""
    superexec.get_executor = lambda *_, **__: ForkingExecutor()  # type: ignore[attr-defined]
    superexec.run_superexec(address, insecure=True, parent_pid=supernode)


def main(options: list[str]) -> None:
    port = options[options.index("--port") + 1]
    supernode = os.getpid()
    gc.collect()
    gc.freeze()  # a collection would write to every object, and so copy the pages that the forks share
    if os.fork() == 0:
        sys.argv = ["flower-superexec"]
        _run_superexec(f"127.0.0.1:{port}", supernode)
        return
    sys.argv = ["flower-supernode", *options, "--isolation", "process"]  # Flower looks at its name when it ends
    flower_supernode()


if __name__ == "__main__":
    main(sys.argv[1:])
