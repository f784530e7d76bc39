"""Start the workers of a federation on one machine by forking, so that torch is imported once for all sites.

    python -m fedskew.flower.fork_server SITE.yaml

A worker that starts as a separate program takes some seconds of CPU time and 260 MB. A fork takes milliseconds, and
shares the memory of the imported modules. Before the first fork, the data of SITE.yaml are loaded and
discarded, so that the modules that load data are imported, too.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress

from fedskew.errors import UserError
from fedskew.flower import worker
from fedskew.flower.frames import receive_frame
from fedskew.flower.site_config import load_site
from fedskew.flower.socket_paths import FORK_SERVER
from fedskew.platforms import fork


def main(site: str) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with suppress(UserError):  # the worker will report this error
        load_site(site).federation()
    gc.collect()
    gc.freeze()  # otherwise, a collection would write to every object, and so copy the pages that the forks share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers, so the system removes ended ones
    listener.bind(os.environ[FORK_SERVER])
    listener.listen()
    while True:
        connection, _ = listener.accept()
        with connection, suppress(OSError, EOFError, ValueError):
            _, outputs, _, _ = socket.recv_fds(connection, 1, 2)
            facts, _ = receive_frame(connection)
            if fork() == 0:
                listener.close()
                _work(str(facts["site"]), int(facts["superexec"]), outputs)
            for output in outputs:
                os.close(output)


def _work(site: str, superexec: int, outputs: list[int]) -> None:
    """Run a site's worker in this process, then exit.

    `superexec` is the process id of Flower's SuperExec. `outputs` are the ClientApp's standard output and error.
    """
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for output, standard in zip(outputs, (1, 2), strict=True):
            os.dup2(output, standard)
            os.close(output)
        worker.main(site, superexec)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1])
