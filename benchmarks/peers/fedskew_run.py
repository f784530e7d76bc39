"""fedskew, through its public interface, with every other setting at its default."""

from __future__ import annotations

import numpy as np
from work import CLASSES, LEARNING_RATE, MOMENTUM, SHAPE, RoundTimes, Task, read_task

import fedskew as fs

TEST_SAMPLES = 100


def make_federation(task: Task) -> fs.Federation:
    images, labels = task.work.data()
    rows = np.arange(labels.size)
    train = fs.Samples(images.reshape(-1, *SHAPE), labels.reshape(-1))
    names = tuple(str(label) for label in range(CLASSES))
    dataset = fs.Dataset("random", "image", names, train, train.select(rows[:TEST_SAMPLES]))
    clients = tuple(np.split(rows, task.work.clients))
    return fs.Federation(dataset, clients, {"name": "iid", "clients": task.work.clients}, seed=0)


def main() -> None:
    task = read_task("fedskew")
    times = RoundTimes()
    from torch_parts import CNN, count_parameters

    class Clock(fs.Callback):
        def on_round(self, row: fs.RoundRow, rounds_ahead: int) -> None:  # noqa: ARG002
            if row.round:
                times.end_round()

    result = fs.run(
        make_federation(task), "fedavg", CNN(), callbacks=[Clock()], rounds=task.rounds, eval_every=task.rounds,
        clients_per_round=task.work.participants, local_epochs=task.work.epochs, batch_size=task.work.batch_size,
        lr=LEARNING_RATE, momentum=MOMENTUM, device=task.device, precision=task.precision,
    )  # fmt: skip
    times.print_json("fedskew", fs.__version__, count_parameters(result.model))


if __name__ == "__main__":
    main()
