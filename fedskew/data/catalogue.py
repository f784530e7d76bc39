"""The catalogue of named datasets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path

from fedskew.data.dataset import Dataset, Kind, option_names
from fedskew.data.published.cifar import CIFAR10, CIFAR10_LAYOUT, CIFAR100, CIFAR100_LAYOUT, load_cifar
from fedskew.data.published.digits import (
    SVHN_LAYOUT,
    SYN_LAYOUT,
    USPS_LAYOUT,
    load_digits,
    load_svhn,
    load_syn,
    load_usps,
)
from fedskew.data.published.domains import DIGITS, load_domains
from fedskew.data.published.download import RemoteFile
from fedskew.data.published.file_search import Published, find_members
from fedskew.data.published.idx import FASHION, LAYOUT, MNIST, PARTS, load_idx
from fedskew.data.published.image_folders import CINIC10_LAYOUT, TINY_IMAGENET_LAYOUT, load_cinic10, load_tiny_imagenet
from fedskew.data.published.medmnist import MEDMNIST, load_medmnist
from fedskew.data.published.medmnist import URL as MEDMNIST_URL
from fedskew.data.published.natural_sites import (
    FEMNIST_HELP,
    FEMNIST_LAYOUT,
    ISIC_HELP,
    ISIC_LAYOUT,
    load_fed_isic,
    load_femnist,
)
from fedskew.data.published.text import AG_NEWS_LAYOUT, NEWSGROUPS_LAYOUTS, load_20newsgroups, load_ag_news
from fedskew.data.synthetic import CLASSES, SAMPLES, TEST_SHARE, load_synthetic


@dataclass(frozen=True)
class DatasetEntry:
    """A dataset in the catalogue: its description and how to load it."""

    name: str
    kind: Kind
    description: str
    classes: int
    train: int
    test: int
    """The number of test samples. It is 0 if the user makes the test part with the publisher's script. Then `train`
    counts all samples."""
    sources: tuple[str, ...]
    licence: str
    citation: str
    loader: Callable[..., Dataset]
    """Gets the list of the dataset's files, if it has any, and the options. Returns the dataset."""
    published: Published | None = None
    """The dataset's files; None if it is generated, ships with an installed package or consists of other datasets."""
    components: tuple[str, ...] = ()
    """The names of the datasets that this one combines. If there are any, `loader` gets a function that loads a dataset
    by name, instead of files."""

    @property
    def options(self) -> tuple[str, ...]:
        return option_names(self.loader)


def find_location(entry: DatasetEntry, data_dir: str | PathLike[str] | None) -> str | None:
    """Return the folder of the dataset's files, or a phrase for the user such as "part of scikit-learn".

    None if the files are not on this machine.
    """
    if entry.components:
        is_here = all(find_location(DATASETS[part], data_dir) for part in entry.components)
        return "in the folders of its parts" if is_here else None
    if entry.published is None:
        return "generated when loaded" if entry.name == "synthetic" else "part of scikit-learn"
    folder, _ = find_members(entry.published, data_dir)
    return str(folder) if folder else None


def size_on_disk(entry: DatasetEntry, data_dir: str | PathLike[str] | None) -> int | None:
    """Return the total size of the dataset's files in bytes.

    None if they are not on this machine, for generated data, and for data that are part of scikit-learn.
    """
    sizes = [size_on_disk(DATASETS[part], data_dir) for part in entry.components]
    if entry.published is not None:
        folder, members = find_members(entry.published, data_dir)
        sizes.append(sum(map(_total_size, members)) if folder else None)
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def _total_size(path: Path) -> int:
    """Return the size of a file, or of all files in a folder."""
    files = [path] if path.is_file() else (file for file in path.rglob("*") if file.is_file())
    return sum(file.stat().st_size for file in files)


def _idx_files(urls: tuple[str, ...], md5: tuple[str, ...]) -> tuple[RemoteFile, ...]:
    return tuple(
        RemoteFile(f"{part}.gz", tuple(f"{url}{part}.gz" for url in urls), f"md5:{digest}")
        for part, digest in zip(PARTS, md5, strict=True)
    )


_USPS_URL = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/"
_SVHN_URL = "http://ufldl.stanford.edu/housenumbers/"
_SYN_URL = (
    "https://media.githubusercontent.com/media/domainadaptation/datasets/"
    "91ff02225a73db330883843bc41ee3aca59a19d9/synth/"
)
_AG_NEWS_URL = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"

_ENTRIES = (
    DatasetEntry(
        name="digits",
        kind="image",
        description="handwritten digits, 8×8 grey; part of scikit-learn, no download",
        classes=10,
        train=1438,
        test=359,
        sources=("https://archive.ics.uci.edu/dataset/80",),
        licence="CC BY 4.0",
        citation="Alpaydin and Kaynak, UCI, 1998",
        loader=load_digits,
    ),
    DatasetEntry(
        name="synthetic",
        kind="table",
        description="Gaussian classes, drawn at random: any number of classes and samples, a table or images",
        classes=CLASSES,
        train=SAMPLES,
        test=round(SAMPLES * TEST_SHARE),
        sources=("fedskew",),
        licence="Apache-2.0",
        citation="none",
        loader=load_synthetic,
    ),
    DatasetEntry(
        name="mnist",
        kind="image",
        description="handwritten digits, 28×28 grey",
        classes=10,
        train=60_000,
        test=10_000,
        sources=("http://yann.lecun.com/exdb/mnist/",),
        licence="CC BY-SA 3.0",
        citation="LeCun et al., Proc. IEEE 1998",
        loader=partial(load_idx, MNIST),
        published=Published(
            name="mnist",
            layouts=(LAYOUT,),
            folders=("MNIST/raw",),
            files=_idx_files(
                (
                    "https://ossci-datasets.s3.amazonaws.com/mnist/",
                    "https://storage.googleapis.com/cvdf-datasets/mnist/",
                ),
                (
                    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                    "d53e105ee54ea40749a09fcbcd1e9432",
                    "9fb629c4189551a2d022fa330f9573f3",
                    "ec29112dd5afa0611ce80d1b7f02629c",
                ),
            ),
        ),
    ),
    DatasetEntry(
        name="fashion-mnist",
        kind="image",
        description="clothing, 28×28 grey",
        classes=10,
        train=60_000,
        test=10_000,
        sources=("https://github.com/zalandoresearch/fashion-mnist",),
        licence="MIT",
        citation="Xiao et al., arXiv:1708.07747",
        loader=partial(load_idx, FASHION),
        published=Published(
            name="fashion-mnist",
            layouts=(LAYOUT,),
            folders=("FashionMNIST/raw",),
            files=_idx_files(
                ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
                (
                    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                    "25c81989df183df01b3e8a0aad5dffbe",
                    "bef4ecab320f06d8554ea6380940ec79",
                    "bb300cfdad3c16e7a12a480ee83cd310",
                ),
            ),
            extra_folders=(Path("/usr/share/datasets/fashion-mnist"),),
        ),
    ),
    DatasetEntry(
        name="usps",
        kind="image",
        description="handwritten digits from envelopes, 16×16 grey",
        classes=10,
        train=7_291,
        test=2_007,
        sources=(_USPS_URL,),
        licence="not stated",
        citation="Hull, IEEE PAMI 1994",
        loader=load_usps,
        published=Published(
            name="usps",
            layouts=(USPS_LAYOUT,),
            folders=("USPS",),
            files=(
                RemoteFile("usps.bz2", (f"{_USPS_URL}usps.bz2",), "md5:ec16c51db3855ca6c91edd34d0e9b197"),
                RemoteFile("usps.t.bz2", (f"{_USPS_URL}usps.t.bz2",), "md5:8ea070ee2aca1ac39742fdd1ef5ed118"),
            ),
        ),
    ),
    DatasetEntry(
        name="svhn",
        kind="image",
        description="digits of house numbers, 32×32 colour",
        classes=10,
        train=73_257,
        test=26_032,
        sources=(_SVHN_URL,),
        licence="non-commercial use",
        citation="Netzer et al., NIPS workshop 2011",
        loader=load_svhn,
        published=Published(
            name="svhn",
            layouts=(SVHN_LAYOUT,),
            folders=("SVHN",),
            files=(
                RemoteFile("train_32x32.mat", (f"{_SVHN_URL}train_32x32.mat",), "md5:e26dedcc434d2e4c54c9b2d4a06d8373"),
                RemoteFile("test_32x32.mat", (f"{_SVHN_URL}test_32x32.mat",), "md5:eb5a983be6a315427106f1b164d9cef3"),
            ),
        ),
    ),
    DatasetEntry(
        name="syn-digits",
        kind="image",
        description="digits drawn in many fonts on many backgrounds, 32×32 colour",
        classes=10,
        train=479_400,
        test=9_553,
        sources=("http://yaroslav.ganin.net/", _SYN_URL),
        licence="not stated",
        citation="Ganin and Lempitsky, ICML 2015",
        loader=load_syn,
        published=Published(
            name="syn-digits",
            layouts=(SYN_LAYOUT,),
            folders=("SYN", "syn", "synth"),
            files=(
                RemoteFile(
                    "synth_train_32x32.mat",
                    (f"{_SYN_URL}synth_train_32x32.mat",),
                    "sha256:e0e0924ecd0c0b5a55ed6485aaa7d39937af982397717b89a3d91777aca9433c",
                ),
                RemoteFile(
                    "synth_test_32x32.mat",
                    (f"{_SYN_URL}synth_test_32x32.mat",),
                    "sha256:6285fe9a1c6f27b379a47263907a37899b59ce86948fd343a5b904435cde5bcc",
                ),
            ),
        ),
    ),
    DatasetEntry(
        name="digits-domains",
        kind="image",
        description="four domains of digits at 32×32 colour: mnist, usps, svhn, syn-digits (the benchmark of FPL)",
        classes=10,
        train=619_948,
        test=47_592,
        sources=("mnist, usps, svhn, syn-digits",),
        licence="those of its parts",
        citation="Huang et al., CVPR 2023",
        loader=load_domains,
        components=DIGITS,
    ),
    DatasetEntry(
        name="cifar10",
        kind="image",
        description="animals and vehicles, 32×32 colour",
        classes=10,
        train=50_000,
        test=10_000,
        sources=("https://www.cs.toronto.edu/~kriz/cifar.html",),
        licence="not stated",
        citation="Krizhevsky, technical report, 2009",
        loader=partial(load_cifar, CIFAR10),
        published=Published(
            name="cifar10",
            layouts=(CIFAR10_LAYOUT,),
            folders=("cifar-10-batches-bin",),
            files=(
                RemoteFile(
                    "cifar-10-binary.tar.gz",
                    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
                    "md5:c32a1d4ab5d03f1284b67883e8d87530",
                ),
            ),
        ),
    ),
    DatasetEntry(
        name="cifar100",
        kind="image",
        description="objects, animals and plants, 32×32 colour (fine labels)",
        classes=100,
        train=50_000,
        test=10_000,
        sources=("https://www.cs.toronto.edu/~kriz/cifar.html",),
        licence="not stated",
        citation="Krizhevsky, technical report, 2009",
        loader=partial(load_cifar, CIFAR100),
        published=Published(
            name="cifar100",
            layouts=(CIFAR100_LAYOUT,),
            folders=("cifar-100-binary",),
            files=(
                RemoteFile(
                    "cifar-100-binary.tar.gz",
                    ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",),
                    "md5:03b5dce01913d631647c71ecec9e9cb8",
                ),
            ),
        ),
    ),
    DatasetEntry(
        name="tiny-imagenet",
        kind="image",
        description="200 ImageNet classes, 64×64 colour; tested on its validation part",
        classes=200,
        train=100_000,
        test=10_000,
        sources=("http://cs231n.stanford.edu/tiny-imagenet-200.zip",),
        licence="ImageNet terms (research only)",
        citation="Le and Yang, CS231N report, 2015",
        loader=load_tiny_imagenet,
        published=Published(
            name="tiny-imagenet",
            layouts=(TINY_IMAGENET_LAYOUT,),
            folders=("tiny-imagenet-200",),
            files=(
                RemoteFile(
                    "tiny-imagenet-200.zip",
                    ("http://cs231n.stanford.edu/tiny-imagenet-200.zip",),
                    "md5:90528d7ca1a48142e341f4ef8d21d0de",
                ),
            ),
        ),
    ),
    DatasetEntry(
        name="cinic10",
        kind="image",
        description="CIFAR-10's classes from CIFAR and ImageNet, 32×32 colour",
        classes=10,
        train=90_000,
        test=90_000,
        sources=("https://datashare.ed.ac.uk/handle/10283/3192",),
        licence="CC BY 4.0",
        citation="Darlow et al., arXiv:1810.03505",
        loader=load_cinic10,
        published=Published(
            name="cinic10",
            layouts=(CINIC10_LAYOUT,),
            folders=("CINIC-10", "CINIC10", "cinic-10"),
            files=(
                RemoteFile(
                    "CINIC-10.tar.gz",
                    (
                        "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
                        "https://datashare.ed.ac.uk/server/api/core/bitstreams/"
                        "e8e186cc-2688-48f1-aa5a-3fda1a43f8b6/content",
                    ),
                    "md5:6ee4d0c996905fe93221de577967a372",
                ),
            ),
        ),
    ),
    DatasetEntry(
        name="ag_news",
        kind="text",
        description="news titles and descriptions on four topics",
        classes=4,
        train=120_000,
        test=7_600,
        sources=(_AG_NEWS_URL,),
        licence="non-commercial use",
        citation="Zhang et al., NeurIPS 2015",
        loader=load_ag_news,
        published=Published(
            name="ag_news",
            layouts=(AG_NEWS_LAYOUT,),
            folders=("ag_news_csv",),
            files=(
                RemoteFile("train.csv", (f"{_AG_NEWS_URL}train.csv",), "md5:b1a00f826fdfbd249f79597b59e1dc12"),
                RemoteFile("test.csv", (f"{_AG_NEWS_URL}test.csv",), "md5:d52ea96a97a2d943681189a97654912d"),
            ),
        ),
    ),
    DatasetEntry(
        name="20newsgroups",
        kind="text",
        description="Usenet posts in 20 groups, split by date",
        classes=20,
        train=11_314,
        test=7_532,
        sources=("http://qwone.com/~jason/20Newsgroups/",),
        licence="not stated",
        citation="Lang, ICML 1995",
        loader=load_20newsgroups,
        published=Published(
            name="20newsgroups",
            layouts=NEWSGROUPS_LAYOUTS,
            folders=(),
            files=(
                RemoteFile(
                    "20news-bydate.tar.gz",
                    (
                        "https://ndownloader.figshare.com/files/5975967",
                        "http://qwone.com/~jason/20Newsgroups/20news-bydate.tar.gz",
                    ),
                    "sha256:8f1b2514ca22a5ade8fbb9cfa5727df95fa587f4c87b786e15c759fa66d95610",
                ),
            ),
        ),
    ),
)

_MEDICAL = tuple(
    DatasetEntry(
        name=images.name,
        kind="image",
        description=images.description,
        classes=len(images.classes),
        train=images.train,
        test=images.test,
        sources=("https://medmnist.com/",),
        licence=images.licence,
        citation="Yang et al., Scientific Data 2023",
        loader=partial(load_medmnist, images),
        published=Published(
            name=images.name,
            layouts=(((f"{images.name}.npz",),),),
            folders=("medmnist",),
            files=(RemoteFile(f"{images.name}.npz", (f"{MEDMNIST_URL}{images.name}.npz",), f"md5:{images.md5}"),),
        ),
    )
    for images in MEDMNIST
)

_WITH_SITES = (
    DatasetEntry(
        name="femnist",
        kind="image",
        description="handwritten digits and letters by 3,550 writers, 28×28 grey; LEAF's script makes the test part",
        classes=62,
        train=805_263,
        test=0,
        sources=("https://leaf.cmu.edu/",),
        licence="BSD 2-Clause (LEAF)",
        citation="Caldas et al., arXiv:1812.01097",
        loader=load_femnist,
        published=Published(
            name="femnist",
            layouts=(FEMNIST_LAYOUT,),
            folders=("data",),
            files=(),
            how_to_get=FEMNIST_HELP,
        ),
    ),
    DatasetEntry(
        name="fed-isic2019",
        kind="image",
        description="skin lesions from 6 centres, resized to 64×64 colour",
        classes=8,
        train=18_597,
        test=4_650,
        sources=("https://github.com/owkin/FLamby",),
        licence="CC BY-NC 4.0",
        citation="Ogier du Terrail et al., NeurIPS 2022",
        loader=load_fed_isic,
        published=Published(
            name="fed-isic2019",
            layouts=(ISIC_LAYOUT,),
            folders=("fed_isic2019",),
            files=(),
            how_to_get=ISIC_HELP,
        ),
    ),
)

DATASETS: dict[str, DatasetEntry] = {entry.name: entry for entry in (*_ENTRIES, *_MEDICAL, *_WITH_SITES)}
