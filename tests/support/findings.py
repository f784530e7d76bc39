"""A small dataset with several findings per patient, of very different frequency, some patients without any."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

import fedskew as fs

FINDINGS = ("cough", "fever", "rash", "pain")


def findings(patients: int = 240) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Values of patients, and a matrix of findings that depend on them."""
    random = np.random.default_rng(0)
    x = random.normal(size=(patients, 6))
    scores = x @ random.normal(size=(6, len(FINDINGS)))
    limits = np.quantile(scores, [0.4, 0.6, 0.8, 0.9], axis=0).diagonal()
    return x, (scores > limits).astype(np.int64)


def findings_file(folder: Path) -> Path:
    x, y = findings()
    np.savez(folder / "findings.npz", x=x, y=y, classes=np.array(FINDINGS))
    return folder / "findings.npz"


def findings_federation(clients: int = 4, beta: float = 0.5) -> fs.Federation:
    return fs.federation(findings(), fs.Dirichlet(clients=clients, beta=beta), classes=FINDINGS, name="findings")
