"""Sites fit one encoding of their tables together, by sums: exact, saved with the run, and only where it is allowed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Context, RecordDict
from in_process import DirectGrid, Meddle, run_config_of

import fedskew as fs
from fedskew.cli import main
from fedskew.data.table_encoding import TableEncoding
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.preparation import prepare
from fedskew.experiment.result import Result
from fedskew.experiment.run import run_prepared
from fedskew.flower.app_folder import write_app
from fedskew.flower.contract import Contract
from fedskew.flower.planning import make_settings, read_app, resolve_config
from fedskew.flower.policy import COLUMN_SUMS, EvaluationRules, Policy
from fedskew.flower.remote_scoring import EVALUATION
from fedskew.flower.remote_survey import SURVEY
from fedskew.flower.run_record import NAME
from fedskew.flower.server_app import ask_sites, run_federation
from fedskew.flower.site import Site
from fedskew.flower.site_config import SiteConfig, load_site
from fedskew.flower.site_survey import SurveyRules
from fedskew.flower.wire import Facts

NAMES = ["east", "north", "west"]
RARE = "zzz"


def patients(rows: int) -> pd.DataFrame:
    random = np.random.default_rng(rows)
    y = random.integers(0, 2, rows)
    hospital = np.arange(rows) % 3
    ward = np.array(["a", "b", "icu"])[random.integers(0, 3, rows)]
    ward[:2] = RARE
    return pd.DataFrame(
        {
            "age": 40 + 10 * y + 5 * hospital + random.normal(0, 6, rows),
            "serial": 1e9 + hospital + y + random.normal(0, 0.5, rows),
            "lactate": np.where(random.random(rows) < 0.2, np.nan, y + random.normal(0, 0.4, rows)),
            "ward": np.where(random.random(rows) < 0.15, None, ward),
            "hospital": np.array(NAMES)[hospital],
            "ill": np.array(["no", "yes"])[y],
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All patients in one folder, and those of each hospital in another."""
    folder = tmp_path_factory.mktemp("hospitals")
    for part, rows in (("train", 300), ("test", 90)):
        table = patients(rows)
        (folder / "whole").mkdir(exist_ok=True)
        table.to_csv(folder / "whole" / f"{part}.csv", index=False)
        for name in NAMES:
            (folder / name / "data").mkdir(parents=True, exist_ok=True)
            own = table[table["hospital"] == name].drop(columns="hospital").iloc[:, ::-1]
            own.to_csv(folder / name / "data" / f"{part}.csv", index=False)
    return folder


ALLOWED = Policy(reveals=(COLUMN_SUMS,))


def whole(folder: Path) -> fs.Federation:
    return fs.federation(str(folder / "whole"), fs.Column("hospital"), label="ill")


def config(rounds: int = 2) -> Config:
    values = {"method": "fedavg", "rounds": rounds, "local_epochs": 1, "engine": "plain", "device": "cpu"}
    return with_values(Config(), {**values, "batch_size": 20})


def draft(folder: Path) -> Contract:
    return Contract.from_dataset(whole(folder).dataset).draft()


def sites(folder: Path, policies: dict[str, Policy] | None = None, state: Path | None = None) -> dict[str, Site]:
    """The hospitals' sites. `state` is a folder for their states."""
    chosen = dict.fromkeys(NAMES, ALLOWED) | (policies or {})
    own: dict[str, Any] = {"device": "cpu", "metrics": "class"}
    return {
        name: Site(
            SiteConfig(
                folder / name,
                name,
                "data",
                {"label": "ill"},
                policy=policy,
                state=str((state or folder / "states") / name),
                **own,
            )
        )
        for name, policy in chosen.items()
    }


def run_at(
    out: Path,
    folder: Path,
    policies: dict[str, Policy] | None = None,
    meddle: Meddle | None = None,
    late: str | None = None,
) -> tuple[Result, DirectGrid]:
    """Run a federation. The site `late` connects when the others have sent their sums."""
    start = 3 if late is None else 2
    settings = make_settings(NAMES, {"folder": str(out), "minimum": 2, "begin_with": start, "site_metrics": "class"})
    contract = draft(folder)
    values = run_config_of(settings, contract, resolve_config(config(), contract, NAMES))
    grid = DirectGrid(sites(folder, policies, out.with_name(f"{out.name}-states")), meddle)
    if late is not None:
        grid.offline = {late}
        grid.meddle = connecting(late, grid)
    return run_federation(grid, Context(1, 0, {}, RecordDict(), values)), grid


def connecting(late: str, grid: DirectGrid) -> Meddle:
    def meddle(_: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        if asked["kind"] == "column_sums":
            grid.offline.discard(late)
        return facts, answer

    return meddle


def assert_pooled(encoding: list[dict[str, Any]], pooled: TableEncoding) -> None:
    for found, column in zip(encoding, pooled.columns, strict=True):
        expected = column.to_json()
        numbers = {key: expected.pop(key) for key in ("mean", "std") if key in expected}
        assert {key: found[key] for key in expected} == expected
        for key, value in numbers.items():
            assert found[key] == pytest.approx(value, rel=1e-9)


def pooled_encoding(folder: Path) -> TableEncoding:
    """The encoding of the pooled rows. The value that few rows of every site have is unknown."""
    fitted = whole(folder).dataset.encoding
    assert fitted is not None
    assert RARE in (fitted.columns[3].categories or ())
    known = tuple(value for value in fitted.columns[3].categories or () if value != RARE)
    return TableEncoding((*fitted.columns[:3], replace(fitted.columns[3], categories=known)))


def test_the_encoding_is_that_of_the_pooled_rows_and_so_is_the_model(folder: Path, tmp_path: Path) -> None:
    apart, grid = run_at(tmp_path / "run", folder)
    pooled = pooled_encoding(folder)
    assert_pooled(apart.inputs["encoding"], pooled)
    exact = TableEncoding.from_json(apart.inputs["encoding"])
    together = run_prepared(
        prepare(config(), fs.federation(str(folder / "whole"), fs.Column("hospital"), label="ill", encoding=exact))
    )
    for name, tensor in together.model.state_dict().items():
        torch.testing.assert_close(apart.model.state_dict()[name], tensor, rtol=0, atol=1e-6)
    assert apart.evaluation == together.evaluation
    sent = [message for message in grid.sent if message.kind == "column_sums"]
    assert [message.site for message in sent] == NAMES
    assert not any(RARE in str(message.facts) for message in grid.sent)


def test_sums_hold_no_row_and_no_count_of_a_category(folder: Path, tmp_path: Path) -> None:
    _, grid = run_at(tmp_path / "run", folder)
    table = pd.read_csv(folder / "east" / "data" / "train.csv")
    (sent,) = (message for message in grid.sent if message.kind == "column_sums" and message.site == "east")
    assert sent.payload == b""
    age, serial, lactate, ward = sent.facts["columns"]
    assert ward == {"name": "ward", "categories": ("a", "b", "icu"), "has_gaps": True}
    assert (age["count"], age["missing"]) == (100, 0)
    assert age["mean"] == pytest.approx(table["age"].mean(), rel=1e-12)
    assert age["squares"] == pytest.approx(table["age"].var(ddof=0) * 100, rel=1e-9)
    assert serial["squares"] == pytest.approx((table["serial"] - 1e9).var(ddof=0) * 100, rel=1e-9)
    assert (lactate["count"], lactate["missing"]) == (table["lactate"].count(), table["lactate"].isna().sum())
    reported = {number for column in (age, serial, lactate) for number in column.values()}
    assert not reported & (set(table["age"]) | set(table["serial"]) | set(table["lactate"]))


def test_a_resumed_run_does_not_request_the_sums_again(folder: Path, tmp_path: Path) -> None:
    class Crash(Exception):
        pass

    def crash(site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        if site == "north" and asked["kind"] == "train" and asked["key"]["round"] == 1:
            raise Crash
        return facts, answer

    with pytest.raises(Crash):
        run_at(tmp_path / "run", folder, meddle=crash)
    saved = json.loads((tmp_path / "run" / NAME).read_text())["encoding"]
    assert saved["sites"] == NAMES
    resumed, grid = run_at(tmp_path / "run", folder, {name: Policy() for name in NAMES})  # no site would send them now
    assert "column_sums" not in {message.kind for message in grid.sent}
    assert resumed.inputs["encoding"] == saved["columns"]
    uninterrupted, _ = run_at(tmp_path / "other", folder)
    for name, tensor in uninterrupted.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], tensor, rtol=0, atol=0)


def test_a_site_that_does_not_allow_sums_trains_without_sending_them(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="flwr"):
        result, grid = run_at(tmp_path / "run", folder, {"north": Policy()})
    refused = next(message for message in grid.sent if message.kind == "column_sums" and message.site == "north")
    assert list(refused.facts) == ["refused"]
    line = "which this site does not allow; expected policy.reveals: [column sums]"
    assert line in refused.facts["refused"]
    assert line in caplog.text
    assert result.site_rounds == dict.fromkeys(NAMES, 2)
    assert result.federation is not None
    assert result.federation["column_sums"] == ["east", "west"]


def test_a_site_that_connects_later_trains_with_the_encoding_of_the_others(folder: Path, tmp_path: Path) -> None:
    result, grid = run_at(tmp_path / "run", folder, late="west")
    assert [message.site for message in grid.sent if message.kind == "column_sums"] == ["east", "north"]
    assert result.site_rounds["west"] > 0
    tables = pd.concat([pd.read_csv(folder / name / "data" / "train.csv") for name in ("east", "north")])
    age = result.inputs["encoding"][0]
    assert age["mean"] == pytest.approx(tables["age"].mean(), rel=1e-12)
    assert age["std"] == pytest.approx(tables["age"].std(ddof=0), rel=1e-12)


def test_too_few_sums_end_the_run_with_the_reasons(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        fs.UserError, match=r"1 of 2 required sites sent usable column sums \(.*north: .*policy.reveals.*west: "
    ):
        run_at(tmp_path / "run", folder, {"north": Policy(reveals=()), "west": Policy(reveals=("label counts",))})
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("column", "changed", "reason"),
    [
        (0, {"count": -1}, "its counts of column 'age' are impossible"),
        (0, {"count": 10**8}, "its counts of column 'age' are impossible"),
        (0, {"mean": float("nan")}, "its moments of column 'age' are impossible"),
        (1, {"squares": -1.0}, "its moments of column 'serial' are impossible"),
        (0, {"mean": 1e200}, "its moments of column 'age' are impossible"),
        (1, {"squares": 1e307}, "its moments of column 'serial' are impossible"),
        (1, {"name": "age"}, "its sums of column 'serial' do not have the expected form"),
        (2, {"rows": [1, 2]}, "its sums of column 'lactate' do not have the expected form"),
        (3, {"categories": [["a"]]}, "its categories of column 'ward' are impossible"),
        (3, {"categories": "abc"}, "its categories of column 'ward' are impossible"),
    ],
)
def test_impossible_sums_are_discarded(
    column: int, changed: Facts, reason: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def meddle(site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        if site == "west" and asked["kind"] == "column_sums":
            facts["columns"][column] |= changed
        return facts, answer

    with caplog.at_level("INFO", logger="flwr"):
        result, _ = run_at(tmp_path / "run", folder, meddle=meddle)
    assert f"no usable column sums from west: {reason}" in caplog.text
    assert (result.federation or {})["column_sums"] == ["east", "north"]


def test_a_site_refuses_sums_that_the_app_does_not_declare(folder: Path) -> None:
    site = sites(folder)["east"]
    contract = Contract.from_dataset(whole(folder).dataset)
    terms = {"config": resolve_config(config(), contract, NAMES).to_mapping(), "contract": contract.to_json()}
    with pytest.raises(fs.UserError, match="requests column sums, which its app does not declare"):
        site.answer({"kind": "column_sums", "terms": terms}, b"")
    with pytest.raises(fs.UserError, match="the server sets 'rows'"):
        site.answer({"kind": "column_sums", "terms": terms, "rows": [1]}, b"")


def test_sums_stay_the_same_after_a_row_was_added(folder: Path, tmp_path: Path) -> None:
    """The attack: the server asks before and after a patient arrives, and subtracts."""
    table = pd.read_csv(folder / "east" / "data" / "train.csv")
    (tmp_path / "data").mkdir()
    table.to_csv(tmp_path / "data" / "train.csv", index=False)
    table.to_csv(tmp_path / "data" / "test.csv", index=False)
    own = replace(sites(folder)["east"].config, folder=tmp_path, state="state")
    terms = {"config": resolve_config(config(), draft(folder), NAMES).to_mapping(), "contract": draft(folder).to_json()}
    before = Site(own).answer({"kind": "column_sums", "terms": terms}, b"")[0]
    pd.concat([table, table[:1]]).to_csv(tmp_path / "data" / "train.csv", index=False)
    assert len(own.federation(draft(folder)).dataset.train) == 101
    after = Site(own).answer({"kind": "column_sums", "terms": terms}, b"")[0]
    assert json.dumps(after) == json.dumps(before)


def app_with_sums(folder: Path, tmp_path: Path, *more: str) -> Path:
    data = ["--data", str(folder / "whole"), "--set", "data.label=ill", "--set", "data.drop=hospital"]
    command = ["federate", "init", str(tmp_path / "app"), "--sites", ",".join(NAMES), *data, "--method", "fedavg"]
    assert main([*command, "--rounds", "2", "--column-sums", *more]) == 0
    return tmp_path / "app"


def test_approval_covers_the_draft_and_the_contract_that_sums_complete(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = app_with_sums(folder, tmp_path)
    _, contract, run = read_app(app)
    east = tmp_path / "east"
    east.mkdir()
    text = f"name: east\ndata: {{name: {folder / 'east' / 'data'}, label: ill}}\n"
    (east / "site.yaml").write_text(text + "policy: {reveals: [column sums]}\n")
    assert main(["federate", "approve", str(app), str(east / "site.yaml"), "--yes"]) == 0
    shown = capsys.readouterr().out
    assert "data: table with columns age (number), serial (number), lactate (number), ward (category)" in shown
    assert "if its policy.reveals lists 'column sums', it sends column sums of its training part, once, before" in shown
    assert "column sums" in (app / "README.md").read_text()
    own = replace(sites(folder)["east"].config, folder=east, data=str(folder / "east" / "data"))
    site = Site(own)
    terms = {"config": run.to_mapping() | {"data_dir": None}, "contract": contract.to_json()}
    assert len(site.answer({"kind": "column_sums", "terms": terms}, b"")[0]["columns"]) == 4
    complete = contract.complete(pooled_encoding(folder))
    assert site.answer({"kind": "hello", "terms": terms | {"contract": complete.to_json()}}, b"")[0]["samples"] == 100
    other = contract.complete(TableEncoding(pooled_encoding(folder).columns[1:]))
    with pytest.raises(fs.UserError, match="differs from every app that this site approved: the contract"):
        site.answer({"kind": "hello", "terms": terms | {"contract": other.to_json()}}, b"")


def test_an_approval_without_sums_does_not_allow_them(folder: Path, tmp_path: Path) -> None:
    contract = Contract.from_dataset(whole(folder).dataset)
    settings = make_settings(NAMES, {"folder": str(tmp_path / "run")})
    app = write_app(tmp_path / "app", settings, contract, resolve_config(config(), contract, NAMES))
    (tmp_path / "east").mkdir()
    (tmp_path / "east" / "site.yaml").write_text(
        f"name: east\ndata: {{name: {folder / 'east' / 'data'}, label: ill}}\n"
    )
    assert main(["federate", "approve", str(app), str(tmp_path / "east" / "site.yaml"), "--yes"]) == 0
    site = Site(replace(sites(folder)["east"].config, folder=tmp_path / "east", data=str(folder / "east" / "data")))
    terms = {"config": read_app(app)[2].to_mapping() | {"data_dir": None}, "contract": contract.draft().to_json()}
    with pytest.raises(fs.UserError, match="differs from every app that this site approved: the contract"):
        site.answer({"kind": "column_sums", "terms": terms}, b"")


def test_check_shows_the_sums_or_that_they_are_not_allowed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app, file = app_with_sums(folder, tmp_path), tmp_path / "site.yaml"
    text = f"name: east\ndata: {{name: {folder / 'east' / 'data'}, label: ill}}\n"
    file.write_text(text)
    assert main(["federate", "site", str(file), "--check", str(app)]) == 0
    shown = capsys.readouterr()
    assert "this site's policy does not allow column sums" in shown.err
    assert "column sums of ward" not in shown.out
    file.write_text(text + "policy: {reveals: [column sums], smallest_group: 30}\n")
    assert main(["federate", "site", str(file), "--check", str(app)]) == 0
    shown = capsys.readouterr()
    assert "it sends column sums of its training part" in shown.out
    assert "column sums of age: 100 values, mean " in shown.out
    frequent = pd.read_csv(folder / "east" / "data" / "train.csv")["ward"].value_counts()
    listed = ", ".join(sorted(frequent[frequent >= 30].index)) or "none"
    assert f"column sums of ward: values {listed}; gaps: no" in shown.out
    assert "other units" not in shown.err
    settings, contract, app_config = read_app(app)
    resolved = resolve_config(app_config, contract, settings.sites).to_mapping() | {"data_dir": None}
    Site(load_site(file)).answer(
        {"kind": "column_sums", "terms": {"contract": contract.to_json(), "config": resolved}}, b""
    )
    file.write_text(text + "policy: {reveals: [column sums]}\n")  # would hide less, but the recorded sums are repeated
    assert main(["federate", "site", str(file), "--check", str(app)]) == 0
    shown = capsys.readouterr()
    assert "this site has sent its column sums, and will repeat them" in shown.err
    assert f"column sums of ward: values {listed}; gaps: no" in shown.out


def test_columns_may_come_from_a_file_without_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "columns.yaml").write_text("columns:\n- {name: age}\n- {name: ward, categories: []}\n")
    command = ["federate", "init", str(tmp_path / "app"), "--sites", "a,b", "--classes", "no,yes", "--method", "fedavg"]
    assert main([*command, "--encoding", str(tmp_path / "columns.yaml"), "--column-sums"]) == 0
    contract = read_app(tmp_path / "app")[1]
    assert contract.column_sums
    assert contract.columns == ("age", "age missing", "ward missing")
    assert main([*command[:2], str(tmp_path / "b"), *command[3:], "--shape", "1,8,8", "--column-sums"]) == 2
    assert "column sums need a table with named columns" in capsys.readouterr().err


def test_noise_does_not_cover_sums(folder: Path, tmp_path: Path) -> None:
    contract = draft(folder)
    settings = make_settings(NAMES, {"folder": str(tmp_path / "run"), "privacy": "central"})
    with pytest.raises(fs.UserError, match="ε would not cover column sums"):
        write_app(tmp_path / "app", settings, contract, resolve_config(config(), contract, NAMES))


def test_the_model_card_says_that_sums_were_sent(folder: Path, tmp_path: Path) -> None:
    run_at(tmp_path / "run", folder)
    assert main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "model")]) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert "The encoding of the table was fitted to sums that east, north, west sent once." in card
    exported = json.loads((tmp_path / "model" / "model.json").read_text())["inputs"]["encoding"]
    assert_pooled(exported, pooled_encoding(folder))


@pytest.mark.slow
def test_a_fitted_encoding_serves_surveys_tests_and_comparisons_too(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The app has a draft. A survey needs no more, and the other two find the encoding in the run or in the model."""
    run_at(tmp_path / "run", folder)
    assert main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "model")]) == 0
    allowed = replace(ALLOWED, survey=SurveyRules(), evaluate=EvaluationRules())
    values = {"folder": str(tmp_path / "run"), "minimum": 2, "begin_with": 3, "site_metrics": "class"}
    settings = make_settings(NAMES, values | {"survey": True, "evaluate_only": True})
    resolved = resolve_config(config(), draft(folder), NAMES)
    run_config = run_config_of(settings, draft(folder), resolved)
    grid = DirectGrid(sites(folder, dict.fromkeys(NAMES, allowed), tmp_path / "states"))
    ask_sites(grid, Context(1, 0, {}, RecordDict(), run_config | {"federation.purpose": "survey"}))
    survey = json.loads((tmp_path / "run-survey" / SURVEY).read_text())
    columns = {column["name"]: column for column in survey["sites"]["east"]["columns"]}
    assert columns["ward"]["values"] == ["a", "b", "icu"]
    ages = pd.read_csv(folder / "east" / "data" / "train.csv")["age"]
    assert ages.min() < columns["age"]["low"] + 5 < ages.median() < columns["age"]["high"] < ages.max() + 5
    weights = str(tmp_path / "model" / "model.safetensors")
    asked = run_config | {"federation.purpose": "evaluate", "federation.tested_model": weights}
    ask_sites(grid, Context(1, 0, {}, RecordDict(), asked))
    found = json.loads((tmp_path / "run-evaluate" / EVALUATION).read_text())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["total"]["accuracy"] == pytest.approx(summary["accuracy"])
    app = write_app(tmp_path / "app", settings, draft(folder), resolved)
    (tmp_path / "site.yaml").write_text(f"name: east\ndata: {{name: {folder / 'east' / 'data'}, label: ill}}\n")
    capsys.readouterr()
    command = ["federate", "compare", str(tmp_path / "model"), str(app), str(tmp_path / "site.yaml"), "--json"]
    assert main(command) == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared["finished"]["accuracy"] == pytest.approx(found["by_site"]["east"]["accuracy"])


@pytest.mark.slow
def test_real_processes_fit_an_encoding_and_test_before_and_after_training(folder: Path, tmp_path: Path) -> None:
    data = ["--data", str(folder / "whole"), "--set", "data.label=ill"]
    split = ["--partition", "column", "--set", "partition.column=hospital"]
    shared = ["--column-sums", "--federation", "site_metrics=total", "--federation", "local_tests=true"]
    training = ["--method", "fedavg", "--rounds", "2", "--local-epochs", "1"]
    command = ["federate", "up", str(tmp_path / "trial"), *data, *split, *shared, *training]
    done = subprocess.run([sys.executable, "-m", "fedskew", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "the encoding is fitted to the column sums of east, north, west" in done.stderr
    saved = json.loads((tmp_path / "trial" / "run" / NAME).read_text())["encoding"]
    assert_pooled(saved["columns"], pooled_encoding(folder))
    tests = json.loads((tmp_path / "trial" / "run" / "summary.json").read_text())["client_tests"]
    assert tests.keys() == set(NAMES)
    assert all(found.keys() == {"accuracy", "before", "after"} for found in tests.values())
