"""The measurements of a benchmark, most important first. When the time is up, the rest are skipped (see `Plan.budget`).

A contender is one implementation to be timed: an engine of fedskew, or a reference such as the plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fedskew.lab.benchmark.cases import METHODS, PRECISIONS, Case, Workload
from fedskew.lab.benchmark.commands import START_UP, Command
from fedskew.lab.benchmark.engines import FedskewEngine
from fedskew.lab.benchmark.limit import Limit
from fedskew.lab.benchmark.loop import LoopRounds, LoopSteps
from fedskew.lab.benchmark.results import BARE, LEVELS, LIMIT, LOOP, TUNED_LOOP, Level
from fedskew.lab.benchmark.targets import MIN_OVER_LOOP
from fedskew.lab.benchmark.timing import Contender, Ready, TimingLength
from fedskew.lab.benchmark.whole_runs import whole_runs

SCALING_CLIENTS = 10
"""Participants per round in the measurements by federation size."""

LARGE = ("mobilenetv2", "resnet18")
"""Models that take minutes to compile and need much memory."""
_MAX_CLIENTS_TOGETHER = 10
"""With more clients per round, a device cannot hold all contenders of a large model together."""


@dataclass(frozen=True)
class Plan:
    """What to measure on a device, and for how long."""

    device: str
    models: tuple[str, ...]
    clients: tuple[int, ...]
    """Clients per round."""
    methods: tuple[str, ...]
    precisions: tuple[str, ...]
    engines: tuple[str, ...]
    """Engines to measure. Whole rounds are measured with the first only."""
    workload: Workload
    length: TimingLength
    budget: float
    """Seconds after which no new group or contender starts. The levels `peers` and `scale` run last, even after it."""
    federations: tuple[int, ...] = (100, 1_000, 10_000, 100_000)
    """Clients of the federations for the measurements by federation size."""
    participants: tuple[int, ...] = (1, 10, 50, 100, 500)
    """Clients per round for the measurements by number of participants."""
    levels: tuple[str, ...] = LEVELS
    """What to measure: names from `LEVELS`, `peers` (a JAX script), or `scale` (a federation of many clients)."""
    scale_clients: int = 1_000_000
    """Clients of the federation of the level `scale`."""
    compiled_limit: bool = True
    """Whether to compile the one model whose training speed is the device's practical limit (see `limit.py`)."""
    is_quick: bool = False
    """Whether this is a smoke test."""

    @property
    def kind(self) -> str:
        return "cuda" if self.device.startswith("cuda") else "cpu"


def default_plan(device: str) -> Plan:
    """The default plan for a device."""
    if device.startswith("cuda"):
        return Plan(
            device=device,
            models=("cnn", "dnn", "mobilenetv2", "resnet18"),
            clients=(10, 100),
            methods=METHODS,
            precisions=PRECISIONS,
            engines=("stacked",),
            workload=Workload(batches=10, epochs=5, tests=10_000),
            length=TimingLength(repetitions=7, seconds=0.1),
            budget=420,
        )
    return Plan(
        device=device,
        models=("dnn", "lenet5", "cnn"),
        clients=(10,),
        methods=METHODS,
        precisions=("float32",),
        engines=("auto", "stacked", "plain"),
        workload=Workload(batches=4, epochs=5, tests=500),
        length=TimingLength(repetitions=5, seconds=0.3),
        budget=600,
    )


def quick_plan(device: str) -> Plan:
    """A smoke test. Its numbers are too noisy to use."""
    plan = default_plan(device)
    return replace(
        plan,
        models=("dnn",),
        clients=(plan.clients[0],),
        precisions=plan.precisions[:1],
        workload=Workload(batches=2, epochs=1, tests=100),
        length=TimingLength(repetitions=3, seconds=0.02, warm_up=1),
        budget=40,
        federations=(100, 1_000),
        participants=(1, 10),
        levels=tuple(level for level in LEVELS if level not in ("start-up", "whole-runs")),  # they take too long
        compiled_limit=False,
        scale_clients=2_000,
        is_quick=True,
    )


@dataclass(frozen=True)
class Group:
    """Contenders to compare with each other, or commands to time."""

    title: str
    contenders: tuple[Contender, ...] = ()
    commands: tuple[Command, ...] = ()
    fill_caches: tuple[Command, ...] = ()
    """Commands that run first, untimed, to fill caches. If there are any, each of `commands` is timed only once,
    because it takes long."""
    interleaved: bool = True
    """Whether contenders are timed alternately. Large ones are timed one after another, because the device cannot hold
    them together."""


def groups(plan: Plan) -> list[Group]:
    """List the requested groups, most important first."""
    ranked = [(rank, group) for rank, group in _ranked(plan) if group.contenders or group.commands]
    return [group for _, group in sorted(ranked, key=lambda pair: pair[0])]


def _ranked(plan: Plan) -> Iterator[tuple[int, Group]]:
    """Yield the groups, each with its rank. Groups with a low rank are more important."""
    first = plan.precisions[0]
    for clients in plan.clients:
        for model in plan.models:
            case = Case(model, clients, plan.workload, plan.device, precision=first)
            # Cases with a target against the loop come first.
            case_rank = 0 if (model, clients) in MIN_OVER_LOOP[plan.kind] else 4
            if "steps" in plan.levels:
                for method in plan.methods:
                    yield case_rank if method == "fedavg" else 7, _steps(plan, replace(case, method=method))
            if "rounds" in plan.levels:
                for precision in plan.precisions:
                    rank = case_rank + 1 if precision == first else 6
                    yield rank, _rounds(plan, replace(case, precision=precision))
    if "federation" in plan.levels:
        yield 2, _federations(plan)
    if "participants" in plan.levels:
        yield 3, _participants(plan)
    if "start-up" in plan.levels:
        yield 2, Group("start-up of commands", commands=START_UP)
    if "whole-runs" in plan.levels and plan.kind == "cuda":
        runs = whole_runs(plan.device)
        yield 5, Group("whole runs", commands=runs.single, fill_caches=runs.fill_caches)
        imports = runs.fill_caches[:1]  # the group before has filled the cache of kernels
        yield 5, Group("a comparison and a sweep", commands=runs.several, fill_caches=imports)


def _steps(plan: Plan, case: Case) -> Group:
    """Measure local steps only, in several number formats."""
    candidates = _fast_candidates(plan, case.model)
    cases = [
        replace(case, precision=precision, augmented=False, compiled=precision in candidates)
        for precision in plan.precisions
    ]
    # Compiling a large model takes minutes, so engines train it in its fastest formats only.
    engine_cases = [each for each in cases if each.compiled or case.model not in LARGE]
    contenders = [_bare(each, engine) for each in engine_cases for engine in plan.engines]
    contenders += [_loop_steps(each, tuned) for each in cases for tuned in (False, True)]
    if case.method == "fedavg":
        contenders += [_limit(each, plan.compiled_limit) for each in cases if each.precision in candidates]
    return Group(
        f"steps of {case.method} on {case.model}, {case.clients} clients",
        tuple(contenders),
        interleaved=not _is_large(case),
    )


def _rounds(plan: Plan, case: Case) -> Group:
    """Measure whole rounds of each method and, for comparison, bare steps of FedAvg and rounds of the plain loop.

    For the plan's first model, also measure FedAvg with clients of unequal size.
    """
    engine = plan.engines[0]
    contenders = [_bare(replace(case, augmented=False), engine, "rounds")]
    contenders += [_engine_rounds(replace(case, method=method), engine) for method in plan.methods]
    if case.model == plan.models[0] and case.clients > 1:
        contenders.append(_engine_rounds(replace(case, sizes="unequal"), engine))
    contenders.append(_loop_rounds(case))
    title = f"rounds of {case.model}, {case.clients} clients, {case.precision}"
    return Group(title, tuple(contenders), interleaved=not _is_large(case))


def _is_large(case: Case) -> bool:
    """Whether the device cannot hold all contenders of this case together."""
    return case.model in LARGE and case.clients > _MAX_CLIENTS_TOGETHER


def _federations(plan: Plan) -> Group:
    case = replace(_scaling_case(plan), clients=SCALING_CLIENTS)
    contenders = [
        _engine_rounds(replace(case, federation_clients=size), plan.engines[0], "federation")
        for size in plan.federations
        if size >= case.clients
    ]
    return Group("rounds by federation size", tuple(contenders))


def _participants(plan: Plan) -> Group:
    case = replace(_scaling_case(plan), federation_clients=max(plan.participants))
    contenders = [
        _engine_rounds(replace(case, clients=clients), plan.engines[0], "participants") for clients in plan.participants
    ]
    return Group("rounds by number of participants", tuple(contenders))


def _scaling_case(plan: Plan) -> Case:
    """Make a case with few samples per client, so that 100,000 clients fit in memory.

    It is not compiled, because every size would need its own compilation.
    """
    workload = replace(plan.workload, batches=2)
    return Case(plan.models[0], 1, workload, plan.device, precision=plan.precisions[0], compiled=False)


def _fast_candidates(plan: Plan, model: str) -> tuple[str, ...]:
    """The precisions that may be fastest. Local steps in others are not compiled, because that takes too long."""
    candidates = ("bf16",) if model in LARGE else ("bf16", "tf32")
    return tuple(p for p in plan.precisions if p in candidates) or plan.precisions[:1]


# -- the contenders ------------------------------------------------------------------------------------------


def _bare(case: Case, engine: str, level: Level = "steps") -> Contender:
    """Make a contender of an engine's local steps.

    It has the engine's name. In a table of whole rounds, it is called `BARE`, because there the engine's name stands
    for whole rounds.
    """

    def make() -> Ready:
        fedskew = FedskewEngine(case, engine)
        call, samples = fedskew.bare_steps()
        return Ready(
            call,
            lambda: samples,
            lambda: BARE if level == "rounds" else fedskew.name,
            fedskew.close,
            fedskew.threads,
            fedskew.notices,
        )

    return Contender(case, level, f"{engine} {BARE}: {_describe(case)}", make, engine)


def _engine_rounds(case: Case, engine: str, level: Level = "rounds") -> Contender:
    def make() -> Ready:
        fedskew = FedskewEngine(case, engine)
        return Ready(
            fedskew.round,
            lambda: fedskew.visits,
            lambda: fedskew.name,
            fedskew.close,
            fedskew.threads,
            fedskew.notices,
        )

    return Contender(case, level, f"{engine} rounds: {_describe(case)}", make, engine)


def _loop_steps(case: Case, tuned: bool) -> Contender:
    return _reference(case, "steps", TUNED_LOOP if tuned else LOOP, lambda: LoopSteps(case, tuned))


def _loop_rounds(case: Case) -> Contender:
    return _reference(case, "rounds", LOOP, lambda: LoopRounds(case))


def _limit(case: Case, compiled: bool) -> Contender:
    return _reference(case, "steps", LIMIT, lambda: Limit(case, compiled))


def _reference(case: Case, level: Level, name: str, make: Callable[[], LoopSteps | LoopRounds | Limit]) -> Contender:
    def ready() -> Ready:
        reference = make()
        return Ready(reference, lambda: reference.samples, lambda: name)

    return Contender(case, level, f"{name}: {_describe(case)}", ready)


def _describe(case: Case) -> str:
    of_all = f" of {case.federation_clients:,}" if case.federation_clients else ""
    sizes = ", unequal sizes" if case.sizes == "unequal" else ""
    return f"{case.method} on {case.model}, {case.clients}{of_all} clients, {case.precision}{sizes}"
