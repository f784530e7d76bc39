"""The twelve 2D datasets of MedMNIST: medical images of 28×28 pixels. Each dataset is one npz file."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedskew.data.dataset import Dataset, Samples
from fedskew.errors import UserError

URL = "https://zenodo.org/record/6496656/files/"
_SIDE = 28
_ORGANS = ("bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right", "liver", "lung-left",
           "lung-right", "pancreas", "spleen")  # fmt: skip


@dataclass(frozen=True)
class MedicalImages:
    """One of MedMNIST's datasets.

    Sizes, classes and checksums are those in the package medmnist 2.1.0 (info.py), which downloads from `URL`. The
    licence of dermamnist is the one that medmnist has stated since version 2.2.3.
    """

    name: str
    description: str
    classes: tuple[str, ...]
    channels: int
    train: int
    test: int
    md5: str
    licence: str = "CC BY 4.0"
    several_labels: bool = False
    """Whether a sample may have several of the classes, or none."""


MEDMNIST = (
    MedicalImages(
        "pathmnist", "colon tissue, 28×28 colour",
        ("adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle", "normal colon mucosa",
         "cancer-associated stroma", "colorectal adenocarcinoma epithelium"),
        3, 89_996, 7_180, "a8b06965200029087d5bd730944a56c1"),
    MedicalImages(
        "chestmnist", "chest X-rays with up to 14 findings each (multi-label), 28×28 grey",
        ("atelectasis", "cardiomegaly", "effusion", "infiltration", "mass", "nodule", "pneumonia", "pneumothorax",
         "consolidation", "edema", "emphysema", "fibrosis", "pleural", "hernia"),
        1, 78_468, 22_433, "02c8a6516a18b556561a56cbdd36c4a8", several_labels=True),
    MedicalImages(
        "dermamnist", "skin lesions, 28×28 colour",
        ("actinic keratoses and intraepithelial carcinoma", "basal cell carcinoma", "benign keratosis-like lesions",
         "dermatofibroma", "melanoma", "melanocytic nevi", "vascular lesions"),
        3, 7_007, 2_005, "0744692d530f8e62ec473284d019b0c7", "CC BY-NC 4.0"),
    MedicalImages(
        "octmnist", "retina by optical coherence tomography, 28×28 grey",
        ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
        1, 97_477, 1_000, "c68d92d5b585d8d81f7112f81e2d0842"),
    MedicalImages(
        "pneumoniamnist", "children's chest X-rays, 28×28 grey", ("normal", "pneumonia"),
        1, 4_708, 624, "28209eda62fecd6e6a2d98b1501bb15f"),
    MedicalImages(
        "retinamnist", "retina photographs by grade of retinopathy, 28×28 colour", tuple("01234"),
        3, 1_080, 400, "bd4c0672f1bba3e3a89f0e4e876791e4"),
    MedicalImages(
        "breastmnist", "breast ultrasound, 28×28 grey", ("malignant", "normal, benign"),
        1, 546, 156, "750601b1f35ba3300ea97c75c52ff8f6"),
    MedicalImages(
        "bloodmnist", "blood cells under the microscope, 28×28 colour",
        ("basophil", "eosinophil", "erythroblast", "immature granulocytes", "lymphocyte", "monocyte", "neutrophil",
         "platelet"),
        3, 11_959, 3_421, "7053d0359d879ad8a5505303e11de1dc"),
    MedicalImages(
        "tissuemnist", "kidney cells, 28×28 grey",
        ("collecting duct, connecting tubule", "distal convoluted tubule", "glomerular endothelial cells",
         "interstitial endothelial cells", "leukocytes", "podocytes", "proximal tubule segments",
         "thick ascending limb"),
        1, 165_466, 47_280, "ebe78ee8b05294063de985d821c1c34b"),
    MedicalImages(
        "organamnist", "organs in CT, axial view, 28×28 grey", _ORGANS,
        1, 34_581, 17_778, "866b832ed4eeba67bfb9edee1d5544e6"),
    MedicalImages(
        "organcmnist", "organs in CT, coronal view, 28×28 grey", _ORGANS,
        1, 13_000, 8_268, "0afa5834fb105f7705a7d93372119a21"),
    MedicalImages(
        "organsmnist", "organs in CT, sagittal view, 28×28 grey", _ORGANS,
        1, 13_940, 8_829, "e5c39f1af030238290b9557d9503af9d"),
)  # fmt: skip


def load_medmnist(images: MedicalImages, files: list[Path]) -> Dataset:
    """Load the training and the test part. The validation part is not used."""
    train, test = (_samples(images, files[0], part) for part in ("train", "test"))
    half = (0.5,) * images.channels  # as in MedMNIST's own experiments
    return Dataset(images.name, "image", images.classes, train, test, half, half)


def _samples(images: MedicalImages, path: Path, part: str) -> Samples:
    x, y = _read_array(path, f"{part}_images"), _read_array(path, f"{part}_labels")
    shape = (_SIDE, _SIDE, 3) if images.channels == 3 else (_SIDE, _SIDE)
    if x.dtype != np.uint8 or x.shape[1:] != shape:
        raise UserError(
            f"{path}: {part}_images has shape {x.shape} and type {x.dtype}; expected (n, {', '.join(map(str, shape))})"
            ", uint8"
        )
    columns = len(images.classes) if images.several_labels else 1
    if y.shape != (len(x), columns) or y.dtype.kind not in "biu":
        raise UserError(
            f"{path}: {part}_labels has shape {y.shape} and type {y.dtype}; expected ({len(x)}, {columns}), "
            "whole numbers"
        )
    pixels = np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if images.channels == 3 else x[:, None]
    labels = y.astype(np.int64)
    return Samples(pixels, labels if images.several_labels else labels[:, 0])


def _read_array(path: Path, name: str) -> npt.NDArray[np.generic]:
    try:
        with np.load(path, allow_pickle=False) as file:
            found: npt.NDArray[np.generic] = file[name]
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: {name} cannot be read ({error}); expected a MedMNIST file") from error
    return found
