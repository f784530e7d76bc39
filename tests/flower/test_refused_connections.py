"""Real processes that refuse one another, over certificates and node keys."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from expired_certificates import expire_certificate
from monitored import get, health, values
from real_federation import NAMES, PATIENCE, Real, until

from fedskew.cli import main
from fedskew.flower.credentials import make_credentials
from fedskew.flower.processes import Process, free_ports

MEGABYTES = 80


def test_strangers_are_refused_and_a_site_that_lost_its_server_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A site refuses a foreign certificate, the server a foreign key; a certificate that expired ends the site."""
    real = Real(tmp_path, NAMES[:1], days=10)
    strangers = make_credentials(tmp_path / "strangers", real.sites)
    ours, theirs = real.local.keys.node("site-1"), strangers.node("site-1")
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "ca.pem").write_bytes(ours.authority.read_bytes())
    (mixed / "node.key").write_bytes(theirs.private.read_bytes())
    (mixed / "node.key").chmod(0o600)
    superlink = f"localhost:{real.local.port}"
    app = real.app("checked", real.config("fedavg"))

    command = ["federate", "site", str(real.local.site_file("site-1")), "--check", str(app), "--superlink", superlink]

    def connect(keys: Path, log: Path) -> subprocess.Popen[str]:
        with log.open("w") as file:
            whole = [sys.executable, "-m", "fedskew", *command, "--keys", str(keys)]
            return subprocess.Popen(whole, stdout=file, stderr=file, text=True)

    def refusal(keys: Path) -> str:
        """What the site says about a certificate, before it starts any process."""
        assert main([*command, "--keys", str(keys)]) == 2
        return capsys.readouterr().err

    with real.local as local:
        local.start_superlink()
        assert f"the certificate of {superlink} is refused" in refusal(theirs.folder)
        assert connect(mixed, tmp_path / "mixed.log").wait(PATIENCE) == 2
        problem = f"error: the server refuses the key {mixed / 'node.key'}: it is not registered there"
        assert problem in (tmp_path / "mixed.log").read_text()

        local.register()
        log, (port,) = tmp_path / "site.log", free_ports(1)
        command += ["--metrics-port", str(port)]
        site = connect(ours.folder, log)
        until(lambda: "SuperNode ID" in log.read_text(), "the site's connection", local)
        assert f"warning: the certificate of {superlink} expires on" in log.read_text()
        used = re.findall(r"^Pss:\s+(\d+) kB", Path(f"/proc/{site.pid}/smaps_rollup").read_text(), re.MULTILINE)
        assert int(used[0]) / 1024 < MEGABYTES, "the process that stays has neither torch nor the data"
        assert health(port) == (200, "ok\n")
        assert values(get(port, "/metrics")[1])["fedskew_connected"] == 1
        expire_certificate(local.keys)
        assert local.superlink is not None
        local.superlink.kill()
        lost = (503, "there is no connection to the server; Flower tries again\n")
        until(lambda: health(port) == lost, "the site's notice that its server is gone", local)
        local.superlink = Process("superlink", local.superlink_command(), tmp_path / "expired.log", local.environment)
        assert site.wait(PATIENCE) == 2
        ending = log.read_text().splitlines()[-1]
        assert " error: the SuperNode lost its server and gave up (" in ending
        assert "certificate has expired" in ending
        assert f"the certificate of {superlink} is refused (certificate has expired)" in refusal(ours.folder)
    assert not any("\x1b" in line for line in log.read_text().splitlines())
