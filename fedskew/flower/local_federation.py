"""A whole federation on one machine, for trials: separate processes, with real TLS and node keys.

FOLDER/
  keys/           authority, server certificate and node keys
  app/            the Flower app
  sites/          one folder per site: site.yaml and its state
  logs/           the output of every process
  flower/         Flower's own files
  superlink.db    the SuperLink's database
  run/            the run's folder
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from fedskew.errors import UserError
from fedskew.experiment.storage.files import FolderLock
from fedskew.flower.credentials import Credentials
from fedskew.flower.guardian import MARK_VARIABLE, end_marked_processes, start_guardian
from fedskew.flower.processes import Process, await_tls, free_ports, terminate_all
from fedskew.flower.socket_paths import FORK_SERVER, fork_server_path
from fedskew.flower.supernode import node_config, supernode_command
from fedskew.flower.supervised_run import FlowerRun

_START_SECONDS = 120.0
"""The longest time for the SuperLink to start, and then to register the sites' keys."""
_RESTART_SECONDS = 10.0
"""The shortest time between two starts of the same site."""
_CONNECTED = "SuperNode ID"
"""What a SuperNode logs once the SuperLink has accepted it."""
_CONNECTION = "federation"
"""The name of the connection to the SuperLink, in Flower's configuration file."""


class LocalFederation:
    """The processes of one federation. They end with the `with` block."""

    def __init__(
        self, folder: Path, app: Path, keys: Credentials, sites: Sequence[str], forks_workers: bool = False
    ) -> None:
        """With `forks_workers`, the sites' workers are forks of one process, so imported modules are in memory once."""
        self.folder, self.app, self.keys, self.sites = folder.resolve(), app.resolve(), keys, tuple(sites)
        self.port, *self._node_ports = free_ports(1 + len(sites))
        """The port of the SuperLink, and one for the processes of each site to talk to each other."""
        self.superlink: Process | None = None
        self.nodes: dict[str, Process] = {}
        self.addresses: dict[str, str] = {}
        """The address to which a site connects, for sites that do not connect to the SuperLink directly."""
        self._started_at: dict[str, float] = {}
        self._ended: set[str] = set()
        """Sites that have ended, until they are connected again."""
        self._others: list[Process] = []
        """The fork server, if the workers are forks."""
        self._runs: list[FlowerRun] = []
        self._forks_workers = forks_workers
        self._guardian: subprocess.Popen[bytes] | None = None
        self._lock: FolderLock | None = None

    def __enter__(self) -> Self:
        """Refuse a folder in which another trial runs. End what is left of a trial that was killed."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = FolderLock(self.folder / ".lock")
        end_marked_processes(str(self.folder))
        self._guardian = start_guardian(str(self.folder))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        runs = [run.process for run in self._runs if run.process is not None]
        terminate_all([*([self.superlink] if self.superlink else []), *self.nodes.values(), *self._others, *runs])
        self.superlink, self.nodes = None, {}  # so that nothing starts them again
        if self._guardian is not None:
            self._guardian.communicate()  # closes its input, so that it ends the processes that are left
        if self._lock is not None:
            self._lock.release()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that all processes have in addition to those of this process."""
        forks = {FORK_SERVER: str(fork_server_path(self.folder))} if self._forks_workers else {}
        return {"FLWR_HOME": str(self.folder / "flower"), MARK_VARIABLE: str(self.folder), **forks}

    def site_file(self, site: str) -> Path:
        return self.folder / "sites" / site / "site.yaml"

    def start(self) -> None:
        """Start the SuperLink and all sites, with an empty database."""
        for file in self.folder.glob(f"{self._database.name}*"):  # with SQLite's journal
            file.unlink()
        if self._forks_workers:
            self._start_fork_server()
        self.start_superlink()
        self.register()
        for site in self.sites:
            self.start_site(site)

    def _start_fork_server(self) -> None:
        fork_server_path(self.folder).unlink(missing_ok=True)
        command = [sys.executable, "-m", "fedskew.flower.fork_server", str(self.site_file(self.sites[0]))]
        self._others.append(self._start_process("workers", command))

    @property
    def _database(self) -> Path:
        return self.folder / "superlink.db"

    def start_superlink(self) -> None:
        """Start the SuperLink. After a crash, it finds the registered keys in its database."""
        if self.superlink is not None:
            self.superlink.kill()
        self.superlink = self._start_process("superlink", self.superlink_command())
        await_tls(self.superlink, self.port, self.keys.authority, _START_SECONDS)
        self._write_connection(self.keys.authority.resolve())

    def superlink_command(self) -> list[str]:
        keys = self.keys.folder.resolve()
        command = [sys.executable, "-m", "fedskew.flower.superlink", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--enable-supernode-auth", "--database", str(self._database)]
        command += ["--ssl-ca-certfile", str(keys / "ca.pem"), "--ssl-certfile", str(keys / "server.pem")]
        return [*command, "--ssl-keyfile", str(keys / "server.key")]

    def register(self) -> None:
        """Register the sites' keys under their names."""
        keys = [f"{site}={self.keys.node(site).public.resolve()}" for site in self.sites]
        process = self._start_process(
            "register", [sys.executable, "-m", "fedskew.flower.registration", _CONNECTION, *keys]
        )
        if process.wait(_START_SECONDS) != 0:
            process.kill()
            raise UserError(f"the SuperLink did not register the sites' keys: {process.last_message()}")

    def node_config(self, site: str) -> str:
        """The node configuration of a site's SuperNode."""
        return node_config(self.site_file(site))

    def start_site(self, site: str) -> Process:
        if site in self.nodes:
            self.nodes[site].kill()
        port = self._node_ports[self.sites.index(site)]
        address = self.addresses.get(site, f"127.0.0.1:{self.port}")
        command = supernode_command(self.site_file(site), address, self.keys.node(site), port, self.node_config(site))
        self.nodes[site] = self._start_process(site, command)
        self._started_at[site] = time.monotonic()
        return self.nodes[site]

    def restart_ended(self, log: Callable[[str], None]) -> None:
        """Restart the SuperLink and the sites that have ended, as a service manager does.

        For about a minute, Flower refuses a site that was killed. A site may therefore need several attempts. Only the
        first one is logged.
        """
        if self.superlink is not None and not self.superlink.running:
            log(f"warning: the SuperLink ended; starting it again. Its log is {self.superlink.log}")
            self.start_superlink()
        for site, node in self.nodes.items():
            seconds = time.monotonic() - self._started_at[site]
            if node.running or seconds < _RESTART_SECONDS:
                continue
            if site not in self._ended:
                self._ended.add(site)
                log(f"warning: {site} ended; starting it again. Its log is {node.log}")
            self.start_site(site)
        self._ended -= {site for site in self._ended if _CONNECTED in self.nodes[site].output()}

    def start_run(self, app: Path | None = None) -> Process:
        """Start `flwr run`, which shows the ServerApp's log until the run is over."""
        return self.app_runs(app or self.app).start()

    def app_runs(self, app: Path) -> FlowerRun:
        """Make the object that starts runs of an app on this federation's SuperLink."""
        run = FlowerRun(app, _CONNECTION, self.folder / "logs" / "run.log", self.environment)
        self._runs.append(run)
        return run

    def _start_process(self, name: str, command: Sequence[str]) -> Process:
        return Process(name, command, self.folder / "logs" / f"{name}.log", self.environment)

    def _write_connection(self, authority: Path) -> None:
        """Write Flower's configuration file, in which `flwr run` finds the SuperLink."""
        home = self.folder / "flower"
        home.mkdir(parents=True, exist_ok=True)
        certificates = json.dumps(str(authority), ensure_ascii=False)  # TOML has no surrogate escapes
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{_CONNECTION}"\n\n[superlink.{_CONNECTION}]\n'
            f'address = "127.0.0.1:{self.port}"\nroot-certificates = {certificates}\n',
            encoding="utf-8",
        )


def write_site(path: Path, values: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")
