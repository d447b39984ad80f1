"""Print the bytes that a node sends, for typical models: the table in docs/deploy.md.

    python benchmarks/bytes.py

The algorithm is qg-dsgdm-n on a ring: a step sends the trained parameters, in fp32, to two neighbours. Needs the extra
nlp for its models, which are made from their configurations: nothing is downloaded.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    ResNetConfig,
    ResNetForImageClassification,
)

import quasiglobal as qg
from quasiglobal.cli.terminal import size_in_words
from quasiglobal.engines.costs import traffic
from quasiglobal.models import build
from quasiglobal.models.language import freeze
from quasiglobal.peers.bandwidth import ON_THE_WIRE, read_bandwidth
from quasiglobal.runs.estimate import DAY

NEIGHBOURS, LINK = 2, "50mbit"


def minilm(train: str) -> nn.Module:
    """MiniLM-L6, for four classes."""
    size = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}
    model = BertForSequenceClassification(BertConfig(num_labels=4, **size))
    freeze(model, train)
    return model


MODELS = {
    "`cnn`, 8 × 8 digits": lambda: build("cnn", shape=(1, 8, 8)),
    "`resnet20`, 32 × 32 images": lambda: build("resnet20", norm="evonorm"),
    "MiniLM-L6, `train = \"lora:8\"`": lambda: minilm("lora:8"),
    "MiniLM-L6": lambda: minilm("all"),
    "ResNet-50": lambda: ResNetForImageClassification(ResNetConfig(num_labels=1000)),
    "DistilBERT": lambda: DistilBertForSequenceClassification(DistilBertConfig(num_labels=4)),
}


def table() -> str:
    """The table in Markdown."""
    models_a_step = NEIGHBOURS * traffic(qg.algorithm("qg-dsgdm-n")).neighbours
    lines = [
        "| model | parameters sent | per step | per day, at one step per second | steps per second through 50 Mbit/s |",
        "|---|---|---|---|---|",
    ]
    for name, make in MODELS.items():
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in make().parameters() if parameter.requires_grad)
        step = float(models_a_step * size * torch.float32.itemsize)
        most = read_bandwidth(LINK) / (ON_THE_WIRE * step)
        lines.append(f"| {name} | {size:,} | {size_in_words(step)} | {size_in_words(DAY * step)} | {most:.2g} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
