"""What notebooks show: small HTML with the map of classes and clients, and curves, and progress in a real kernel."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

import fedskew as fs
from fedskew.metrics.confusion import Evaluation
from fedskew.notebook import MAX_CLASSES, bar, curves, label_map


class Balanced(HTMLParser):
    """Fails on tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(html: str) -> str:
    parser = Balanced()
    parser.feed(re.sub(r"<(rect|polyline)([^>]*)/>", r"<\1\2></\1>", html))
    assert parser.open == []
    return html


def test_a_few_clients_have_their_counts() -> None:
    html = parsed(label_map(np.array([[3, 0], [1, 7]]), ["Rome", "O<slo"], ["flu", "cold"]))
    assert "O&lt;slo" in html
    assert re.findall(r"<td[^>]*>(\d*)</td>", html) == ["3", "1", "4", "", "7", "7"]


def test_many_clients_are_an_image_with_a_pixel_each() -> None:
    pillow = pytest.importorskip("PIL.Image")
    counts = np.zeros((50, MAX_CLASSES + 3), np.int64)
    counts[7, 0] = 9
    html = parsed(label_map(counts, list(map(str, range(50))), [f"c{c}" for c in range(MAX_CLASSES + 3)]))
    strips = re.findall(r"base64,([^\"]+)", html)
    assert len(strips) == MAX_CLASSES
    assert "… and 3 more classes" in html
    pixels = np.asarray(pillow.open(io.BytesIO(base64.b64decode(strips[0]))))
    assert pixels.shape == (1, 50)
    assert np.flatnonzero(pixels[0] < 255).tolist() == [7]
    assert len(html) < 15_000


def test_a_single_class_that_is_not_shown_is_one_class() -> None:
    html = label_map(np.ones((2, MAX_CLASSES + 1), np.int64), ["a", "b"], [f"c{c}" for c in range(MAX_CLASSES + 1)])
    assert "… and 1 more class<" in html


def test_curves_are_thinned_and_need_two_points() -> None:
    assert curves({"fedavg": [[(0, 10.0)]], "nothing": []}) == ""
    long = [(float(t), t**0.5) for t in range(5000)]
    html = parsed(curves({"fedavg": [long, long], "fed<prox": [long]}))
    assert html.count("<polyline") == 3
    assert "fed&lt;prox" in html
    assert len(html) < 8_000
    assert "nan" not in parsed(curves({"flat": [[(0, 1.0), (1, 1.0)]]}))


def test_a_bar_of_nothing() -> None:
    assert "width:0%" in bar(0, 0)


def test_public_objects_show_the_map_in_a_few_kilobytes() -> None:
    federation = fs.federation("digits", fs.Dirichlet(clients=5, beta=0.3), seed=0)
    short = {"rounds": 2, "local_epochs": 1, "device": "cpu"}
    result = fs.run(federation, "fedavg", **short)
    comparison = fs.compare(federation, ["fedavg", "fedprox"], seeds=1, **short)
    shown_map = label_map(federation.label_counts, federation.client_labels, federation.dataset.classes)
    for shown in (federation, result, comparison):
        html = parsed(shown._repr_html_())
        assert shown_map in html
        assert len(html) < 10_000
    assert "<polyline" in result._repr_html_()


def test_results_of_sites_that_report_totals_have_no_worst_class() -> None:
    federation = fs.federation("digits", fs.Dirichlet(clients=2, beta=1.0), seed=0)
    result = fs.run(federation, "fedavg", rounds=1, local_epochs=1, device="cpu")
    totals = Evaluation(np.zeros((10, 10), np.int64), (5, 10))
    shown = replace(result, history=[replace(row, evaluation=totals) for row in result.history])._repr_html_()
    assert "50.00 %" in shown
    assert "nan" not in shown
    assert "by class" not in shown


KERNEL = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install fedskew[dev]")
PROGRAM = """
import fedskew as fs
fed = fs.federation("digits", fs.Dirichlet(clients=3, beta=1.0), seed=0)
short = dict(rounds=2, local_epochs=1, device="cpu")
result = fs.run(fed, "fedavg", **short)
quiet = fs.run(fed, "fedavg", progress=False, **short)
compared = fs.compare(fed, ["fedavg", "fedprox"], seeds=2, **short)
choice = fs.choose(fed, ["fedprox"], "40r", rounds=3, local_epochs=1, workers=1, device="cpu", out="race")
choice
"""


def test_a_kernel_shows_progress_of_runs_comparisons_and_races(tmp_path) -> None:
    import nbformat

    cells = [nbformat.v4.new_code_cell(PROGRAM)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    KERNEL.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    run, comparison, race, choice = (parsed(output["data"]["text/html"]) for output in notebook.cells[0].outputs)
    assert "fedavg, seed 0" in run
    assert "2/2" in run
    assert "<polyline" in run
    assert "run 4 of 4" in comparison
    assert comparison.count("2/2") == 4
    assert "trials done" in race
    assert "Use " in choice
