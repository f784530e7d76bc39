"""The live page in a real browser: it draws new rounds, says when the run has ended, and follows a resumed run."""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import fedskew as fs
from fedskew.live.server import LiveServer

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install fedskew[dev]")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip


@pytest.fixture
def program() -> str:
    """The path of Chromium."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    return found


def test_the_page_follows_a_run_to_its_end(program: str, tmp_path: Path) -> None:
    server = LiveServer([tmp_path / "run"], port=0)
    server.start()
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=FLAGS)
        page = browser.new_page()
        page.set_default_timeout(120_000)
        errors: list[str] = []
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server.url)
        page.get_by_text("no results yet").wait_for()
        fed = fs.federation("digits", fs.Dirichlet(clients=3, beta=1.0))
        fs.run(fed, "fedavg", rounds=2, local_epochs=1, out=tmp_path / "run")
        page.get_by_text("fedavg recognises").wait_for()
        page.wait_for_function("document.getElementById('chart-accuracy')?.data?.[0].x.length === 3")
        server.ended.set()
        page.wait_for_function("document.getElementById('live').textContent === 'finished'")
        assert errors == []
        browser.close()
    server.finish()
    server.close()


def test_the_page_of_an_interrupted_run_continues_with_it(program: str, tmp_path: Path) -> None:
    fed = fs.federation("digits", fs.Dirichlet(clients=3, beta=1.0))
    fs.run(fed, "fedavg", rounds=2, local_epochs=1, out=tmp_path / "run")
    summary = (tmp_path / "run/summary.json").read_bytes()
    (tmp_path / "run/summary.json").unlink()  # as if the run had been interrupted
    first = LiveServer([tmp_path / "run"], port=0)
    first.start()
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=FLAGS)
        page = browser.new_page()
        page.set_default_timeout(120_000)
        page.goto(first.url)
        page.get_by_text("live, fedavg seed 0: round 2").wait_for()
        first.finish()
        page.get_by_text("interrupted, fedavg seed 0: round 2").wait_for()
        first.close()
        (tmp_path / "run/summary.json").write_bytes(summary)
        second = LiveServer([tmp_path / "run"], port=urlsplit(first.url).port)
        second.start()
        page.wait_for_function("document.getElementById('live').textContent === 'live, finished'")
        browser.close()
    second.close()
