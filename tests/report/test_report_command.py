"""`fedskew report` as a user meets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedskew.cli import main


def test_the_page_the_figures_and_the_answer(
    comparison: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, figures = tmp_path / "deep/report.html", tmp_path / "figures"
    arguments = ["report", str(comparison), "-o", str(page), "--figures", str(figures), "--format", "svg,png"]
    assert main([*arguments, "--no-features"]) == 0
    told = capsys.readouterr().out
    assert "is best here" in told
    assert page.stat().st_size < 5_000_000
    assert f"report in {page}" in told
    names = {path.stem for path in figures.glob("*.svg")}
    assert names == {path.stem for path in figures.glob("*.png")}
    assert names >= {"rounds", "by-class", "confusion", "predictions", "map", "kinds", "drift", "time"}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere"], "no run folder 'nowhere'"),
        (["RUNS", "-o", "report.pdf"], "expected a file that ends in .html"),
        (["RUNS", "--format", "jpeg"], "unknown format 'jpeg'"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], error: str, comparison: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["report", *(str(comparison) if a == "RUNS" else a for a in arguments)]) == 2
    told = capsys.readouterr().err
    assert error in told
    assert told.count("\n") == 1
    assert not list(tmp_path.glob("*.html"))
