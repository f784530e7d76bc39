"""The table of combinations agrees with what is accepted, and every accepted pair runs."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from linear_clients import layered_model, played, serve
from method_cases import by_kind
from toy_runs import with_fitting_head

from fedskew.cli import main
from fedskew.errors import UserError
from fedskew.experiment.preparation import check_model
from fedskew.methods import METHODS, make_method
from fedskew.methods.compatibility import clash, heads_clash, kind, markdown_tables

PAGE = Path(__file__).resolve().parents[2] / "docs" / "combinations.md"

KINDS = {name: kind(entry) for name, entry in METHODS.items()}


def clashes(one: str, other: str) -> bool:
    return bool(clash(KINDS[one], KINDS[other])) or heads_clash(METHODS[one], METHODS[other])


def accepted(*names: str) -> bool:
    try:
        make_method("+".join(names))
    except UserError:
        return False
    return True


def test_the_page_matches_the_catalogue() -> None:
    found = re.search(r"<!-- combinations -->\n(.*)<!-- end -->", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    assert found[1] == markdown_tables(), "write what `fedskew methods --combinations` prints into docs/combinations.md"


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert not main(["methods", "--combinations"])
    assert capsys.readouterr().out == markdown_tables()


def test_a_pair_is_accepted_if_the_table_says_so() -> None:
    for one, other in itertools.product(METHODS, METHODS):
        assert accepted(one, other) == (not clashes(one, other)), (one, other)


def test_three_are_accepted_if_every_two_are() -> None:
    triples = list(itertools.combinations(METHODS, 3))
    for index in np.random.default_rng(0).permutation(len(triples))[:2000]:
        names = triples[index]
        assert accepted(*names) == all(not clashes(*pair) for pair in itertools.combinations(names, 2)), names


NEED_HEADS, KEEP_HEADS = {"creff", "fedgc", "fedgr", "fedgr-server"}, {"fedbabu", "fedper", "fedrep"}
"""The server rules of CReFF, FedGR and FedGC need the clients' heads, which the others do not send."""
LINEAR_HEADS = {"ccvr", "fedgr-server", "fedmr-inter", "fpl"}
OTHER_HEADS = {"creff": "retrained", "fedetf": "etf", "fedgela": "etf", "fednh": "cosine", "fedrod": "personal"}
"""The first use the rows of a linear head, and the second choose another kind."""


def have_other_heads(*names: str) -> bool:
    return bool(LINEAR_HEADS & {*names} and OTHER_HEADS.keys() & {*names})


COMBINING = [pair for pair in itertools.combinations(METHODS, 2) if not clash(KINDS[pair[0]], KINDS[pair[1]])]
PAIRS = [pair for pair in COMBINING if not have_other_heads(*pair)]


FIRST = by_kind(sorted({first for first, _ in PAIRS}))
ONE_OF_EACH_KIND = {parameter.values[0] for parameter in by_kind(METHODS) if not parameter.marks}


@pytest.mark.parametrize("first", [parameter for parameter in FIRST if not parameter.marks])
def test_one_combination_of_each_two_kinds_runs(first: str) -> None:
    run_with_each(first, [pair[1] for pair in PAIRS if pair[0] == first and pair[1] in ONE_OF_EACH_KIND])


@pytest.mark.slow
@pytest.mark.parametrize("first", FIRST)
def test_every_combination_runs(first: str) -> None:
    run_with_each(first, [pair[1] for pair in PAIRS if pair[0] == first])


def run_with_each(first: str, others: list[str]) -> None:
    for second in others:
        method = make_method(f"{first}+{second}")
        if NEED_HEADS & {first, second} and KEEP_HEADS & {first, second}:
            with pytest.raises(UserError, match="needs tensors that stay on the clients"):
                check_model(method, with_fitting_head(layered_model(), method), 4)
            continue
        if "fedlaw" in (first, second) and {"fedper", "fedrep"} & {first, second}:
            with pytest.raises(UserError, match="on the server's samples, but has no global model"):
                check_model(method, layered_model(), 4)
            continue
        states, rows = played(serve(method, rounds=2, local_epochs=1, lr=0.01))
        assert all(row.diverged == [] for row in rows), second
        assert all(p.isfinite().all() for p in states[-1].model.params.values()), second


@pytest.mark.parametrize(("first", "second"), [pair for pair in COMBINING if have_other_heads(*pair)])
def test_a_method_that_needs_a_linear_head_is_refused_beside_another_head(first: str, second: str) -> None:
    needing, choosing = (first, second) if first in LINEAR_HEADS else (second, first)
    reason = f"'{needing}' needs a linear head, but '{choosing}' chooses the head '{OTHER_HEADS[choosing]}', so they"
    with pytest.raises(UserError, match=f"{reason} cannot be combined; drop one of them from '{first}\\+{second}'"):
        make_method(f"{first}+{second}")
    (row,) = [line for line in markdown_tables().splitlines() if line.startswith(f"| `{choosing}` (")]
    assert f"`{needing}`" in row
