"""The section with the final table says how many seeds its tests have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up_runs import made_up

from fedskew.report.sections.results import results
from fedskew.results import comparisons


@pytest.mark.parametrize(
    ("fedavg", "fedlmd", "note"),
    [
        ((0, 1, 2), (2, 3, 4, 5), "With 3 seeds, a test has 2 degrees of freedom"),
        ((0, 1), (2, 3, 4), "A test needs at least 3 seeds that both methods have: --seeds 3."),
        ((9,), (8,), "A test needs at least 3 seeds that both methods have: --seeds 3."),
        ((0, 1, 2, 3, 4), (1, 2, 3, 4, 5), None),
    ],
)
def test_the_note_on_few_seeds_is_about_the_pair_with_the_fewest(
    fedavg: tuple[int, ...], fedlmd: tuple[int, ...], note: str | None
) -> None:
    """Each test pairs the best method with one other, so the seeds that all three share do not matter."""
    runs = [made_up("fedvls", s, [0.8 + s / 100] * 2) for s in range(6)]
    runs += [made_up("fedavg", s, [0.3] * 2) for s in fedavg] + [made_up("fedlmd", s, [0.2] * 2) for s in fedlmd]
    (comparison,) = comparisons(runs)
    paragraphs = results(comparison).paragraphs
    assert paragraphs[2:] == [] if note is None else paragraphs[2].startswith(note)


def test_a_small_cost_is_shown() -> None:
    """Heads in closed form, and short runs of small models, cost less than 0.05."""
    run = made_up("fedncm", 0, [0.8, 0.8])
    run.history[1] = replace(run.history[1], compute=0.033, bytes={"down": 21_000, "up": 20_000})
    (comparison,) = comparisons([run])
    table = results(comparison).tables[0]
    shown = dict(zip(table.columns, table.rows[0], strict=True))
    assert (shown["compute"], shown["MB moved"], shown["training time, s"]) == (0.033, 0.041, 2.0)
