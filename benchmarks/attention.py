"""Compare `plain` and `stacked` on a CPU for small transformers: CPU seconds of a run, taken in turns.

`engine/choice.py` takes its limit for attention from this table: python benchmarks/attention.py
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor, nn

import fedskew as fs
from fedskew.data.dataset import Dataset, Samples
from fedskew.engine.choice import count_multiplications

CLIENTS, SAMPLES, WORDS, CLASSES = 10, 40, 500, 4
SIZES = ((32, 16), (64, 16), (64, 32), (128, 64))
REPEATS = 3


class Encoder(nn.Module):
    """A transformer encoder with two layers, as PyTorch has it."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.embedding, self.place = nn.Embedding(WORDS, width), nn.Parameter(torch.zeros(length, width))
        self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embedding(tokens) + self.place).mean(dim=1))
        return logits


def bert(width: int, length: int) -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=width, num_hidden_layers=2, num_attention_heads=4, intermediate_size=4 * width,
        max_position_embeddings=length, num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


def seconds(federation: fs.Federation, model: nn.Module, engine: str) -> float:
    began = time.process_time()
    fs.run(federation, "fedavg", model, engine=engine, device="cpu", rounds=2, local_epochs=2, batch_size=20)
    return time.process_time() - began


def main() -> None:
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    print("| model | width × length | multiplications per sample | stacked / plain |\n|---|---|---|---|")
    for name, make in (("TransformerEncoder", Encoder), ("BERT", bert)):
        for width, length in SIZES:
            samples = Samples(
                random.integers(0, WORDS, (CLIENTS * SAMPLES, length)), np.arange(CLIENTS * SAMPLES) % CLASSES
            )
            dataset = Dataset("random", "text", tuple("abcd"), samples, samples.select(np.arange(8)), vocabulary=WORDS)
            federation, model = fs.federation(dataset, fs.IID(clients=CLIENTS)), make(width, length)
            spent: dict[str, list[float]] = {"plain": [], "stacked": []}
            for _ in range(REPEATS):
                for engine, times in spent.items():
                    times.append(seconds(federation, model, engine))
            adapted = fs.ModelAdapter(model)
            work = count_multiplications(adapted, torch.zeros(1, length, dtype=torch.int64)) / 1e6
            ratio = min(spent["stacked"]) / min(spent["plain"])
            print(f"| {name} | {width} × {length} | {work:.1f} million | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
