"""The map of clients and classes in the terminal, as a picture and as counts."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedskew.data import IID, Counts, Dirichlet, Federation, OneClass, federation
from fedskew.data.dataset import Dataset, Samples
from fedskew.errors import UserError
from fedskew.report.partition_map import PartitionMap, class_table, save_map


def toy(classes: int, each: int = 500) -> Dataset:
    labels = np.repeat(np.arange(classes), each)
    samples = Samples(np.zeros((len(labels), 1), np.float32), labels)
    return Dataset("toy $1$", "table", tuple(f"kind-{c}, $x_$" for c in range(classes)), samples, samples)


def lines(renderable: object, width: int = 80, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding)
    Console(file=file, width=width).print(renderable)
    file.seek(0)
    return file.read().splitlines()


@pytest.mark.parametrize("width", [20, 80, 120])
@pytest.mark.parametrize(("clients", "classes"), [(10, 10), (100, 10), (10, 100), (100, 100), (2, 2)])
def test_the_map_stays_within_the_terminal(clients: int, classes: int, width: int) -> None:
    drawn = lines(PartitionMap(federation(toy(classes), Dirichlet(clients, 0.3))), width)
    assert max(map(len, drawn)) <= width
    assert len(drawn) <= 140


def test_small_maps_write_the_counts_and_leave_vacant_classes_blank() -> None:
    drawn = lines(PartitionMap(federation(toy(4), OneClass(4))))
    for client, line in enumerate(drawn[1:5]):
        assert line.split() == ["client", str(client), "500"]


def test_every_client_of_a_hundred_is_shaded_in_its_own_class_only() -> None:
    drawn = lines(PartitionMap(federation(toy(10), OneClass(100))), width=120)
    rows = [line[13:113] for line in drawn if "kind-" in line]
    assert len(rows) == 10
    for label, row in enumerate(rows):
        assert [k for k, mark in enumerate(row) if mark != " "] == list(range(label, 100, 10))


def test_numbers_down_the_side_say_what_they_number() -> None:
    drawn = lines(PartitionMap(federation("digits", Dirichlet(20, 0.3))))
    assert [line[:7] for line in drawn[2:12]] == [f"class {label}" for label in range(10)]


def test_what_is_cropped_is_said() -> None:
    drawn = lines(PartitionMap(federation(toy(100, 1000), IID(5000))))
    assert "... and 4933 more clients" in drawn


def test_an_ascii_terminal_gets_ascii() -> None:
    drawn = lines(PartitionMap(federation(toy(10), Dirichlet(100, 0.3))), encoding="ascii")
    assert all(line.isascii() for line in drawn)


def test_the_table_names_each_clients_classes() -> None:
    drawn = lines(class_table(federation(toy(3), OneClass(3))), width=100)
    row = next(line for line in drawn if line.startswith("│      1"))
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["1", "500", "kind-0, $x_$, kind-2, $x_$", "-", "kind-1, $x_$"]


def test_the_table_draws_runs_of_many_classes_together() -> None:
    drawn = lines(class_table(federation(toy(30), OneClass(30))), width=100)
    row = next(line for line in drawn if line.startswith("│      7"))
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["7", "500", "0-6, 8-29", "-", "7"]


@pytest.mark.parametrize("clients", [10, 60])
def test_pictures_are_what_their_names_say(tmp_path: Path, clients: int) -> None:
    fed = federation(toy(10), Dirichlet(clients, 0.5))
    save_map(fed, tmp_path / "maps" / "map.png")
    save_map(fed, tmp_path / "maps" / "map.svg")
    assert (tmp_path / "maps" / "map.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "maps" / "map.svg").read_text()


def test_an_empty_restriction_can_be_drawn(tmp_path: Path) -> None:
    empty = federation(toy(3), OneClass(3)).restrict([])
    save_map(empty, tmp_path / "empty.png")
    assert lines(PartitionMap(empty))[1].split() == ["client", "0"]


def test_the_saved_counts_are_a_partition(tmp_path: Path) -> None:
    fed: Federation = federation(toy(10), Dirichlet(20, 0.3))
    save_map(fed, tmp_path / "counts.csv")
    again = federation(toy(10), Counts(tmp_path / "counts.csv"))
    assert (again.label_counts == fed.label_counts).all()


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected \.png, \.svg, \.pdf or \.csv"):
        save_map(federation(toy(3), IID(2)), tmp_path / "map.bmp")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        save_map(federation(toy(3), IID(2)), tmp_path / "file" / "map.csv")
