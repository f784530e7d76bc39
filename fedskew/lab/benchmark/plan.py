"""The measurements of a benchmark, most important first; what does not fit the time budget is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fedskew.lab.benchmark.cases import METHODS, PRECISIONS, Case, Scale
from fedskew.lab.benchmark.engines import OwnEngine
from fedskew.lab.benchmark.limit import Limit
from fedskew.lab.benchmark.loop import LoopRounds, LoopSteps
from fedskew.lab.benchmark.results import BARE, LEVELS, LIMIT, LOOP, TUNED_LOOP, Level
from fedskew.lab.benchmark.targets import OVER_LOOP
from fedskew.lab.benchmark.timing import Contender, Patience, Ready

SCALING_CLIENTS = 10
"""Participants per round while the federation grows."""

LARGE = ("mobilenetv2", "resnet18")
"""Models that need minutes to compile and much memory."""


@dataclass(frozen=True)
class Plan:
    """What to measure on a device, and how thoroughly."""

    device: str
    models: tuple[str, ...]
    clients: tuple[int, ...]
    """Per round."""
    methods: tuple[str, ...]
    precisions: tuple[str, ...]
    engines: tuple[str, ...]
    """The first one counts."""
    scale: Scale
    patience: Patience
    budget: float
    """Seconds."""
    federations: tuple[int, ...] = (100, 1_000, 10_000, 100_000)
    participants: tuple[int, ...] = (1, 10, 50, 100, 500)
    levels: tuple[Level, ...] = LEVELS
    compiled_limit: bool = True

    @property
    def kind(self) -> str:
        return "cuda" if self.device.startswith("cuda") else "cpu"


def usual(device: str) -> Plan:
    """The default plan for a device."""
    if device.startswith("cuda"):
        return Plan(
            device=device,
            models=("cnn", "dnn", "mobilenetv2", "resnet18"),
            clients=(10, 100),
            methods=METHODS,
            precisions=PRECISIONS,
            engines=("stacked",),
            scale=Scale(batches=10, epochs=5, tests=10_000),
            patience=Patience(repetitions=7, seconds=0.1),
            budget=420,
        )
    return Plan(
        device=device,
        models=("dnn", "lenet5", "cnn"),
        clients=(10,),
        methods=METHODS,
        precisions=("float32",),
        engines=("auto", "stacked", "plain"),
        scale=Scale(batches=4, epochs=5, tests=500),
        patience=Patience(repetitions=5, seconds=0.3),
        budget=600,
    )


def quick(device: str) -> Plan:
    """A smoke test; the numbers mean little."""
    plan = usual(device)
    return replace(
        plan,
        models=("dnn",),
        clients=(plan.clients[0],),
        precisions=plan.precisions[:1],
        scale=Scale(batches=2, epochs=1, tests=100),
        patience=Patience(repetitions=3, seconds=0.02, warm_up=1),
        budget=40,
        federations=(100, 1_000),
        participants=(1, 10),
        compiled_limit=False,
    )


@dataclass(frozen=True)
class Group:
    """Contenders that are compared."""

    title: str
    contenders: tuple[Contender, ...]
    in_turn: bool = True
    """Time them in turn; if False, one after another, because together they would not fit the device."""


def groups(plan: Plan) -> list[Group]:
    """All requested groups, most important first."""
    ranked = [(rank, group) for rank, group in _ranked(plan) if group.contenders]
    return [group for _, group in sorted(ranked, key=lambda pair: pair[0])]


def _ranked(plan: Plan) -> Iterator[tuple[int, Group]]:
    first = plan.precisions[0]
    for clients in plan.clients:
        for model in plan.models:
            case = Case(model, clients, plan.scale, plan.device, precision=first)
            later = 0 if (model, clients) in OVER_LOOP[plan.kind] else 4
            if "steps" in plan.levels:
                for method in plan.methods:
                    yield later if method == "fedavg" else 7, _steps(plan, replace(case, method=method))
            if "rounds" in plan.levels:
                for precision in plan.precisions:
                    rank = later + 1 if precision == first else 6
                    yield rank, _rounds(plan, replace(case, precision=precision))
    if "federation" in plan.levels:
        yield 2, _federations(plan)
    if "participants" in plan.levels:
        yield 3, _participants(plan)


def _steps(plan: Plan, case: Case) -> Group:
    """Local steps alone, in every number format."""
    promising = _promising(plan, case.model)
    plain = [
        replace(case, precision=precision, augmented=False, compiled=precision in promising)
        for precision in plan.precisions
    ]
    own = [each for each in plain if each.compiled or case.model not in LARGE]  # others compile for minutes
    contenders = [_bare(each, engine, engine) for each in own for engine in plan.engines]
    contenders += [_loop_steps(each, tuned) for each in plain for tuned in (False, True)]
    if case.method == "fedavg":
        contenders += [_limit(each, plan.compiled_limit) for each in plain if each.precision in promising]
    return Group(
        f"steps of {case.method} on {case.model}, {case.clients} clients", tuple(contenders), not _is_large(case)
    )


def _rounds(plan: Plan, case: Case) -> Group:
    """Whole rounds of each method, beside bare steps of FedAvg."""
    engine = plan.engines[0]
    contenders = [_bare(replace(case, augmented=False), engine, BARE, "rounds")]
    contenders += [_engine_rounds(replace(case, method=method), engine) for method in plan.methods]
    if case.model == plan.models[0] and case.clients > 1:
        contenders.append(_engine_rounds(replace(case, sizes="unequal"), engine))
    contenders.append(_loop_rounds(case))
    title = f"rounds of {case.model}, {case.clients} clients, {case.precision}"
    return Group(title, tuple(contenders), not _is_large(case))


def _is_large(case: Case) -> bool:
    return case.model in LARGE and case.clients > SCALING_CLIENTS


def _federations(plan: Plan) -> Group:
    case = replace(_small(plan), clients=SCALING_CLIENTS)
    contenders = [
        _engine_rounds(replace(case, members=members), plan.engines[0], "federation")
        for members in plan.federations
        if members >= case.clients
    ]
    return Group("rounds by federation size", tuple(contenders))


def _participants(plan: Plan) -> Group:
    case = replace(_small(plan), members=max(plan.participants))
    contenders = [
        _engine_rounds(replace(case, clients=clients), plan.engines[0], "participants") for clients in plan.participants
    ]
    return Group("rounds by number of participants", tuple(contenders))


def _small(plan: Plan) -> Case:
    """Clients with few samples, so that 100,000 fit; not compiled, since each number of clients would compile anew."""
    scale = replace(plan.scale, batches=2)
    return Case(plan.models[0], 1, scale, plan.device, precision=plan.precisions[0], compiled=False)


def _promising(plan: Plan, model: str) -> tuple[str, ...]:
    """The precisions that may be fastest; compiling takes up to a minute each."""
    candidates = ("bf16",) if model in LARGE else ("bf16", "tf32")
    return tuple(p for p in plan.precisions if p in candidates) or plan.precisions[:1]


# -- the contenders ------------------------------------------------------------------------------------------


def _bare(case: Case, engine: str, name: str, level: Level = "steps") -> Contender:
    def make() -> Ready:
        own = OwnEngine(case, engine)
        call, samples = own.bare_steps()
        return Ready(
            call, lambda: samples, lambda: name if name == BARE else own.name, own.close, own.threads, own.notices
        )

    return Contender(case, level, f"{engine} {BARE}: {_words(case)}", make, engine)


def _engine_rounds(case: Case, engine: str, level: Level = "rounds") -> Contender:
    def make() -> Ready:
        own = OwnEngine(case, engine)
        return Ready(own.round, lambda: own.visits, lambda: own.name, own.close, own.threads, own.notices)

    return Contender(case, level, f"{engine} rounds: {_words(case)}", make, engine)


def _loop_steps(case: Case, tuned: bool) -> Contender:
    return _reference(case, "steps", TUNED_LOOP if tuned else LOOP, lambda: LoopSteps(case, tuned))


def _loop_rounds(case: Case) -> Contender:
    return _reference(case, "rounds", LOOP, lambda: LoopRounds(case))


def _limit(case: Case, compiled: bool) -> Contender:
    return _reference(case, "steps", LIMIT, lambda: Limit(case, compiled))


def _reference(case: Case, level: Level, name: str, make: Callable[[], LoopSteps | LoopRounds | Limit]) -> Contender:
    def ready() -> Ready:
        made = make()
        return Ready(made, lambda: made.samples, lambda: name)

    return Contender(case, level, f"{name}: {_words(case)}", ready)


def _words(case: Case) -> str:
    many = f" of {case.members:,}" if case.members else ""
    uneven = ", unequal sizes" if case.sizes == "unequal" else ""
    return f"{case.method} on {case.model}, {case.clients}{many} clients, {case.precision}{uneven}"
