"""The maths: which classes meet on a client, how a model separates own from vacant classes, and which it confuses.

The contact of two classes says how much of the smaller one is on the same clients as the other. Without contact, no
client can compare the two classes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NAMES = ("never meet", "rarely meet", "often meet")
"""Groups of pairs of classes, by their contact."""
NEVER, RARELY, OFTEN = range(3)
RARE = 0.05
"""Two classes rarely meet if their contact is below this, but not 0."""

Numbers = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Groups = npt.NDArray[np.bool_]
"""[3, C, C]: whether a pair of classes is in a group."""


def contact(label_counts: Counts) -> Numbers:
    """Return Σ_k min(n_ka, n_kb) / min(n_a, n_b) for all pairs of classes, [C, C], from the counts [clients, C]."""
    together = np.minimum(label_counts[:, :, None], label_counts[:, None, :]).sum(axis=0)
    totals = label_counts.sum(axis=0)
    shares: Numbers = together / np.minimum(totals[:, None], totals[None, :])
    return shares


def contact_groups(label_counts: Counts) -> Groups:
    """Return which pairs of different classes never, rarely and often meet."""
    shares = contact(label_counts)
    different = ~np.eye(len(shares), dtype=np.bool_)
    return np.stack([shares == 0, (shares > 0) & (shares < RARE), shares >= RARE]) & different


def vacant_log_odds(probabilities: Numbers, labels: Counts, vacant: Groups, groups: Groups) -> tuple[Numbers, Numbers]:
    """Sum log p(own class) − log p(vacant class) over one client's samples and its vacant classes.

    Return the sum and the number of terms for each group of pairs.
    """
    logs = np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))
    odds = logs[np.arange(len(labels)), labels][:, None] - logs
    chosen = groups[:, labels] & vacant
    return np.where(chosen, odds, 0).sum(axis=(1, 2)), chosen.sum(axis=(1, 2)).astype(np.float64)


def errors_by_group(confusion: Counts, groups: Groups) -> Numbers:
    """Return the percentage of test samples that are taken for another class, by group of the two classes."""
    percentages: Numbers = 100 * np.where(groups, confusion, 0).sum(axis=(1, 2)) / confusion.sum()
    return percentages
