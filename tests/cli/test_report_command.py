"""`fedskew report` as a user meets it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from method_cases import slow

import fedskew as fs
from fedskew.cli import main


@pytest.mark.parametrize("formats", ["svg", *slow("svg,png")])
def test_the_page_the_figures_and_the_answer(
    formats: str, comparison: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, figures = tmp_path / "deep/report.html", tmp_path / "figures"
    runs = [str(comparison / name) for name in ("fedavg-0", "fedvls-0")]
    arguments = ["report", *runs, "-o", str(page), "--figures", str(figures), "--format", formats]
    assert main([*arguments, "--no-features"]) == 0
    told = capsys.readouterr().out
    assert "is best here" in told
    assert page.stat().st_size < 5_000_000
    assert f"report written to {page}" in told
    assert {path.suffix[1:] for path in figures.iterdir()} == set(formats.split(","))
    names, *others = ({path.stem for path in figures.glob(f"*.{kind}")} for kind in formats.split(","))
    assert all(same == names for same in others)
    assert names >= {"rounds", "by-class", "confusion", "predictions", "map", "kinds", "drift", "time"}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere"], "no run folder 'nowhere'; expected"),
        (["rns"], "no run folder 'rns'; did you mean 'runs'?"),
        (["RUNS", "-o", "report.pdf"], "expected a file that ends in .html"),
        (["RUNS", "--format", "jpeg"], "unknown format 'jpeg'"),
        (["RUNS", "--format", ","], "format is ','; expected png, svg, pdf, or several of them"),
        (["RUNS", "--format", "svg,latex"], "format is 'svg,latex'; expected latex alone and in lower case, or png"),
        (["RUNS", "--format", "LaTeX"], "format is 'LaTeX'; expected latex alone and in lower case, or png"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], error: str, comparison: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    assert main(["report", *(str(comparison) if a == "RUNS" else a for a in arguments)]) == 2
    told = capsys.readouterr().err
    assert error in told
    assert told.count("\n") == 1
    assert not list(tmp_path.glob("*.html"))


def test_a_table_for_a_paper_says_which_runs_are_unfinished(
    comparison: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("fedavg-0", "fedvls-0"):
        shutil.copytree(comparison / name, tmp_path / name)
    (tmp_path / "fedvls-0/summary.json").unlink()
    assert main(["report", str(tmp_path), "--format", "markdown"]) == 0
    shown = capsys.readouterr()
    assert "| fedvls |" in shown.out
    assert "nfinished" not in shown.out
    assert "Unfinished: fedvls (0 of 1 runs finished, shown after round " in " ".join(shown.err.split())


def test_python_writes_the_same_page(comparison: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(comparison), "-o", str(tmp_path / "by-command.html"), "--no-features"]) == 0
    report = fs.write_report(comparison, tmp_path / "by-python.html", features=False)
    assert report.path.read_bytes() == (tmp_path / "by-command.html").read_bytes()
    assert "\n".join(report.answer) in capsys.readouterr().out
    assert report.problems == report.figures == ()


def test_python_reports_results_and_saves_figures(tmp_path: Path) -> None:
    fed = fs.federation("digits", fs.Dirichlet(clients=3, beta=1.0))
    results = [
        fs.run(fed, method, rounds=1, local_epochs=1, out=tmp_path / method)
        for method in ("fedavg", "fedvls")
    ]  # fmt: skip
    report = fs.write_report(results, tmp_path / "page.html", features=False, figures=tmp_path / "f", formats="svg")
    assert "is best here" in report.answer[0]
    assert set(report.figures) == set((tmp_path / "f").iterdir())
    assert len(report.figures) > 5


def test_python_says_in_one_line_what_cannot_be_reported(comparison: Path, tmp_path: Path) -> None:
    fed = fs.federation("digits", fs.Dirichlet(clients=3, beta=1.0))
    kept_nowhere = fs.run(fed, "fedavg", rounds=1, local_epochs=1)
    with pytest.raises(fs.UserError, match="out='runs/NAME'"):
        fs.write_report(kept_nowhere)
    with pytest.raises(fs.UserError, match="no runs given; expected run folders"):
        fs.write_report([])
    with pytest.raises(fs.UserError, match=r"of type Comparison; expected .* such as the `runs` of a comparison"):
        fs.write_report(fs.compare(fed, ["fedavg"], seeds=1, rounds=1, local_epochs=1))  # type: ignore[arg-type]
    with pytest.raises(fs.UserError, match="of type list; expected run folders"):
        fs.write_report([[comparison]])  # type: ignore[list-item]
    with pytest.raises(fs.UserError, match=r"ends in \.html"):
        fs.write_report(comparison, tmp_path / "page.pdf")
