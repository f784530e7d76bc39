"""The catalogue: names, patterns, and whether a round sends and costs what its entry declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import pytest
from linear_clients import Recording, federation, played, serve
from toy_runs import use_engine

from fedskew.errors import UserError
from fedskew.methods import METHODS, Objective, Part, Schedule, Solver, find, make_method, matching_entries, register
from fedskew.methods.catalogue import _ALIASES
from fedskew.methods.parts import data_pass_cost
from fedskew.methods.stages import Calibration

every_method = pytest.mark.parametrize("name", METHODS)


def test_the_methods_of_the_papers_are_in_the_catalogue() -> None:
    """Every column of their tables, the bounds, and the usual robust server rules."""
    own = "fedvls feded fedlmd fedlmd-tf fedlmd-switch fedgr fedgr-client fedgr-server pkd"
    objectives = (
        "moon fedkd fedavg-kd fedekd feddkd fedntd fedntd-tf fedlc fedlf fedrs balancefl label-smoothing focal-loss "
        "weighted-ce logit-adjustment"
    )
    regularisers = "fedmr fedmr-inter fpl feddecorr"
    solvers = "fedsam mofedsam fedgf scaffold feddyn fedcurv fedprox perfedavg pfedme"
    servers = "fedavg fedavgm fedadagrad fedyogi fedadam fednova fedexp fedgc fedconcat"
    robust, bounds = "median trimmed-mean norm-clipping", "centralised local-only"
    for name in " ".join([own, objectives, regularisers, solvers, servers, robust, bounds]).split():
        assert find(name).name in METHODS


@every_method
def test_an_entry_says_where_it_comes_from_and_what_it_is(name: str) -> None:
    entry = find(name)
    assert entry.paper
    assert entry.summary.endswith(".")
    for heading in ("Sent to the server: ", "Extra compute: "):
        assert heading in " ".join(entry.document.split())
    assert "\n    " in entry.document, "no formula"
    for part in entry.parts:
        assert part.__doc__
        assert isinstance(part(), Part)


@every_method
def test_the_docstring_says_that_numbers_of_samples_leave_a_client(name: str) -> None:
    entry = find(name)
    sent = " ".join(entry.document.partition("Sent to the server: ")[2].split())
    assert "sample count" not in entry.sends or "samples" in sent or "label counts" in sent


@every_method
def test_every_hyper_parameter_has_a_default_that_is_accepted_back(name: str) -> None:
    method = make_method(name)
    assert make_method(name, method.params) == method
    assert len(method.params) == sum(len(fields(part)) for part in find(name).parts)


BYTES: dict[str, Callable[[int, int], int]] = {
    "": lambda model, classes: 0,
    "label presence": lambda model, classes: classes,
    "label counts": lambda model, classes: 8 * classes,
    "control variate (the size of one model)": lambda model, classes: model,
    "dual variable (the size of one model)": lambda model, classes: model,
    "local steps (one number)": lambda model, classes: 8,
    "distance of the label distribution (one number)": lambda model, classes: 8,
    "change of Fisher information (the size of two models)": lambda model, classes: 2 * model,
    "mean feature of each class": lambda model, classes: model - 8 * classes + classes,  # no biases; flags
    "normalised mean feature and number of samples per class": lambda model, classes: (
        model - 8 + 8 * classes  # no scale; counts
    ),
    "sum of the features and number of samples per class, once": lambda model, classes: model,
    "Gram matrix of the features and sum of the features per class, once": lambda model, classes: (
        model + 8 * (model // classes // 8) ** 2
    ),
    "least-squares head and Gram matrix of the features, once": lambda model, classes: (
        model - 8 * classes + 8 * (model // classes // 8 - 1) ** 2
    ),
    "number, mean and covariance of the features per class, once": lambda model, classes: (
        model + 8 * classes * (model // classes // 8 - 1) ** 2
    ),
    "gradient of the second head for each class of the client": lambda model, classes: (
        classes * model // 2 + classes  # a model of two heads; flags
    ),
    "label counts once": lambda model, classes: 0,  # the same
    "all its samples": lambda model, classes: 0,  # not part of a round, either: there is no client
    "label counts and class-to-class mean probabilities once, numbers of distilled samples": lambda model, classes: (
        0  # not part of the uplink of a round: see the survey and the tally
    ),
}


@every_method
def test_what_leaves_a_client_is_what_the_entry_declares(name: str) -> None:
    fed = federation()
    server = serve(name, federation=fed)
    recording = use_engine(server, Recording(server.engine))
    states, _ = played(server)
    params = states[0].model.params
    model_bytes = sum(p.numel() * p.element_size() for p in params.values())
    declared = sum(BYTES[part.sends](model_bytes, fed.classes) for part in find(name).parts)
    for work, result in recording.results:
        clients = len(work.assignments)
        if work.personal_names:  # one phase of the training: what leaves then is in test_personal.py
            continue
        sent = sum(t.numel() * t.element_size() for t in result.uplink.values())
        silent = work.local.epochs > 0 and any(issubclass(part, Calibration) for part in find(name).parts)
        assert sent == (0 if silent else clients * declared)
        came_back = {k: v.shape[1:] for k, v in result.trained.params.items()}
        assert came_back == {k: v.shape for k, v in work.sent.params.items()}


@every_method
def test_what_the_server_learns_of_labels_is_what_the_entry_declares(name: str) -> None:
    server = serve(name)
    surveyed = any(stage.survey for stage in server._stages.known(server.start()))
    recording = use_engine(server, Recording(server.engine))
    played(server)
    uplinks = {key for _, result in recording.results for key in result.uplink}
    pooled = any(stage.cohort == "pooled" for stage in server._stages.known(server.start()))
    told = {
        "label_counts": "label counts",
        "label_presence": "label presence",
        "prototypes": "label presence, prototypes",
        "label_distance": "label skew",
        "class_counts": "label counts, prototypes",
        "class_gradients": "label presence, prototypes",
        "covariances": "label counts, prototypes, feature covariance",
        "gram": "label counts, prototypes, feature covariance",
        "regularised_gram": "label counts, prototypes, feature covariance",
    }
    sent = next((told[key] for key in uplinks if key in told), "nothing")
    learned = "all labels" if pooled else "label counts" if surveyed else sent
    assert find(name).reveals == learned


def test_the_label_presence_that_is_sent_is_the_clients() -> None:
    fed = federation()
    server = serve("fedgr", federation=fed, rounds=1)
    recording = use_engine(server, Recording(server.engine))
    played(server)
    assert recording.results[0][1].uplink["label_presence"].tolist() == (fed.label_counts > 0).tolist()


PASSES = {1 / 3: "1 forward of each sample per round", 1.0: "1 forward and backward of each sample per round"}


@every_method
def test_extra_compute_counts_the_forward_passes(name: str) -> None:
    entry = find(name)
    objectives = [part() for part in entry.parts if issubclass(part, Objective)]
    over_data = data_pass_cost([part() for part in entry.parts])
    if over_data and entry.kinds == ("calibration",):
        assert entry.extra_compute == "1 forward of each sample in the last round"
    elif over_data:
        assert entry.extra_compute == PASSES[over_data]
    elif objectives:
        passes = len(objectives[0].companions())
        more = sum(part().gradients() - 1 for part in entry.parts if issubclass(part, Solver))
        stepping = ", 1 forward and backward" if more else ""
        assert entry.extra_compute == ("none", "1 teacher forward", "2 teacher forwards")[passes] + stepping
        assert objectives[0].extra_forwards(10, {}) == 10 * passes
    elif entry.stands_alone:
        assert entry.extra_compute == "none"
    elif (personal := make_method(name).personal) is not None:
        more_epochs = [phase.epochs for phase in (*personal.phases(), personal.fine_tuning()) if phase and phase.epochs]
        second = ["local training of a second model per round"] if personal.own_solver() else []
        assert [word for word in entry.extra_compute.split() if word.isdigit()] == [str(n) for n in more_epochs]
        assert more_epochs or entry.extra_compute == (second or ["none"])[0]
        if personal.fine_tuning() is not None:
            assert entry.extra_compute.endswith("after the last round")
        elif entry.extra_compute != "none":
            assert entry.extra_compute.endswith("per round")
    elif any(issubclass(part, Schedule) for part in entry.parts):
        assert "forward" in entry.extra_compute
    else:
        more = sum(part().gradients() - 1 for part in entry.parts if issubclass(part, Solver))
        several = f"{more} forwards and backwards"
        assert entry.extra_compute == {0: "none", 1: "1 forward and backward"}.get(more, several)


def test_an_alias_is_the_method() -> None:
    assert find("feded") is find("fedvls") is find(" FedVLS ")
    assert make_method("feded") == make_method("fedvls")


def test_patterns_match_names_and_aliases() -> None:
    assert [entry.name for entry in matching_entries("fedlmd*")] == ["fedlmd", "fedlmd-switch", "fedlmd-tf"]
    assert [entry.name for entry in matching_entries("FedED")] == ["fedvls"]
    assert [entry.name for entry in matching_entries()] == sorted(METHODS)
    assert matching_entries("zzz*") == []


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown method 'fedprx'; did you mean 'fedprox'\? choose from: "):
        find("fedprx")
    with pytest.raises(UserError, match=r"; a method of your own needs its module: my_module:mine$"):
        find("mine")


@pytest.mark.parametrize("name", ["fedavg", "feded"])
def test_a_name_that_is_taken_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name!r} is already used"):
        register(name, parts=(), paper="-", summary="-")


@pytest.mark.parametrize("name", ["MyMethod", "my+method", "", " mine"])
def test_a_name_that_could_never_be_found_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="expected lower-case text without spaces at its ends and without"):
        register(name, parts=(), paper="-", summary="-")
    assert name not in METHODS
    assert name not in _ALIASES


def test_a_part_that_is_no_known_kind_is_refused() -> None:
    @dataclass(frozen=True)
    class Loose(Part):
        pass

    with pytest.raises(UserError, match="Loose is not a part of a method"):
        make_method(Loose())


@pytest.mark.parametrize(
    ("method", "visits"),
    [
        ("fedavg", 0),
        ("balancefl", 1 / 3),
        ("fpl", 1 / 3),
        ("fedcurv", 1),
        ("balancefl+fpl", 2 / 3),
        ("fpl+fedcurv", 1),  # one pass for both
        ("balancefl+fpl+fedcurv", 4 / 3),
    ],
)
def test_parts_share_a_pass_but_opening_and_closing_do_not(method: str, visits: float) -> None:
    assert data_pass_cost(make_method(method).members) == pytest.approx(visits)
