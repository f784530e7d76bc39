"""The federation of deploy/compose.yaml, without containers: its very commands as processes of this machine.

Each volume is a folder. Each container is a folder with links to its volumes at the paths where they are mounted, and
the container's paths in commands, variables, the script and nginx's configuration get that folder in front. Each
network is the loopback, so ports are replaced by free ones. nginx is found as in tests/flower/test_proxy.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from deployment_files import DEPLOY, Service, read_compose

from fedskew.flower.processes import free_ports

NGINX = os.environ.get("FEDSKEW_NGINX") or shutil.which(
    "nginx", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))
)
PATIENCE = 300.0
_PATHS = re.compile(r"(?<![\w/.])(?=/(?:srv|trial|tmp|etc/fedskew|etc/nginx)/?)")


class Machine:
    """Runs the services of compose.yaml as processes, with their files in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.services = read_compose()[1]
        self._ports = dict(zip(("9092", "9093"), map(str, free_ports(2)), strict=True))
        self._metrics = dict(zip(self.services, map(str, free_ports(len(self.services))), strict=True))
        for service in self.services.values():
            self._make_container(service)

    def _make_container(self, service: Service) -> None:
        root = self.root(service)
        (root / "tmp").mkdir(parents=True)
        for path, source in sorted(service.mounts.items()):
            at = root / path.removeprefix("/")
            if source.startswith("."):
                shutil.copytree(DEPLOY / source, at)
                for file in at.iterdir():
                    file.write_text(self.adapt(file.read_text(encoding="utf-8"), service), encoding="utf-8")
            elif not at.exists():  # `state` is in the site's own folder
                (self.folder / "volumes" / source).mkdir(parents=True, exist_ok=True)
                at.parent.mkdir(parents=True, exist_ok=True)
                at.symlink_to(self.folder / "volumes" / source)
        for stage in service.image.chain(service.target):
            for line in stage.values("COPY"):
                source, target = line.split()[-2:]
                if source.endswith(".conf"):
                    text = self.adapt((DEPLOY.parent / source).read_text(encoding="utf-8"), service)
                    at = root / target.removeprefix("/")
                    at.parent.mkdir(parents=True, exist_ok=True)
                    at.write_text(text, encoding="utf-8")

    def root(self, service: Service) -> Path:
        return self.folder / "containers" / service.name

    def adapt(self, text: str, service: Service) -> str:
        """Replace a container's paths, ports and names of hosts."""
        text = _PATHS.sub(str(self.root(service)), text)
        for port, free in {**self._ports, "9096": self._metrics[service.name]}.items():
            text = re.sub(rf"\b{port}\b", free, text)
        return text.replace("server:", "localhost:") if service.name in ("north", "south", "east") else text

    def run(self, service: Service, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in a service's container to its end."""
        options = self._options(service)
        return subprocess.run(
            self._words(service, command), capture_output=True, encoding="utf-8", check=False, **options
        )

    @contextmanager
    def running(self, service: Service) -> Iterator[None]:
        """Run a service until the end of the `with` block."""
        with (self.folder / f"{service.name}.log").open("wb") as log:
            process = subprocess.Popen(
                self._words(service, service.command), stdout=log, stderr=log, **self._options(service)
            )
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)

    def _words(self, service: Service, command: list[str]) -> list[str]:
        program, *arguments = (self.adapt(word, service) for word in command)
        beside = Path(sys.executable).with_name(program)
        found = str(NGINX) if program == "nginx" else str(beside) if beside.exists() else program
        return [found, *arguments]

    def _options(self, service: Service) -> dict[str, object]:
        image = {name: self.adapt(value, service) for name, value in service.image.environment(service.target).items()}
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        directory = service.image.setting(service.target, "WORKDIR") or "/tmp"
        folder = Path(self.adapt(directory, service))
        return {"cwd": folder if folder.exists() else self.root(service), "env": {**os.environ, **image, "PATH": path}}

    def await_healthy(self, service: Service) -> None:
        """Run the image's own check until it passes."""
        end = time.monotonic() + PATIENCE
        while self.run(service, service.image.words(service.target, "HEALTHCHECK")).returncode:
            assert time.monotonic() < end, (self.folder / f"{service.name}.log").read_text()
            time.sleep(0.5)

    def start_all(self, stack: ExitStack) -> None:
        """Start the services in the order of their conditions. Services that run once must succeed."""
        started: set[str] = set()
        while left := [service for service in self.services.values() if service.name not in started]:
            ready = next(service for service in left if service.needs.keys() <= started)
            for name, condition in ready.needs.items():
                if condition == "service_healthy":
                    self.await_healthy(self.services[name])
            if ready.command[0] == "chown":  # here, the folders belong to the user already
                pass
            elif ready.once:
                done = self.run(ready, ready.command)
                assert done.returncode == 0, done.stdout + done.stderr
            else:
                stack.enter_context(self.running(ready))
            started.add(ready.name)


@pytest.mark.slow
@pytest.mark.skipif(NGINX is None, reason="no nginx; FEDSKEW_NGINX may name one")
def test_the_federation_of_the_compose_file_trains_to_the_end_and_starts_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    superlink = machine.services["superlink"]
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    (operator,) = re.findall(r"exec superlink (.*)$", text, re.MULTILINE)
    with ExitStack() as stack:
        machine.start_all(stack)
        done = machine.run(superlink, operator.split())
        assert done.returncode == 0, done.stdout + done.stderr
        for name in ("north", "south", "east"):
            machine.await_healthy(machine.services[name])
    run = tmp_path / "volumes" / "server" / "runs" / "first"
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert summary["rounds"] == 3
    assert summary["sites"] == {"north": 3, "south": 3, "east": 3}
    assert (tmp_path / "volumes" / "authority" / "keys" / "ca.key").exists()
    held = {path.name for name in ("server", "proxy", "north") for path in (tmp_path / "volumes" / name).rglob("*.key")}
    assert held == {"server.key", "node.key"}
    with ExitStack() as stack:  # everything that runs once may run again
        machine.start_all(stack)
        again = machine.run(superlink, operator.split())
    assert again.returncode == 0, again.stdout + again.stderr
