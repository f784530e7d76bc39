"""`fedskew.choose`: find the best method for a federation by racing methods on it."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from html import escape
from numbers import Integral
from os import PathLike
from pathlib import Path
from shlex import join, quote
from typing import Any

import yaml

from fedskew.choose.budget import Budget, Costs, choose_plan, rung_ends
from fedskew.choose.field import are_known_everywhere, field_methods
from fedskew.choose.progress import showing_race
from fedskew.choose.race import Race
from fedskew.choose.trial import RACE_METRICS, MakeFederation
from fedskew.choose.trials import RaceWatcher, Trials
from fedskew.choose.validation import hold_out, validation_fraction
from fedskew.data import Federation, Partition, federation
from fedskew.data.catalogue import DATASETS
from fedskew.display import html_table
from fedskew.errors import UserError, expect
from fedskew.experiment.config import Config, PartitionConfig, config_hash, run_name, with_values
from fedskew.experiment.config.documentation import documents_settings
from fedskew.experiment.config.values import folder as require_folder
from fedskew.experiment.preparation import partition_rule, prepare, refuse_data_settings, refuse_other_split
from fedskew.experiment.shared_federations import shared_federation
from fedskew.experiment.storage.files import FolderLock, reporting_os_errors, write_file
from fedskew.results.race import RaceRecord, load_race
from fedskew.results.ranking import DEFAULT_METRIC, find_metric
from fedskew.workers import default_workers

RUN_FILE, FEDERATION_FILE = "chosen.yaml", "federation.yaml"
DEFAULT_BUDGET = "5m"
_FEDERATED = (
    "data", "data_dir", "task", "model", "head", "init", "train", "lora_rank", "lora_alpha", "lora_targets", "rounds",
    "clients_per_round", "local_epochs", "batch_size", "lr_decay", "optimizer", "momentum", "weight_decay", "clip_norm",
    "example_clip", "example_noise", "class_weights", "batches", "average", "augment", "seed", "positive",
    "specificity", "mean_last",
)  # fmt: skip
"""Keys of the chosen configuration that `federation.yaml` also has, besides the method and its learning rate."""
_WITH_EXAMPLE_NOISE = (
    "privacy=example", "attempts=1", "share_loss=false", "site_metrics=none", "evaluation=server",
)  # fmt: skip
"""Settings that `fedskew federate init` requires if `example_noise` is set, besides test data for the server."""


@dataclass(frozen=True)
class Choice:
    """The result of a race, and the configuration files for the chosen method."""

    race: RaceRecord
    folder: Path

    @property
    def config(self) -> Config:
        """The configuration of a run with the chosen method, its settings and its learning rate."""
        winner = self.race.winner.standing
        method = {"name": winner.method, **winner.params}
        return with_values(Config.from_mapping(self.race.config), {"method": method, "lr": winner.lr})

    @property
    def method(self) -> str:
        return self.race.winner.standing.method

    @property
    def answer(self) -> tuple[str, ...]:
        """The answer in sentences: the chosen method and the alternatives.

        Unless FedAvg is chosen, also the lead over FedAvg, and what the method costs and reveals.
        """
        return self.race.answer

    @property
    def run_file(self) -> Path:
        """The configuration for `fedskew run -c`."""
        return self.folder / RUN_FILE

    @property
    def federation_file(self) -> Path:
        """The configuration for `fedskew federate init -c`."""
        return self.folder / FEDERATION_FILE

    def federate_command(self, app: str | Path) -> str:
        """Return the command that makes the app of a federation from `federation_file`, in the folder `app`."""
        config = self.config
        source = json.dumps({"name": config.data, **config.data_params}) if config.data_params else config.data
        settings = () if config.example_noise is None else (*_WITH_EXAMPLE_NOISE, f"test_data={source}")
        flags = [word for setting in settings for word in ("--federation", setting)]
        return join(
            ["fedskew", "federate", "init", str(app), "--sites", "A,B,C", "-c", str(self.federation_file), *flags]
        )

    def to_json(self) -> dict[str, Any]:
        files = {"run": str(self.run_file), "federation": str(self.federation_file)}
        return {**self.race.to_json(), "folder": str(self.folder), "files": files}

    def __repr__(self) -> str:
        return f"<Choice: {' '.join(self.answer)}>"

    def _repr_html_(self) -> str:
        """Show the answer and the final in a notebook."""
        records = [
            {
                "method": finalist.standing.label,
                "learning rate": finalist.standing.lr,
                "mean %": f"{100 * finalist.overall:.1f}",
                "over FedAvg, points": None if (lead := finalist.difference) is None else f"{100 * lead.mean:+.1f}",
                "compute": f"×{finalist.compute:.2f}",
                "traffic": f"×{finalist.traffic:.2f}",
                "reveals": finalist.reveals,
            }
            for finalist in self.race.final
        ]
        answer = "".join(f"<p>{escape(line)}</p>" for line in self.answer)
        return html_table(records, f"Final, by {self.race.rank_by} on validation data") + answer


@documents_settings("eval_every", "eval_local")
def choose(
    data: object = None,
    methods: Iterable[str] | None = None,
    budget: str = DEFAULT_BUDGET,
    *,
    partition: Partition | None = None,
    rank_by: str = DEFAULT_METRIC,
    config: Config | None = None,
    out: str | Path | None = None,
    workers: int | None = None,
    watcher: RaceWatcher | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Choice:
    """Race methods on a federation and choose one. `settings` are configuration keys such as `rounds`, listed below.

    data: a federation, or data as for `load`, which `partition` then splits. The default is the data of `config`.
    methods: names of methods. By default, a list of 14 is raced. FedAvg always takes part.
    budget: a time such as `5m`, or a total number of rounds over all runs, such as `2000r`.
    partition: the rule that splits `data`. The default is the partition of `config`.
    rank_by: the metric that decides which method is best: accuracy, macro-f1, worst-class or balanced-accuracy.
    config: a `Config`, whose values the settings override. Its method is ignored. If `data` is a federation, the data,
        the seed and the partition of the `Config` are ignored, too, except `partition.seed`, which must be None or
        the federation's seed.
    out: the folder of the race. The same call continues an interrupted race there.
    workers: the number of processes that run trials. This process runs all trials if only your program knows a method,
        the model or the partition rule, or if `data` is a Python object that a configuration cannot describe. A
        configuration can describe, for example, a `Federation` of a dataset in the catalogue.
    watcher: an object that receives the progress of the race. It replaces the display.
    progress: whether to show the standings of the race. None shows them in a notebook and in a terminal, True always,
        False never.

    Methods are compared on validation data, which are held out of the clients' training data. Each trial seed has its
    own validation samples. It also has its own split, unless the split is fixed: by `partition.seed`, or by a rule that
    draws nothing, such as `column`. The first seed is `seed`. If `data` is a federation, its seed is the default. The
    race tries 1/3, 1 and 3 times the learning rate.
    """
    refuse_data_settings(settings, data, partition)
    for key, value in settings.items():
        if key.partition(".")[0] == "method":
            raise UserError(f"{key} is {value!r}; expected methods= in a race")
    if config is not None and not isinstance(config, Config):
        raise UserError(f"config is {config!r}; expected a fedskew.Config")
    valid = workers is None or (isinstance(workers, Integral) and not isinstance(workers, bool) and workers >= 1)
    expect(valid, "workers", workers, "a whole number ≥ 1")
    folder = None if out in (None, "") else require_folder("out", out)
    default_seed = {"seed": data.seed} if isinstance(data, Federation) else {}
    given = with_values(config or Config(), {**default_seed, **settings})
    base, make_federation = _base_and_federation(data, partition, given)
    limit = Budget.parse(budget)
    metric = _race_metric(rank_by)
    field = field_methods(methods)
    if limit.unit == "rounds":
        choose_plan(limit, Costs.counted(field), field, base.lr, base.rounds, 1)  # refuses a budget that is too small
    with contextlib.nullcontext(watcher) if watcher else showing_race(progress, base, metric) as shown:
        return _race(base, make_federation, field, metric, budget, folder, workers, shown)


def _race_metric(rank_by: str) -> str:
    """Return the metric's name. Raise `UserError` if a race does not record this metric at every evaluation."""
    metric = find_metric(rank_by, RACE_METRICS)
    if metric.name not in RACE_METRICS:
        reason = "a race does not record" if metric.score is None else "is known only after the last round"
        raise UserError(f"rank_by is {rank_by!r}, which {reason}; expected {', '.join(RACE_METRICS)}")
    return metric.name


def _race(
    base: Config,
    make_federation: MakeFederation,
    field: tuple[str, ...],
    metric: str,
    budget: str,
    out: Path | None,
    workers: int | None,
    watcher: RaceWatcher,
) -> Choice:
    federation = make_federation(base)
    if federation.dataset.task.name == "multi-label":
        raise UserError(
            f"{federation.dataset.name!r} has several labels per sample, but a race needs exactly one; "
            "use `fedskew compare` with methods that support several labels"
        )
    for note in federation.notes:
        watcher.on_notice(note)
    fraction = validation_fraction(int(federation.sizes.sum()))
    # Preparing refuses wrong settings before any folder is made.
    prepared = prepare(base, hold_out(federation, fraction, base.seed))
    base = replace(base, class_weights=prepared.config.class_weights)  # the weights themselves, not a file's path
    folder = out or Path("runs") / _name(base, field)
    with _locked(folder):
        record = _record_so_far(folder, base, field, metric, budget)
        if record.finished:
            watcher.on_notice(f"{folder} is already finished; nothing was run")
        else:
            in_workers = make_federation is shared_federation and _workers_find(base, field)
            processes = (workers or default_workers(base.device, len(field))) if in_workers else 1
            trials = Trials(_trial_config(base), fraction, folder, processes, watcher, make_federation)
            with contextlib.closing(trials):
                record = Race(base, record, Budget.parse(budget), folder, trials, processes, watcher).run()
        choice = Choice(record, folder)
        _write_files(choice)
    return choice


def _workers_find(base: Config, methods: tuple[str, ...]) -> bool:
    """Whether worker processes find the methods, the model and the partition rule.

    They do not find what a script or a notebook defines (in `__main__`), or what the user's program registers.
    """
    names = [base.model, base.partition.rule, *(single for name in methods for single in name.split("+"))]
    return are_known_everywhere(methods) and not any(name.startswith("__main__:") for name in names)


def _base_and_federation(data: object, partition: Partition | None, config: Config) -> tuple[Config, MakeFederation]:
    """Return the configuration that all candidates share, and the function that makes the federation of a trial."""
    config = replace(config, method="fedavg", method_params={})
    if config.data_dir is not None:  # a worker process may have another current folder
        config = replace(config, data_dir=str(Path(config.data_dir).expanduser().absolute()))
    if isinstance(data, Federation):
        if partition is not None:
            raise UserError("partition is given, but the federation is already split; pass its dataset instead")
        refuse_other_split(config, data)
        return _from_federation(data, config)
    if partition is not None:
        config = replace(config, partition=_partition_config(partition.describe(), config.partition.seed))
    if data is None or isinstance(data, str | PathLike):
        return config if data is None else with_values(config, {"data": str(data)}), shared_federation
    return _from_federation(federation(data, partition_rule(config), config.partition_seed), config)


def _from_federation(whole: Federation, config: Config) -> tuple[Config, MakeFederation]:
    """Return what `_base_and_federation` returns, for a federation object.

    If a configuration alone gives the same federation, worker processes can make it.
    """
    dataset = whole.dataset
    name, params = str(dataset.described["name"]), {k: v for k, v in dataset.described.items() if k != "name"}
    described = replace(
        config,
        data=name,
        data_params=dict(dataset.in_memory) or params,
        partition=_partition_config(whole.partition, config.partition.seed),
    )
    if dataset.name in DATASETS and not dataset.in_memory:
        with contextlib.suppress(UserError):
            if shared_federation(replace(described, seed=whole.seed)).hash == whole.hash:
                return described, shared_federation
    return described, lambda trial_config: whole.resplit(trial_config.partition_seed)


def _partition_config(rule: Mapping[str, object], seed: int | None) -> PartitionConfig:
    params = {key: value for key, value in rule.items() if key not in ("name", "clients")}
    clients = rule.get("clients")
    return PartitionConfig(str(rule["name"]), clients if isinstance(clients, int) else None, seed, params)


def _trial_config(base: Config) -> Config:
    """Return the configuration of trials. They compile only if the user asks for it, because most trials are short."""
    every = rung_ends(base.rounds)[0]
    compiled = "never" if base.compile == "auto" else base.compile
    return replace(base, eval_every=1, eval_local=False, checkpoint_every=every, compile=compiled)


def _name(base: Config, methods: tuple[str, ...]) -> str:
    """Return a readable folder name. The same federation, settings and methods give the same name."""
    text = json.dumps([config_hash(base), methods])
    return f"choose-{run_name(base).rsplit('-', 1)[0]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


@contextlib.contextmanager
def _locked(folder: Path) -> Any:
    with reporting_os_errors("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder / ".lock")
    try:
        yield
    finally:
        lock.release()


def _record_so_far(folder: Path, base: Config, methods: tuple[str, ...], rank_by: str, budget: str) -> RaceRecord:
    """Return the record in the folder, or a new one if there is none or if the budget, methods or metric changed."""
    new = RaceRecord(base.to_mapping(), methods, rank_by, budget)
    before = load_race(folder)
    if before is None:
        return new
    if before.config != new.config:
        raise UserError(
            f"{folder} holds a race on another federation, or with other settings; "
            "choose another --out, or delete that folder"
        )
    same_field = {*before.methods, *(before.failures or ())} == set(methods)
    return before if same_field and (before.rank_by, before.budget) == (rank_by, budget) else new


def _write_files(choice: Choice) -> None:
    config, folder = choice.config, choice.folder
    _write_yaml(choice.run_file, f"fedskew run -c {quote(str(choice.run_file))}", config.to_mapping(), choice.answer)
    mapping = config.to_mapping()
    federated = {key: mapping[key] for key in _FEDERATED} | {"method": mapping["method"], "lr": mapping["lr"]}
    _write_yaml(choice.federation_file, choice.federate_command(folder / "app"), federated, choice.answer)


def _write_yaml(path: Path, command: str, mapping: Mapping[str, Any], answer: Iterable[str]) -> None:
    comments = "".join(f"# {line}\n" for line in (command, *answer))
    write_file(path, comments + yaml.safe_dump(dict(mapping), sort_keys=False, allow_unicode=True))
