"""Clusters of clients by their label distributions: k-means, the same on every machine."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fedskew.randomness import generator

Points = npt.NDArray[np.float64]
Owners = npt.NDArray[np.int64]

_STARTS = 10
_STEPS = 100


def label_clusters(label_counts: npt.NDArray[np.int64], clusters: int, largest: float | None = None) -> list[list[int]]:
    """The clients of each cluster, by number; clients without samples are in none.

    The best of ten k-means++ starts. With `largest`, no cluster has more than that many times its even share of the
    clients: who is farthest from the centre of a full one goes to the nearest with room.
    """
    populated = np.flatnonzero(label_counts.sum(axis=1))
    points = label_counts[populated] / label_counts[populated].sum(axis=1, keepdims=True)
    wanted = min(clusters, len(np.unique(points, axis=0)))
    room = len(points) if largest is None else max(math.floor(largest * len(points) / wanted), _even(points, wanted))
    tried = [_clustered(points, wanted, room, start) for start in range(_STARTS)]
    owners = min(tried, key=lambda found: _spread(points, found, wanted))
    members = [populated[owners == cluster].tolist() for cluster in range(wanted)]
    return sorted(group for group in members if group)


def _even(points: Points, clusters: int) -> int:
    return -(-len(points) // clusters)


def _clustered(points: Points, clusters: int, room: int, start: int) -> Owners:
    """Lloyd's steps until nobody moves."""
    centres = _seeded(points, clusters, start)
    owners = _assigned(points, centres, room)
    for _ in range(_STEPS):
        centres = np.stack(
            [points[owners == c].mean(axis=0) if (owners == c).any() else centres[c] for c in range(clusters)]
        )
        moved = _assigned(points, centres, room)
        if np.array_equal(moved, owners):
            break
        owners = moved
    return owners


def _seeded(points: Points, clusters: int, start: int) -> Points:
    """k-means++: each further centre is a point, likelier the farther it is from those before."""
    rng = generator(0, "k-means", start)
    centres = [points[rng.integers(len(points))]]
    while len(centres) < clusters:
        nearest = _distances(points, np.stack(centres)).min(axis=1)
        centres.append(points[np.searchsorted(np.cumsum(nearest), rng.random() * nearest.sum(), side="right")])
    return np.stack(centres)


def _assigned(points: Points, centres: Points, room: int) -> Owners:
    """Each point to the nearest centre with room; the closest pairs first."""
    distances = _distances(points, centres)
    if room >= len(points):
        nearest: Owners = distances.argmin(axis=1)
        return nearest
    owners, free = np.full(len(points), -1), np.full(len(centres), room)
    for pair in np.argsort(distances, axis=None, kind="stable"):
        point, centre = divmod(int(pair), len(centres))
        if owners[point] < 0 and free[centre]:
            owners[point] = centre
            free[centre] -= 1
    return owners


def _spread(points: Points, owners: Owners, clusters: int) -> float:
    """The sum of squared distances to the clusters' means."""
    groups = [points[owners == cluster] for cluster in range(clusters)]
    return float(sum(((group - group.mean(axis=0)) ** 2).sum() for group in groups if len(group)))


def _distances(points: Points, centres: Points) -> Points:
    squares: Points = ((points[:, None] - centres) ** 2).sum(axis=-1)
    return squares
