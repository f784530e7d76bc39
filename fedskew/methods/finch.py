"""FINCH: clusters from first neighbours, without a number of clusters to choose.

Sarfraz et al., "Efficient parameter-free clustering using first neighbor relations", CVPR 2019.

Points are linked with their nearest neighbour; what hangs together is a cluster. The clusters' means are clustered in
the same way, again and again, until all would be one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Points = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]


def finch(points: Points) -> Labels:
    """[N]: which cluster of the coarsest partition each point belongs to; one cluster only if the first step finds
    no more. Points are near whose cosine is large; of equally near ones, the first counts."""
    labels = _linked(points)
    while True:
        coarser = _linked(_means(points, labels))[labels]
        if coarser.max() == 0:
            return labels
        labels = coarser


def _linked(points: Points) -> Labels:
    """The components of the graph of nearest neighbours, numbered in the order of their first points."""
    if len(points) == 1:
        return np.zeros(1, dtype=np.int64)
    lengths = np.linalg.norm(points, axis=1, keepdims=True)
    directions = points / np.where(lengths > 0, lengths, 1.0)
    cosines = directions @ directions.T
    np.fill_diagonal(cosines, -np.inf)
    nearest = cosines.argmax(axis=1)
    labels = np.arange(len(points))
    while True:  # everybody takes the smallest number that a neighbour has
        smaller = np.minimum(labels, labels[nearest])
        np.minimum.at(smaller, nearest, labels)
        if np.array_equal(smaller, labels):
            return np.unique(labels, return_inverse=True)[1].reshape(-1)
        labels = smaller


def _means(points: Points, labels: Labels) -> Points:
    return np.stack([points[labels == label].mean(axis=0) for label in range(labels.max() + 1)])
