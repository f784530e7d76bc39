"""`fedskew compare`: run several methods on the same federations, or compare finished runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fedskew.cli.commands import (
    CONFIGURATION,
    FLAGS,
    TRAINING,
    Json,
    Live,
    Log,
    Quiet,
    RankBy,
    Settings,
    add_command,
    option,
    split_names,
    takes_settings,
)
from fedskew.cli.run import RUNS, seed_range
from fedskew.errors import UserError

if TYPE_CHECKING:
    from fedskew.experiment.config import Config

DEFAULT_METHODS = "fedavg,fedlmd,fedvls"
_ALL = "all"
METHOD_PREFIX = "method."
"""The dotted keys of method parameters start with this."""


def add_to(app: typer.Typer) -> None:
    add_command(
        app, "compare", _command,
        "fedskew compare --methods fedavg,fedlmd,fedvls --rounds 5 --lr 0.1",
        "fedskew compare --methods fedprox,fedvls+fedavgm --rounds 3 --seeds 2",
        "fedskew compare --methods fedlmd,fedntd --set method.beta=0.5 --rounds 3",
        "fedskew compare --methods fedprox,fedprox:mu=1 --rounds 3 --rank-by macro-f1",
    )  # fmt: skip


@takes_settings(name for name in FLAGS if name != "method")
def _command(
    settings: Settings,
    folders: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="compare these finished runs, simulated or federated, and run nothing",
                       show_default=False),
    ] = None,
    methods: Annotated[
        list[str] | None,
        option("--methods", "A,B:NAME=VALUE", "methods to compare, or the word all for every method that can run "
               "with this data and model; a method may be listed with "
               f"several settings; repeatable (default: {DEFAULT_METHODS})", TRAINING),
    ] = None,
    seeds: Annotated[
        str | None,
        option("--seeds", "N", "number of runs per method, with consecutive seeds from --seed (default: 1)", TRAINING),
    ] = None,
    out: Annotated[
        str, option("--out", "FOLDER", f"parent of the run folders (default: {RUNS})", CONFIGURATION)
    ] = RUNS,
    live: Live = False,
    log: Log = None,
    rank_by: RankBy = None,
    format: Annotated[
        str | None, option("--format", "KIND", "print only a table, as latex, markdown or csv", CONFIGURATION)
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Run several methods on the same federations and compare them. Finished runs are not repeated.

    --methods fedavg,fedvls,fedvls:distill_weight=0.5 compares FedAvg with two settings of FedVLS.
    --set method.NAME=VALUE applies to every method with that parameter, and --set method.fedvls.NAME=VALUE to FedVLS
    only. The YAML file may also list `methods` and set `seeds` and `rank_by`.
    """
    from fedskew.cli.running import Observers, print_comparison, run_all
    from fedskew.cli.terminal import notice
    from fedskew.experiment.compare import prepare_comparison
    from fedskew.results.checks import require_comparable, setting_differences
    from fedskew.results.folders import load_runs
    from fedskew.results.ranking import DEFAULT_METRIC, find_metric
    from fedskew.results.table import check_format

    if format is not None:
        if as_json:
            raise UserError("--json and --format both decide what is printed; expected one of them")
        check_format(format)
    if folders:
        if methods or seeds or settings.file or settings.values:
            raise UserError("finished runs are compared as they are; expected no settings besides the run folders")
        if live or log is not None or out != RUNS:
            raise UserError("finished runs are not run again; expected no --live, --log or --out besides them")
        loaded = load_runs(folders)
        compared = require_comparable(loaded.runs, find_metric(rank_by or DEFAULT_METRIC).name)
        print_comparison(compared, as_json, format)
        for line in [*loaded.unreadable, *setting_differences(loaded.runs)]:
            notice(line)
        return
    plan = read_plan(settings, methods, seeds, rank_by)
    if methods is None and settings.sets("method") and not settings.sets("methods"):
        notice(
            f"{settings.file} sets method {plan.base.method}, but compare uses --methods (default: {DEFAULT_METHODS})"
        )
    fitting = _leave_out_unfit(plan) if plan.takes_all else plan.methods
    runs = prepare_comparison(plan.base, fitting, plan.seeds)
    comparison = run_all(runs, Path(out), as_json or quiet, Observers(live, log, plan.rank_by))
    print_comparison(comparison, as_json, format)


class ComparisonPlan(NamedTuple):
    """The configurations to compare."""

    base: Config
    methods: list[Config]
    """One configuration per method. Each is `base` with that method."""
    seeds: list[int]
    rank_by: str
    takes_all: bool
    """Whether the user asked for all methods."""


def read_plan(
    settings: Settings, methods: Sequence[str] | None = None, seeds: str | None = None, rank_by: str | None = None
) -> ComparisonPlan:
    """Read the file and the flags. The flags override the file."""
    from fedskew.experiment.config import Config, with_values
    from fedskew.experiment.config.values import read_yaml
    from fedskew.results.ranking import DEFAULT_METRIC, find_metric

    content = read_yaml(settings.file) if settings.file else {}
    keys: dict[str, Any] = dict(content) if isinstance(content, Mapping) else {}
    listed = keys.pop("methods", None) if methods is None else ",".join(methods)
    seed_count = keys.pop("seeds", None) if seeds is None else seeds
    named = rank_by or keys.get("rank_by")
    metric = find_metric(DEFAULT_METRIC if named is None else named)
    keys = {key: value for key, value in keys.items() if key not in ("methods", "seeds", "rank_by")}
    if content is not None and not isinstance(content, Mapping):
        raise UserError(f"{settings.file}: expected a mapping of keys to values")
    try:
        file_config = Config.from_mapping(keys)
    except UserError as error:
        raise UserError(f"{settings.file}: {error}") from error
    if "method" in settings.values:
        raise UserError("compare takes several methods; expected --methods a,b,c instead of method")
    params = {key: value for key, value in settings.values.items() if key.startswith(METHOD_PREFIX)}
    base = with_values(file_config, {key: value for key, value in settings.values.items() if key not in params})
    chosen = [
        with_values(base, {"method": method}) for method in _read_methods(DEFAULT_METHODS if listed is None else listed)
    ]
    return ComparisonPlan(
        base,
        _refuse_duplicates(_with_parameters(chosen, params)),
        seed_range(base, seed_count),
        metric.name,
        takes_all=listed == _ALL,
    )


def _leave_out_unfit(plan: ComparisonPlan) -> list[Config]:
    """Return the methods that can run with this data and model. Print why the others cannot."""
    from fedskew.cli.terminal import notice
    from fedskew.experiment.preparation import build_federation, prepare

    base = replace(plan.base, seed=plan.seeds[0])
    federation, fitting = build_federation(base), []
    for config in plan.methods:
        try:
            prepare(replace(config, seed=base.seed), federation)
        except UserError as error:
            notice(f"{config.method} is left out: {error}")
        else:
            fitting.append(config)
    if not fitting:
        raise UserError("no method can run with this data and model; the lines above say why")
    return fitting


def _read_methods(methods: object) -> Sequence[Any]:
    """Read methods from text, such as `a,b:NAME=VALUE`, or from a list.

    An item of the list may be text or a mapping, such as {name: fedvls, distill_weight: 0.5}.
    """
    from fedskew.experiment.config import parse_method
    from fedskew.methods import METHODS

    if methods == _ALL:
        return sorted(METHODS)
    if isinstance(methods, str):
        methods = split_names(methods)
    if not isinstance(methods, list) or not methods:
        raise UserError(f"methods is {methods!r}; expected names of methods, such as fedavg,fedvls, or the word all")
    return [parse_method(method) if isinstance(method, str) else method for method in methods]


def _refuse_duplicates(methods: list[Config]) -> list[Config]:
    """Return the methods. Refuse a method that is listed twice with the same settings: its rows would be equal."""
    from fedskew.methods import make_method

    complete = [make_method(config.method, config.method_params) for config in methods]  # with all defaults
    for i, method in enumerate(complete):
        if any((other.name, other.params) == (method.name, method.params) for other in complete[:i]):
            example = next((f"{method.name}:{name}=VALUE" for name in method.params), None)
            other = "" if example is None else f", or with different settings, such as {example}"
            raise UserError(f"method {method.name!r} is listed twice with the same settings; expected it once{other}")
    return methods


def _with_parameters(methods: list[Config], params: Mapping[str, Any]) -> list[Config]:
    """Set each parameter on the methods that have it. Refuse a parameter that no method has."""
    from fedskew.experiment.config import with_values
    from fedskew.methods import make_method

    for key in params:
        if not any(_has_parameter(config, key) for config in methods):
            known = sorted({name for config in methods for name in make_method(config.method).params})
            names = ", ".join(config.method for config in methods)
            found = f"they have: {', '.join(known)}" if known else "they have no parameters"
            raise UserError(f"none of {names} has a parameter {key.removeprefix(METHOD_PREFIX)!r}; {found}")
    return [
        with_values(config, {key: value for key, value in params.items() if _has_parameter(config, key)})
        for config in methods
    ]


def _has_parameter(config: Config, key: str) -> bool:
    from fedskew.methods.composition import has_parameter

    return has_parameter(config.method, key.removeprefix(METHOD_PREFIX))
