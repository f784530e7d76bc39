"""Text datasets: AG News and 20 Newsgroups. The vocabulary also encodes users' own text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedskew.data.csv_files import read_csv
from fedskew.data.dataset import Dataset, Samples
from fedskew.errors import UserError, plural

LENGTH = 200
"""The default maximum number of words kept from each text."""
VOCABULARY = 98_635
"""The default maximum number of token ids, as in FedVLS's code."""
PAD, UNKNOWN = 0, 1

IntArray = npt.NDArray[np.int64]
LabelledTexts = tuple[Sequence[str], IntArray]
"""Texts and their class numbers."""

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


def _csv_names(*stems: str) -> tuple[str, ...]:
    return tuple(f"{stem}.csv{packed}" for stem in stems for packed in ("", ".gz", ".xz"))


AG_NEWS_LAYOUT = (_csv_names("train", "train_*"), _csv_names("test", "test_*"))
"""Patterns for the name of the training file, and for the name of the test file."""
AG_NEWS_CLASSES = ("World", "Sports", "Business", "Sci/Tech")
NEWSGROUPS_LAYOUTS = (
    (_csv_names("train", "20newsgroups-train"), _csv_names("test", "20newsgroups-test")),
    (("20news-bydate-train",), ("20news-bydate-test",)),
)
NEWSGROUPS_CLASSES = (
    "alt.atheism",
    "comp.graphics",
    "comp.os.ms-windows.misc",
    "comp.sys.ibm.pc.hardware",
    "comp.sys.mac.hardware",
    "comp.windows.x",
    "misc.forsale",
    "rec.autos",
    "rec.motorcycles",
    "rec.sport.baseball",
    "rec.sport.hockey",
    "sci.crypt",
    "sci.electronics",
    "sci.med",
    "sci.space",
    "soc.religion.christian",
    "talk.politics.guns",
    "talk.politics.mideast",
    "talk.politics.misc",
    "talk.religion.misc",
)


def words(text: str) -> list[str]:
    """Split a text into lower-case words of letters and digits. Apostrophes within words are kept."""
    return _WORD.findall(text.lower())


class Vocabulary:
    """The most frequent words of the training texts. Words with equal counts are in alphabetical order.

    Id 0 is padding, and id 1 is any word outside the vocabulary. There are at most `cap` ids, for `cap` − 2 words.
    """

    def __init__(self, texts: Sequence[str], cap: int = VOCABULARY) -> None:
        _check_whole_number("vocabulary", cap, 3)
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(words(text))
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        self.ids = {word: number for number, word in enumerate(ranked[: cap - 2], UNKNOWN + 1)}

    def __len__(self) -> int:
        return len(self.ids) + 2

    def encode(self, texts: Sequence[str], length: int = LENGTH) -> IntArray:
        """Encode the first `length` words of each text. A text without words becomes one unknown word."""
        _check_whole_number("length", length, 1)
        out = np.full((len(texts), length), PAD, dtype=np.int64)
        for row, text in enumerate(texts):
            ids = [self.ids.get(word, UNKNOWN) for word in words(text)[:length]] or [UNKNOWN]
            out[row, : len(ids)] = ids
        return out


def text_dataset(
    name: str,
    classes: tuple[str, ...],
    train: LabelledTexts,
    test: LabelledTexts,
    length: int = LENGTH,
    vocabulary: int = VOCABULARY,
) -> Dataset:
    """Make a dataset of texts and labels. The vocabulary comes from the training part only."""
    known = Vocabulary(train[0], vocabulary)
    return Dataset(
        name=name,
        kind="text",
        classes=classes,
        train=Samples(known.encode(train[0], length), train[1]),
        test=Samples(known.encode(test[0], length), test[1]),
        vocabulary=len(known),
        words=tuple(known.ids),
    )


def load_ag_news(files: list[Path], *, length: int = LENGTH, vocabulary: int = VOCABULARY) -> Dataset:
    """Load rows with a class (1 to 4), a title and a description. Further columns are ignored."""
    train, test = (_ag_news_part(path) for path in files)
    return text_dataset("ag_news", AG_NEWS_CLASSES, train, test, length, vocabulary)


def load_20newsgroups(files: list[Path], *, length: int = LENGTH, vocabulary: int = VOCABULARY) -> Dataset:
    """Load the by-date split from rows with a class and a text, or from the publisher's folders of messages."""
    train, test = (_newsgroups_folder(path) if path.is_dir() else _newsgroups_csv(path) for path in files)
    return text_dataset("20newsgroups", NEWSGROUPS_CLASSES, train, test, length, vocabulary)


def _ag_news_part(path: Path) -> LabelledTexts:
    rows = read_csv(path)
    if rows and rows[0][1][0].strip().lower() == "class index":  # some copies have a header
        rows = rows[1:]
    texts, labels = [], []
    for line, cells in rows:
        if len(cells) < 3:
            found = plural(len(cells), "column")
            raise UserError(f"{path}: line {line} has {found}; expected class, title, description")
        if cells[0].strip() not in ("1", "2", "3", "4"):
            raise UserError(f"{path}: class {cells[0]!r} in line {line}; expected 1 to 4")
        texts.append(f"{cells[1]} {cells[2]}")
        labels.append(int(cells[0]) - 1)
    return texts, np.array(labels, dtype=np.int64)


def _newsgroups_csv(path: Path) -> LabelledTexts:
    label_of = {name: label for label, name in enumerate(NEWSGROUPS_CLASSES)}
    texts, labels = [], []
    for line, cells in read_csv(path):
        if len(cells) < 2:
            raise UserError(f"{path}: line {line} has one column; expected class, text")
        if cells[0] not in label_of:
            raise UserError(f"{path}: class {cells[0]!r} in line {line}; expected a newsgroup, for example 'sci.med'")
        texts.append(cells[1])
        labels.append(label_of[cells[0]])
    return texts, np.array(labels, dtype=np.int64)


def _newsgroups_folder(folder: Path) -> LabelledTexts:
    texts, labels = [], []
    for label, name in enumerate(NEWSGROUPS_CLASSES):
        for path in sorted((folder / name).glob("*")):
            if path.is_file() and not path.name.startswith("."):  # .DS_Store of macOS is no message
                texts.append(path.read_text(encoding="latin-1"))
                labels.append(label)
    return texts, np.array(labels, dtype=np.int64)


def _check_whole_number(option: str, value: object, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < at_least:
        raise UserError(f"{option} is {value!r}; expected a whole number ≥ {at_least}")
