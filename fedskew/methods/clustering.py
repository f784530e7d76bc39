"""Clustering on the server: FINCH for prototypes (FPL), k-means for label distributions (FedConcat).

Sarfraz et al., "Efficient parameter-free clustering using first neighbor relations", CVPR 2019 (FINCH).
FINCH needs no random numbers, and k-means draws them from fixed seeds, so both give the same clusters in every run.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fedskew.randomness import generator

Points = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]
"""[N]: the cluster of each point."""

_STARTS = 10
"""How many times k-means runs, each time from other initial centres."""
_STEPS = 100
"""The maximum number of steps of one run of k-means."""


def finch(points: Points) -> Labels:
    """Cluster by first neighbours, without choosing the number of clusters.

    Every point is linked with its nearest neighbour by cosine, or with the first of equally near ones. The connected
    components are the clusters. Their means are clustered in the same way, until all points would be one cluster. The
    last partition before that is returned, or one cluster if the first step already finds only one.
    """
    labels = _link_neighbours(points)
    while True:
        coarser = _link_neighbours(cluster_means(points, labels))[labels]
        if coarser.max() == 0:
            return labels
        labels = coarser


def _link_neighbours(points: Points) -> Labels:
    """Return the components of the nearest-neighbour graph, numbered in the order of their first points."""
    if len(points) == 1:
        return np.zeros(1, dtype=np.int64)
    lengths = np.linalg.norm(points, axis=1, keepdims=True)
    directions = points / np.where(lengths > 0, lengths, 1.0)
    cosines = directions @ directions.T
    np.fill_diagonal(cosines, -np.inf)
    nearest = cosines.argmax(axis=1)
    labels = np.arange(len(points))
    while True:  # every point takes the smallest label among itself and its neighbours
        smaller = np.minimum(labels, labels[nearest])
        np.minimum.at(smaller, nearest, labels)
        if np.array_equal(smaller, labels):
            return np.unique(labels, return_inverse=True)[1].reshape(-1)
        labels = smaller


def cluster_means(points: Points, labels: Labels) -> Points:
    return np.stack([points[labels == label].mean(axis=0) for label in range(labels.max() + 1)])


def cluster_by_labels(
    label_counts: npt.NDArray[np.int64], clusters: int, largest: float | None = None
) -> list[list[int]]:
    """Cluster the clients by their label distributions and return the clients of each cluster.

    k-means runs from several k-means++ starts, and the best result is used. Clients without samples are in no cluster.

    `largest` limits the size of a cluster, relative to an even share of the clients. The limit is at least an even
    share, rounded up. The clients farthest from the centre of a full cluster go to the nearest cluster with room.
    """
    populated = np.flatnonzero(label_counts.sum(axis=1))
    points = label_counts[populated] / label_counts[populated].sum(axis=1, keepdims=True)
    k = min(clusters, len(np.unique(points, axis=0)))
    even_share = -(-len(points) // k)
    room = len(points) if largest is None else max(math.floor(largest * len(points) / k), even_share)
    attempts = [_k_means(points, k, room, start) for start in range(_STARTS)]
    labels = min(attempts, key=lambda attempt: _inertia(points, attempt, k))
    members = [populated[labels == cluster].tolist() for cluster in range(k)]
    return sorted(group for group in members if group)


def _k_means(points: Points, k: int, room: int, start: int) -> Labels:
    """Run at most `_STEPS` steps of Lloyd's algorithm, until no point changes its cluster.

    A cluster has at most `room` points.
    """
    centres = _k_means_plus_plus(points, k, start)
    labels = _assign(points, centres, room)
    for _ in range(_STEPS):
        centres = np.stack([points[labels == c].mean(axis=0) if (labels == c).any() else centres[c] for c in range(k)])
        moved = _assign(points, centres, room)
        if np.array_equal(moved, labels):
            break
        labels = moved
    return labels


def _k_means_plus_plus(points: Points, k: int, start: int) -> Points:
    """Draw points as centres, with probability proportional to the squared distance to the nearest centre so far."""
    rng = generator(0, "k-means", start)
    centres = [points[rng.integers(len(points))]]
    while len(centres) < k:
        nearest = _squared_distances(points, np.stack(centres)).min(axis=1)
        centres.append(points[np.searchsorted(np.cumsum(nearest), rng.random() * nearest.sum(), side="right")])
    return np.stack(centres)


def _assign(points: Points, centres: Points, room: int) -> Labels:
    """Assign each point to the nearest centre with room. The closest pairs of point and centre go first."""
    distances = _squared_distances(points, centres)
    if room >= len(points):
        nearest: Labels = distances.argmin(axis=1)
        return nearest
    labels, free = np.full(len(points), -1), np.full(len(centres), room)
    for pair in np.argsort(distances, axis=None, kind="stable"):
        point, centre = divmod(int(pair), len(centres))
        if labels[point] < 0 and free[centre]:
            labels[point] = centre
            free[centre] -= 1
    return labels


def _inertia(points: Points, labels: Labels, k: int) -> float:
    """Sum the squared distances of the points to the means of their clusters."""
    groups = [points[labels == cluster] for cluster in range(k)]
    return float(sum(((group - group.mean(axis=0)) ** 2).sum() for group in groups if len(group)))


def _squared_distances(points: Points, centres: Points) -> Points:
    squares: Points = ((points[:, None] - centres) ** 2).sum(axis=-1)
    return squares
