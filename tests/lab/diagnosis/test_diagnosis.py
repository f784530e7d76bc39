"""The nearest setting is the one the counts were drawn from; advice rests on numbers; a start can be run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import fedskew as fs
from fedskew.cli import main
from fedskew.data import make_partition
from fedskew.data.label_counts import LabelCounts, federation_counts
from fedskew.errors import UserError
from fedskew.experiment.config import Config, load_yaml, with_values
from fedskew.experiment.round.record import RoundRow
from fedskew.lab.diagnosis.advice import MARGIN, candidates, printed_gains, recommend
from fedskew.lab.diagnosis.diagnosis import Diagnosis
from fedskew.lab.diagnosis.known import NEARNESS, Neighbour, known_settings, nearest
from fedskew.lab.diagnosis.setting import KnownSetting, Score
from fedskew.lab.diagnosis.skew import Skew
from fedskew.lab.papers.protocol import numbers
from fedskew.lab.sweep.records import Record, RecordsFile
from fedskew.methods.catalogue import find
from fedskew.metrics.confusion import Evaluation

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def known() -> list[KnownSetting]:
    return known_settings()


def counts(rule: str, classes: int, seed: int = 5, samples: int = 50_000, **params: object) -> np.ndarray:
    y = np.repeat(np.arange(classes), samples // classes)
    return np.array(
        [np.bincount(y[p], minlength=classes) for p in make_partition(rule, **params).split(y, classes, seed)]
    )


@pytest.mark.parametrize(
    ("rule", "params", "classes", "label"),
    [
        ("dirichlet", {"clients": 10, "beta": 0.05}, 10, "mnist, dirichlet 0.05"),
        ("dirichlet", {"clients": 10, "beta": 0.5}, 100, "cifar100, dirichlet 0.5, 10 clients"),
        ("shards", {"clients": 100, "shards": 2}, 10, "shards 2, 100 clients"),
        ("fedgr-double", {"clients": 100, "labels_per_client": 3}, 10, "fedgr-double 3, 100 clients"),
    ],
)
def test_counts_of_a_published_setting_find_it(
    rule: str, params: dict[str, object], classes: int, label: str, known: list[KnownSetting]
) -> None:
    closest = nearest(Skew(counts(rule, classes, **params)), known)[0]
    assert closest.is_near
    assert label in closest.setting.label


def test_published_numbers_are_quoted_as_printed(known: list[KnownSetting]) -> None:
    cell = ("table1", "cifar10", "dirichlet:0.05", "FedVLS", "best")
    printed = next(n.mean for n in numbers("fedvls") if (n.table, n.dataset, n.split, n.method, n.metric) == cell)
    setting = next(s for s in known if s.label == "cifar10, dirichlet 0.05, 10 clients")
    (score,) = [s for s in setting.scores if s.method == "fedvls" and "fedvls/table1" in s.source]
    assert score.accuracy == printed


def test_a_setting_names_what_is_unusual_in_its_split() -> None:
    setting = KnownSetting("mnist", "dirichlet", (("beta", 0.05), ("min_size", 256)), 10, None)
    assert setting.label == "mnist, dirichlet 0.05 min_size=256, 10 clients"


def test_with_several_labels_no_method_is_suggested_that_needs_one_class() -> None:
    table = counts("dirichlet", 10, samples=20_000, clients=20, beta=0.05)
    names = tuple(map(str, range(20)))
    one = Diagnosis.from_counts(LabelCounts(names, names[:10], table), per_round=2)
    several = Diagnosis.from_counts(LabelCounts(names, names[:10], table, several_labels=True), per_round=2)
    assert one.method == "fedvls"
    assert one.command_that_measures == "choose"
    assert {c.method for c in several.candidates} < {c.method for c in one.candidates}
    for method in (several.method, *(c.method for c in several.candidates)):
        assert all(part.multi_label for name in method.split("+") for part in find(name).parts)
    assert several.command_that_measures == "compare"


def test_nothing_near_is_said() -> None:
    table = LabelCounts(("a", "b"), ("x", "y"), np.array([[1000, 1], [3, 40_000]]))
    found = Diagnosis.from_counts(table)
    text = " ".join(found.sentences())
    assert "fedskew reran nothing near this federation" in text
    assert "To measure which method helps, use fedskew choose." in text
    assert found.candidates == []
    assert found.method == "fedavg"


def test_what_only_one_client_has_and_nobody_has_is_named() -> None:
    table = LabelCounts(("a", "b"), ("x", "y", "z"), np.array([[10, 5, 0], [10, 0, 0]]))
    text = " ".join(Diagnosis(table, [], per_round=1).sentences())
    assert "No client has samples of z" in text
    assert "Classes that only one client has: y. Rounds without that client may make the model forget" in text
    assert "Rounds without that client" not in " ".join(Diagnosis(table, []).sentences())


def test_many_classes_without_samples_are_counted() -> None:
    names = tuple(f"c{number}" for number in range(9))
    table = LabelCounts(("a", "b"), names, np.array([[10, 5, *[0] * 7], [10, 5, *[0] * 7]]))
    text = " ".join(Diagnosis(table, []).sentences())
    assert "No client has samples of c2, c3, c4, c5, c6 and 2 more;" in text
    assert "on average, a client lacks 0 % of the classes with samples and has few" in text


def test_a_method_that_helps_in_one_setting_only_is_not_denied() -> None:
    settings = [KnownSetting("mnist", "iid", (), n, None, [Score("fedprox", 70 + gain, 70, "rerun", 1)])
                for n, gain in ((10, 3), (20, -5))]  # fmt: skip
    table = LabelCounts(("a", "b"), ("0", "1"), np.eye(2, dtype=np.int64))
    text = " ".join(Diagnosis(table, [Neighbour(setting, 0.0) for setting in settings]).sentences())
    assert "No method beat FedAvg there on average." in text


def test_a_printed_setting_that_is_nearer_is_not_ignored() -> None:
    printed = Neighbour(KnownSetting("mnist", "iid", (), 10, None, [Score("fedprox", 71, 70, "paper/table1")]), 0.05)
    rerun = Neighbour(KnownSetting("mnist", "iid", (), 20, None, [Score("fedprox", 71, 70, "rerun", 1)]), 0.3)
    table = LabelCounts(("a", "b"), ("0", "1"), np.eye(2, dtype=np.int64))
    text = " ".join(Diagnosis(table, [printed, rerun]).sentences())
    assert "The nearest rerun is mnist, iid, 20 clients (distance 0.30)." in text
    assert "Papers print 1 gain for near settings, but fedskew reran none." in text


def test_the_ends_of_beta_are_words() -> None:
    apart, even = (LabelCounts(("a", "b"), ("x", "y"), np.array(c)) for c in ([[50, 0], [0, 50]], [[50, 50], [50, 50]]))
    assert Diagnosis(apart, []).beta_words.startswith("below 0.001")
    assert Diagnosis(even, []).beta_words.startswith("above 1000")


def test_the_page_does_not_offer_a_dataset_with_other_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sites.csv").write_text("cat,dog,owl\n5,1,2\n1,9,0\n")
    assert main(["diagnose", "sites.csv", "-o", "page.html"]) == 0
    assert "name: path/to/your/data" in Path("page.html").read_text(encoding="utf-8")


def _setting(*scores: Score) -> KnownSetting:
    return KnownSetting("digits", "iid", (), 10, None, list(scores))


def test_prints_and_far_settings_do_not_count() -> None:
    near = _setting(
        Score("fedvls", 80, 70, "paper"), Score("fedvls", 73, 70, "rerun", 3), Score("fedprox", 79, 70, "paper")
    )
    far = KnownSetting("digits", "iid", (), 99, None, [Score("fedlmd", 99, 1, "rerun", 1)])
    (only,) = candidates([Neighbour(near, 0.05), Neighbour(far, 0.5)])
    assert (only.method, only.gain) == ("fedvls", 3)
    assert recommend([only]) == "fedvls"


def test_candidates_are_sorted_by_their_gain_and_not_by_a_rounded_one() -> None:
    gains = {"fedprox": 2.6, "fedvls": 3.4, "fedlmd": 3.1, "fedrs": -0.2}
    scores = [Score(method, 70 + gain, 70, "rerun", 1) for method, gain in gains.items()]
    scores += [Score("fedlmd", 73.1, 70, "other rerun", 1)]
    ranked = candidates([Neighbour(_setting(*scores), 0.0)])
    assert [c.method for c in ranked] == ["fedvls", "fedlmd", "fedprox", "fedrs"]


def test_each_setting_counts_once() -> None:
    one = _setting(Score("fedvls", 72, 70, "rerun", 1), Score("fedvls", 76, 70, "other rerun", 1))
    other = KnownSetting("mnist", "iid", (), 10, None, [Score("fedvls", 80, 70, "rerun", 1)])
    (only,) = candidates([Neighbour(one, 0.0), Neighbour(other, 0.0)])
    assert only.gains == [4, 10]
    assert only.gain == 7


@pytest.mark.parametrize(
    ("printed", "rerun", "outcome"),
    [
        (2.0, -1.0, "refuted"), (2.0, 1.5, "confirmed"), (2.0, 0.5, "smaller"), (2.0, None, "not rerun"),
        (-2.0, -1.0, "confirmed"), (-2.0, 1.0, "refuted"),
    ],
)  # fmt: skip
def test_a_printed_gain_is_compared_with_its_rerun(printed: float, rerun: float | None, outcome: str) -> None:
    scores = [Score("fedvls", 70 + printed, 70, "paper", prints_best=True)]
    if rerun is not None:
        scores.append(Score("fedvls", 10, 70, "rerun", 1, best_gain=rerun))
    (one,) = printed_gains([Neighbour(_setting(*scores), 0.0)])
    assert one.outcome == outcome
    table = LabelCounts(("a", "b"), ("0", "1"), np.eye(2, dtype=np.int64))
    text = " ".join(Diagnosis(table, [Neighbour(_setting(*scores), 0.0)]).sentences())
    assert ("Not every printed gain was confirmed" in text) == (outcome == "refuted")
    assert NEARNESS in text


@pytest.mark.parametrize("gain", [-10, MARGIN - 0.1])
def test_a_gain_that_another_split_may_undo_is_no_reason(gain: float) -> None:
    neighbours = [Neighbour(_setting(Score("fedvls", 70 + gain, 70, "rerun", 1)), 0.0)]
    assert recommend(candidates(neighbours)) == "fedavg"
    table = LabelCounts(("a", "b"), ("0", "1"), np.eye(2, dtype=np.int64))
    text = " ".join(Diagnosis(table, neighbours).sentences())
    assert ("No method beat FedAvg" in text) == (gain < 0)
    assert ("No method gained more than 2 points" in text) == (gain > 0)


def test_reruns_without_a_method_for_several_labels_are_not_called_reruns_without_a_gain() -> None:
    table = LabelCounts(("a", "b"), ("0", "1"), np.eye(2, dtype=np.int64), several_labels=True)
    text = " ".join(Diagnosis(table, [Neighbour(_setting(Score("fedvls", 78, 70, "rerun", 1)), 0.0)]).sentences())
    assert "None of the methods that were rerun there takes several labels." in text
    assert "No method beat FedAvg" not in text


def test_a_large_gain_in_too_few_settings_is_not_denied() -> None:
    often = [Neighbour(KnownSetting("mnist", "iid", (), n, None, [Score("fedprox", 71, 70, "rerun", 1)]), 0.0)
             for n in (10, 20, 30)]  # fmt: skip
    neighbours = [*often, Neighbour(_setting(Score("fedvls", 78, 70, "rerun", 1)), 0.0)]
    table = LabelCounts(("a", "b"), ("0", "1"), np.eye(2, dtype=np.int64))
    text = " ".join(Diagnosis(table, neighbours).sentences())
    assert "No method that was rerun in 2 or more of them gained more than 2 points" in text
    assert "the most: fedprox, +1.0" in text


def test_each_source_is_listed_once(known: list[KnownSetting]) -> None:
    table = LabelCounts(("a", "b"), ("0", "1"), np.eye(2, dtype=np.int64))
    rows = Diagnosis(table, [Neighbour(setting, 0.0) for setting in known]).settings().rows
    for *_, sources in rows:
        tables = [source for source in str(sources).split(", ") if "/" in source]
        assert len(tables) == len(set(tables))


def test_results_of_reruns_are_found(tmp_path: Path) -> None:
    runs = [("fedavg", 0, 0.5), ("fedavg", 1, 0.9), ("fedvls", 0, 0.625)]  # fedvls has no partner for seed 1
    for method, seed, accuracy in runs:
        values = {"data": "cifar10", "method": method, "seed": seed, "rounds": 1}
        values |= {"partition.clients": 10, "partition.beta": 0.05}
        config = with_values(Config(), values)
        right = round(1000 * accuracy)
        evaluation = Evaluation(np.array([[right, 1000 - right], [0, 0]]))
        rows = [RoundRow(round=1, model_round=1, evaluation=evaluation, seconds=1.0, compute=1.0, visits=1)]
        RecordsFile(tmp_path / "r.jsonl").append(Record.from_rows(f"{method}{seed}", config, rows, {}))
    setting = next(s for s in known_settings(tmp_path) if s.label == "cifar10, dirichlet 0.05, 10 clients")
    (score,) = [s for s in setting.scores if s.method == "fedvls" and s.seeds]
    assert score.gain == pytest.approx(12.5)
    assert score.seeds == 1
    neighbours = [Neighbour(setting, 0.0)]
    table = LabelCounts(("a", "b"), ("0", "1"), np.eye(2, dtype=np.int64))
    (row,) = Diagnosis(table, neighbours).settings().rows
    assert row[3] == "rerun"
    assert "rerun: auto, 1 round of" in str(row[4])


def test_of_an_ablation_s_variants_the_one_that_was_run_most_counts(tmp_path: Path) -> None:
    for method, weight, seed, accuracy in [
        ("fedavg", None, 0, 0.5), ("fedavg", None, 1, 0.5),
        ("fedvls", 0.0, 0, 0.1), ("fedvls", 0.1, 0, 0.6), ("fedvls", 0.1, 1, 0.6),
    ]:  # fmt: skip
        values = {"data": "cifar10", "method": method, "seed": seed, "rounds": 1, "partition.clients": 7}
        config = with_values(Config(), values | ({} if weight is None else {"method.distill_weight": weight}))
        right = round(1000 * accuracy)
        evaluation = Evaluation(np.array([[right, 1000 - right], [0, 0]]))
        rows = [RoundRow(round=1, model_round=1, evaluation=evaluation, seconds=1.0, compute=1.0, visits=1)]
        RecordsFile(tmp_path / "r.jsonl").append(Record.from_rows(f"{method}{weight}{seed}", config, rows, {}))
    setting = next(s for s in known_settings(tmp_path) if s.clients == 7)
    assert {s.method: round(s.gain) for s in setting.scores} == {"fedvls": 10}


@pytest.mark.parametrize("classes", [3, 4, 11])
def test_a_start_for_counts_without_data_can_be_run(
    classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = counts("dirichlet", classes, clients=6, beta=0.3)
    header = ",".join(["site", *(f"illness {c}" for c in range(classes))])
    Path("sites.csv").write_text(
        "\n".join([header, *(f"town {k}," + ",".join(map(str, r)) for k, r in enumerate(rows))])
    )
    assert main(["diagnose", "sites.csv", "--save", "start.yaml", "-o", "page.html", "--json"]) == 0
    config = load_yaml("start.yaml")
    assert config.data == "synthetic"
    assert main(["run", "-c", "start.yaml", "--rounds", "1", "--local-epochs", "1", "-q", "--out", "run"]) == 0
    about = json.loads(Path("run/about.json").read_text())["federation"]
    assert about["classes"] == [f"illness {c}" for c in range(classes)]
    assert about["client_names"] == [f"town {k}" for k in range(6)]
    trained = np.array(about["label_counts"])
    assert ((trained > 0) == (rows > 0)).all()
    assert np.abs(trained / trained.sum() - rows / rows.sum()).max() < 0.01
    assert "Strong label skew" in Path("page.html").read_text(encoding="utf-8")


def test_the_command_tells_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    split = ["diagnose", "--beta", "0.05", "--clients", "10", "--seed", "3"]
    assert main([*split, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["next"] == "fedskew choose --beta 0.05 --clients 10 --seed 3 --budget 5m"
    assert len(told["clients"]) == 10
    assert main(split) == 0
    shown = capsys.readouterr().out
    assert f"Start with {told['method']}." in shown


def test_own_data_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sites.csv").write_text("client,1,0,2,3,4,5,6,7,8,9\nRome,9,8,7,6,5,4,3,2,1,1\nOslo,1,0,0,0,0,0,0,0,0,9\n")
    assert main(["diagnose", "sites.csv", "--data", "digits", "--save", "start.yaml"]) == 0
    assert main(["run", "-c", "start.yaml", "--rounds", "1", "--local-epochs", "1", "-q", "--out", "run"]) == 0
    about = json.loads(Path("run/about.json").read_text())
    assert about["federation"]["label_counts"][0][:3] == [8, 9, 7], "columns go by their names"


def test_counts_go_with_the_data_of_the_configuration_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sites.csv").write_text("client,1,0,2,3,4,5,6,7,8,9\nRome,9,8,7,6,5,4,3,2,1,1\nOslo,1,0,0,0,0,0,0,0,0,9\n")
    for content, data in (("data: digits\nlr: 0.5\n", "digits"), ("lr: 0.5\n", "synthetic")):
        Path("mine.yaml").write_text(content)
        assert main(["diagnose", "sites.csv", "-c", "mine.yaml", "--save", "start.yaml"]) == 0
        assert load_yaml("start.yaml").data == data
        capsys.readouterr()
        assert main(["diagnose", "sites.csv", "-c", "mine.yaml", "--json"]) == 0
        command = json.loads(capsys.readouterr().out)["next"]
        assert command.startswith("fedskew choose -c mine.yaml ")
        assert ("synthetic" in command) == (data == "synthetic")


def test_counts_replace_the_whole_split_of_the_configuration_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rule `counts` would refuse the number of clients of another rule."""
    monkeypatch.chdir(tmp_path)
    Path("my sites.csv").write_text("client,a,b\nRome,9,8\nOslo,1,0\n")
    Path("mine.yaml").write_text("partition: {rule: dirichlet, beta: 0.1, clients: 5}\n")
    assert main(["diagnose", "my sites.csv", "-c", "mine.yaml", "--json"]) == 0
    words = shlex.split(json.loads(capsys.readouterr().out)["next"])
    settings = words[words.index("-c") : words.index("--budget")]
    assert main(["partition", *settings]) == 0
    assert "Rome" in capsys.readouterr().out


def test_neighbours_come_by_distance_and_among_equals_by_likeness(known: list[KnownSetting]) -> None:
    found = nearest(Skew(np.array([[100, 0, 3], [0, 80, 0], [5, 5, 60]])), known)
    distances = [neighbour.distance for neighbour in found]
    assert distances == sorted(distances)
    equal = [neighbour.setting.clients for neighbour in found if neighbour.distance == distances[0]]
    assert equal == sorted(equal), "three clients are more like ten than like a hundred"


def test_settings_with_another_share_of_the_clients_in_a_round_tell_nothing() -> None:
    table = LabelCounts(tuple("abcde"), ("x", "y"), np.array([[9, 1]] * 5))
    few, all_ = (KnownSetting("digits", "iid", (), 20, part) for part in (4, None))
    skew = Skew(table.counts)
    assert [n.setting for n in nearest(skew, [few, all_], participation=0.2)] == [few]
    assert [n.setting for n in nearest(skew, [few, all_], participation=0.5)] == []
    assert [n.setting for n in nearest(skew, [few, all_], participation=1.0)] == [all_]
    assert len(nearest(skew, [few, all_])) == 2


def test_how_many_take_part_is_asked_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    split = ["diagnose", "--partition", "dirichlet", "--beta", "0.05", "--clients", "20"]
    assert main([*split, "--clients-per-round", "2", "--save", "start.yaml"]) == 0
    assert "2 of 20 clients" in " ".join(capsys.readouterr().out.split())
    assert load_yaml("start.yaml").clients_per_round == 2
    assert main(split) == 0
    assert "all clients" in " ".join(capsys.readouterr().out.split())
    assert main([*split, "--clients-per-round", "30"]) == 2
    assert "expected at most 20, the number of clients" in " ".join(capsys.readouterr().err.split())
    Path("sites.csv").write_text("5,1,2\n1,9,0\n")
    assert main(["diagnose", "sites.csv", "--clients-per-round", "3"]) == 2
    assert "expected at most 2, the number of clients" in " ".join(capsys.readouterr().err.split())


DIGITS = ["diagnose", "--data", "digits", "--beta", "0.1", "--clients", "20", "--json"]


def test_the_folder_plays_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    for folder in (tmp_path, ROOT):
        monkeypatch.chdir(folder)
        assert main(DIGITS) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]


def test_digits_agree_with_the_page_that_measures_them(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "where-it-helps.md").read_text(encoding="utf-8")
    assert main(DIGITS) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["method"] == "fedavgm", "with all clients in every round, the page says to start with FedAvgM"
    gains = {row["method"]: row["gain over FedAvg"] for row in told["methods"]}
    table = re.search(r"<!-- all -->(.*?)<!-- end -->", page, re.DOTALL)
    assert table is not None
    measured = {m: float(a) for m, a in re.findall(r"`([\w-]+)` \| ([\d.]+)", table[1])}
    for method in ("fedrs", "fedlmd", "fedvls"):
        assert measured[method] < measured["fedavg"]
        assert gains[method] < 0
    assert min(gains["fedrs"], gains["fedlmd"]) > gains["fedvls"]
    nearest_setting = told["settings"][0]
    assert (nearest_setting["setting"], nearest_setting["distance"]) == ("digits, dirichlet 0.1, 20 clients", 0)


def test_few_clients_per_round_find_the_map_s_gain(capsys: pytest.CaptureFixture[str]) -> None:
    split = ["diagnose", "--data", "digits", "--beta", "0.05", "--clients", "20", "--clients-per-round", "2", "--json"]
    assert main(split) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["method"] == "fedvls"
    assert told["methods"][0]["gain over FedAvg"] > 20
    assert all("per round" in row["setting"] for row in told["settings"]), "all clients are not near 2 of 20"
    gains = [row["gain over FedAvg"] for row in told["methods"]]
    assert gains == sorted(gains, reverse=True)


def test_notes_on_the_counts_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sites.csv").write_text("site;flu;cold;total\nRome;5.0;1;6\nOslo;1;9;10\n")
    assert main(["diagnose", "sites.csv"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "sites.csv: column 3 of the counts is the sum of the others and was left out" in shown
    assert "2 clients, 2 classes, 16 samples" in shown
    assert "fedskew choose --data synthetic --set data.classes=2 --partition counts" in shown


def test_samples_with_several_labels_are_noted() -> None:
    labels = np.random.default_rng(0).integers(0, 2, (60, 3))
    fed = fs.federation((np.random.default_rng(1).normal(size=(60, 4)), labels), fs.IID(clients=2), seed=0)
    sentences = list(Diagnosis.from_counts(federation_counts(fed)).sentences())
    assert "A sample counts once for each of its labels." in sentences[0]


def test_a_client_whose_samples_have_no_label_is_named() -> None:
    labels = np.array([[0, 0, 0]] * 30 + [[1, 1, 0]] * 30 + [[0, 1, 1]] * 30 + [[0, 0, 1]] * 30)
    values = np.random.default_rng(1).normal(size=(120, 4))
    fed = fs.federation((values, labels), fs.Shards(clients=4, shards=1), seed=0)
    with pytest.raises(UserError, match=r"no sample of client '\d' has a label"):
        federation_counts(fed)


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    (tmp_path / "search.jsonl").write_text('{"op_code": 0}\n', encoding="utf-8")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"no records in .*; expected .jsonl files of `fedskew reproduce`"):
            known_settings(folder)
