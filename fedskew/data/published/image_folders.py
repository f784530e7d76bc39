"""Read folders of image files, one per class. Load CINIC-10 and Tiny-ImageNet from such folders."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedskew.data.dataset import Dataset, Samples
from fedskew.data.images import BitDepths, Size, decode_all
from fedskew.data.spelling import composed
from fedskew.errors import UserError

EXTENSIONS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}

CINIC10_LAYOUT = (("train/airplane",), ("test/airplane",))
TINY_IMAGENET_LAYOUT = (("wnids.txt",), ("train",), ("val",))
"""What a dataset's folder must contain. The loaders below receive the paths in this order."""

Labelled = list[tuple[Path, int]]
"""The path and the class number of each image."""


def class_folders(folder: Path) -> tuple[str, ...]:
    """Return the class names: the visible sub-folders, in alphabetical order."""
    return tuple(sorted(_folders_by_class(folder)))


def _folders_by_class(folder: Path) -> dict[str, list[Path]]:
    """Return the folders of each class. Names that look the same are the same class."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not _is_hidden(path.name):
            found.setdefault(composed(path.name), []).append(path)
    return found


def _is_hidden(name: str) -> bool:
    """Return whether this is a hidden file or folder, or the folder that macOS adds to archives."""
    return name.startswith(".") or name == "__MACOSX"


def labelled_images(folder: Path, classes: Iterable[str]) -> Labelled:
    """List the image files in each class's folder, at any depth, class by class and then in alphabetical order."""
    folders = _folders_by_class(folder)
    return [
        (path, label)
        for label, name in enumerate(classes)
        for class_folder in folders.get(name, [])
        for path in _images_in(class_folder)
    ]


def read_images(
    images: Labelled,
    where: str,
    size: Size | None = None,
    colour: bool | None = None,
    depths: BitDepths | None = None,
) -> Samples:
    """Decode the images with `decode_all`. `where` is their source, for error messages."""
    if not images:
        raise UserError(f"{where}: no images; expected one folder of images per class")
    paths = [path for path, _ in images]
    x = decode_all(paths, lambda index: str(paths[index]), size, colour, depths)
    return Samples(x, np.array([label for _, label in images], dtype=np.int64))


def load_cinic10(files: list[Path]) -> Dataset:
    """Load the train and test folders, as FedLMD does. The valid folder is not used."""
    train, test = files[0].parent, files[1].parent
    classes = class_folders(train)
    return Dataset(
        name="cinic10",
        kind="image",
        classes=classes,
        train=read_images(labelled_images(train, classes), str(train), (32, 32), colour=True),
        test=read_images(labelled_images(test, classes), str(test), (32, 32), colour=True),
        mean=(0.47889522, 0.47227842, 0.43047404),
        std=(0.24205776, 0.23828046, 0.25874835),
    )


def load_tiny_imagenet(files: list[Path]) -> Dataset:
    """Load the folder train, and the folder val as the test set. The labels of the real test set are not public."""
    wnids, train, val = files
    ids = tuple(sorted(wnids.read_text(encoding="utf-8").split()))
    return Dataset(
        name="tiny-imagenet",
        kind="image",
        classes=_readable_names(ids, wnids.parent / "words.txt"),
        train=read_images(labelled_images(train, ids), str(train), (64, 64), colour=True),
        test=read_images(_validation(val, ids), str(val), (64, 64), colour=True),
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )


def _images_in(folder: Path) -> list[Path]:
    found = (p for p in folder.rglob("*") if p.suffix.lower() in EXTENSIONS)
    return sorted(p for p in found if p.is_file() and not any(map(_is_hidden, p.relative_to(folder).parts)))


def _validation(val: Path, ids: tuple[str, ...]) -> Labelled:
    """List the validation images. As published, they are in one folder, with labels in val_annotations.txt.

    Some copies have one folder per class instead.
    """
    annotations = val / "val_annotations.txt"
    if not annotations.is_file():
        return labelled_images(val, ids)
    label_of = {wnid: label for label, wnid in enumerate(ids)}
    images: Labelled = []
    for number, line in enumerate(annotations.read_text(encoding="utf-8").splitlines(), 1):
        fields = line.split("\t")
        if len(fields) < 2 or fields[1] not in label_of:
            raise UserError(
                f"{annotations}: line {number} is {line!r}; expected an image, a tab and an id of wnids.txt"
            )
        images.append((val / "images" / fields[0], label_of[fields[1]]))
    return images


def _readable_names(ids: tuple[str, ...], words: Path) -> tuple[str, ...]:
    """Return the first English name of each WordNet id, from the file `words`.

    An id stays as it is if it has no name, or if another id has the same name.
    """
    if not words.is_file():
        return ids
    lines = (line.partition("\t") for line in words.read_text(encoding="utf-8").splitlines())
    word_of = {wnid: text.split(",")[0].strip() for wnid, _, text in lines}
    names = [word_of.get(wnid) or wnid for wnid in ids]
    return tuple(name if names.count(name) == 1 else wnid for name, wnid in zip(names, ids, strict=True))
