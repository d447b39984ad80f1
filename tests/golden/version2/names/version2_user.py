"""Models, losses, metrics, data, algorithms and functions as users write them, in runs that version 2 named.

Never changed, except for the lines of the first block: where a module of this package is imported from does not count,
but every other line of a function or class here is part of a run's name.
"""

import functools
from dataclasses import dataclass

import networkx as nx
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import quasiglobal as qg
from quasiglobal import InputError, metrics, topology
from quasiglobal.algorithms import Edges, Needs, Node, Overlap, Wrapper, algorithm
from quasiglobal.algorithms.adam import DAdamW
from quasiglobal.algorithms.base import descend, momentum, zeros
from quasiglobal.algorithms.centralized import Centralized
from quasiglobal.algorithms.diloco import DiLoCo
from quasiglobal.algorithms.gossip import Gossip
from quasiglobal.algorithms.quasi_global import QGDSGDm
from quasiglobal.algorithms.sgd import DSGD, DSGDm
from quasiglobal.algorithms.slowmo import SlowMo
from quasiglobal.data import Dataset as Loaded
from quasiglobal.data.dataset import Examples
from quasiglobal.metrics import accuracy, f1, lower, mse
from quasiglobal.models import NORMS, build
from quasiglobal.models.language import LanguageModel
from quasiglobal.models.layers import convolution, scaled
from quasiglobal.models.norms import EvoNormS0, Norm, group_norm
from quasiglobal.models.resnet import BasicBlock, ResNet
from quasiglobal.models.vgg import VGG11
from quasiglobal.stacked.layout import Stacking
from quasiglobal.topology import ring

# ------------------------------------------------------------------------------------------------ models


def settled(module: nn.Module) -> nn.Module:
    """Give a module weights that every CPU computes alike: multiples of 1/8."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_((torch.arange(parameter.numel()) % 7 - 3).view(parameter.shape) / 8)
    return module


class Net(nn.Module):
    """A network with the package's layers."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        channels = scaled(4, width)
        self.first = convolution(1, channels, bias=True)
        self.norm = EvoNormS0(channels)
        self.block = BasicBlock(channels, channels, 1, NORMS["gn"])
        self.head = nn.Linear(channels, 3)
        settled(self)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4:
            raise InputError("give images")
        return self.head(self.block(self.norm(self.first(x))).mean(dim=(2, 3)))


class Headed(ResNet):
    """A residual network with a norm of its own."""

    scale = 0.5

    def __init__(self) -> None:
        super().__init__(convolution(1, 4), [4, 4], 1, Norm(group_norm, group_norm, nn.Identity), 3)
        settled(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class Gentle(EvoNormS0):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


class Plain(VGG11):
    pass


class Stacked(nn.Module):
    """A network that says how copies of it are stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = settled(nn.Linear(64, 3))
        self.stacking = Stacking(autograd="outside", draws=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))


class Counting(nn.Module):
    """Temporary statistics that a step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = settled(nn.Linear(64, 3))
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + 1
        return self.layer(x.flatten(1))


class Around(nn.Module):
    """Any module, and a linear layer after it."""

    def __init__(self, inner: nn.Module, outputs: int) -> None:
        super().__init__()
        self.inner, self.head = inner, settled(nn.Linear(outputs, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


class Dicts(nn.Module):
    """Two inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = settled(nn.Linear(5, 3)), settled(nn.Linear(3, 3))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.a(a) + self.b(b)


def linear() -> nn.Module:
    return settled(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))


def built(name: str, norm: str | None, width: float = 0.25, side: int = 8) -> nn.Module:
    return settled(build(name, norm=norm, width=width, classes=3, shape=(1, side, side)))


def lazy() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    module(pixels(2))
    return settled(module)


def tiny_transformer(adapters: bool = False) -> nn.Module:
    """A BERT of one layer, made without a download."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=8, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    if adapters:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    return settled(model)


class Texts(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits


# ------------------------------------------------------------------------------------------------ data


def pixels(count: int = 40, *shape: int) -> Tensor:
    shape = shape or (1, 8, 8)
    return (torch.arange(count * int(np.prod(shape))) % 11 - 5).view(count, *shape) / 8


def images(count: int = 40) -> tuple[Tensor, Tensor]:
    return pixels(count), torch.arange(count) % 3


def ones() -> Tensor:
    """Pixels with mean 0 and standard deviation 1, exactly."""
    return ((torch.arange(40 * 64) + torch.arange(40 * 64) // 64) % 2 * 2.0 - 1).view(40, 1, 8, 8)


def numbers(count: int = 40) -> tuple[Tensor, Tensor]:
    x = pixels(count, 5)
    return x, x.sum(dim=1, keepdim=True)


def answers(count: int = 40) -> tuple[Tensor, Tensor]:
    x = pixels(count, 5)
    return x, (x[:, :2] > 0).float()


def ids(count: int = 40) -> tuple[Tensor, Tensor]:
    return torch.arange(count * 4).view(count, 4) % 15 + 1, torch.arange(count) % 3


class Flipped(Dataset):
    """Random flips, drawn anew in each epoch."""

    def __init__(self, x: Tensor, y: Tensor, chance: float = 0.5) -> None:
        self.x, self.y, self.chance = x, y, chance

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = self.x[index]
        return (x.flip(-1) if torch.rand(()) < self.chance else x), int(self.y[index])


class Part(Dataset):
    """A part of a data set of this package."""

    def __init__(self, data: Loaded, split: Examples) -> None:
        self.data, self.split = data, split

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.split.x[index] / self.data.scale, int(self.split.y[index])


def part(loaded: Loaded) -> Part:
    return Part(loaded, loaded.train)


data = {"train": images(), "test": images(10)}

# ------------------------------------------------------------------------------------------------ losses and metrics


def robust(output: Tensor, target: Tensor) -> Tensor:
    return (mse(output, target) + 1).sqrt().mean()


def sharp(output: Tensor, target: Tensor, power: float = 2.0) -> Tensor:
    return (functional.cross_entropy(output, target, reduction="none") ** power).mean()


class Weighted(nn.Module):
    """A loss with class weights."""

    def __init__(self, *weights: float) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor(weights))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target, self.weights)


def wrong(output: Tensor, target: Tensor) -> Tensor:
    return 1 - accuracy(output, target)


def by_module(output: Tensor, target: Tensor) -> Tensor:
    return metrics.accuracy(output, target) * qg.metrics.top5(output, target)


class Micro(type(f1)):
    """F1 with another default."""

    average = "micro"


class Total:
    """A metric over all examples."""

    lower = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.sum, self.count = self.sum + float(mse(output, target).sum()), self.count + len(target)

    def compute(self) -> float:
        return self.sum / max(1, self.count)


# ------------------------------------------------------------------------------------------------ algorithms


class Sign(qg.Algorithm):
    """A class without options."""

    def step(self, x, g, state, node):
        return node.mix(x - node.lr * g.sign()), state


@dataclass(frozen=True, kw_only=True)
class Heavy(qg.Algorithm):
    """A data class with options, and functions of the package."""

    beta: float = 0.9
    nesterov: bool = False

    @property
    def needs(self) -> Needs:
        return Needs(fixed=True, loss="harmed")

    def init(self, x: Tensor) -> dict[str, Tensor]:
        return zeros(x, "m")

    def step(self, x: Tensor, g: Tensor, state: dict[str, Tensor], node: Node) -> tuple[Tensor, dict[str, Tensor]]:
        m, direction = momentum(state["m"], g, self.beta, self.nesterov)
        return node.mix(descend(x, node.lr, direction)), {"m": m}


@dataclass(frozen=True, kw_only=True)
class Later(QGDSGDm):
    """A built-in algorithm with a further option."""

    pause: int = 2

    def step(self, x, g, state, node):
        return super().step(x, g / self.pause, state, node)


@dataclass(frozen=True, kw_only=True)
class Twice(Wrapper):
    """A wrapper that scales the gradients of its base."""

    factor: float = 2.0

    def step(self, x, g, state, node):
        return self.base.step(x, self.factor * g, state, node)


class Edgewise(qg.Algorithm):
    """State per edge."""

    def init_edges(self, x: Tensor, edges: Edges) -> dict[str, Tensor]:
        return {"z": x[:, None] * edges.senders}

    def step(self, x, g, state, node):
        if not isinstance(node.edges, Edges):
            raise InputError("no edges")
        return node.mix(x - node.lr * g), state


class Named(qg.Algorithm):
    """Another algorithm by its name."""

    def step(self, x, g, state, node):
        return algorithm("dsgd").step(x, g, state, node)


# ------------------------------------------------------------------------------------------------ functions


def halves(targets, n, rng):
    return np.array_split(rng.permutation(len(targets)), n)


def like_a_ring(targets, n, rng):
    return np.array_split(np.arange(len(targets)), ring(n).n)


def like_the_package(targets, n, rng):
    return qg.data.split(np.arange(len(targets)) % 2, n, "iid")


class Shares:
    """A partition that is an object."""

    def __init__(self, *shares: float) -> None:
        self.shares = shares

    def __call__(self, targets, n, rng):
        ends = np.cumsum(self.shares)[:-1] * len(targets)
        return np.split(np.arange(len(targets)), ends.astype(int))


def by_step(t):
    return 0.1 / t


def cooling(done, floor=0.25):
    return max(floor, 1 - done)


def holding(thing):
    """A schedule that refers to a thing."""

    def schedule(done):
        return 1.0 if thing is not None else 0.5

    return schedule


def drawn(t):
    return topology.complete(4).weights(1) if t % 2 else np.eye(4)


# ------------------------------------------------------------------------------------------------ runs


def plain(**changes):
    """A task that trains in milliseconds, with other parts."""
    given = {"model": linear(), "loss": functional.cross_entropy, "train": images(), "name": ""} | changes
    return qg.Task(**given)


def known(name, norm, width=0.25, side=8):
    """The arguments for a network of the package."""
    return {"task": plain(model=built(name, norm, width, side), train=(pixels(20, 1, side, side), images(20)[1]))}


def regression(**changes):
    return plain(**{"model": settled(nn.Linear(5, 1)), "loss": functional.mse_loss, "train": numbers()} | changes)


def trained_once():
    """A model that a run returned."""
    run = qg.train(plain(model=Counting()), "dsgd", "ring:4", epochs=1, steps=1, batch=4, lr=0.125, device="cpu")
    return settled(run.average())


def weighted_path():
    graph = nx.path_graph(4)
    nx.set_edge_attributes(graph, 0.25, "weight")
    return graph


RUNS = {
    # models
    "a module": lambda: {"task": plain()},
    "a function": lambda: {"task": plain(model=linear)},
    "a class": lambda: {"task": plain(model=Net)},
    "a partial": lambda: {"task": plain(model=functools.partial(built, "resnet8", norm="gn"))},
    "layers of the package": lambda: {"task": plain(model=Net(0.5))},
    "a subclass of ResNet": lambda: {"task": plain(model=Headed())},
    "a subclass of EvoNormS0": lambda: {"task": plain(model=nn.Sequential(Gentle(1), linear()))},
    "a subclass of VGG11": lambda: {
        "task": plain(model=settled(Plain("none", 0.05, 3, (1, 32, 32))), train=(pixels(20, 1, 32, 32), images(20)[1]))
    },
    "a ResNet inside a module": lambda: {"task": plain(model=Around(built("resnet8", "evonorm-released"), 3))},
    "declared stacking": lambda: {"task": plain(model=Stacked())},
    "temporary state": lambda: {"task": plain(model=Counting())},
    "lazy layers": lambda: {"task": plain(model=lazy())},
    "a model of an earlier run": lambda: {"task": plain(model=trained_once())},
    "a class with the name of another": lambda: {"task": plain(model=Net(0.5), name="net of two words: 2")},
    **{
        f"{name} with {norm}": functools.partial(known, name, norm)
        for name, norm in [
            ("cnn", "bn"), ("cnn", "gn"), ("cnn", "evonorm"), ("cnn", "evonorm-released"), ("cnn", "none"),
            ("mlp", "none"), ("resnet8", "bn"), ("resnet8", "evonorm"), ("resnet8", "evonorm-first-release"),
            ("resnet18", "gn"),
        ]
    },
    **{
        f"{name} of 32 pixels": functools.partial(known, name, None, width=0.05, side=32)
        for name in ("vgg11", "vgg11-dropout")
    },
    # data
    "data of the package": lambda: {
        "task": plain(model=settled(nn.Sequential(nn.Flatten(), nn.Linear(64, 10))), train=qg.data.load("digits"))
    },
    "normalised arrays": lambda: {
        "task": plain(train=qg.data.from_arrays(ones(), images()[1], ones(), images()[1], name="a x b", normalise=True))
    },
    "NumPy arrays": lambda: {"task": plain(train=tuple(part.numpy() for part in images()))},
    "a Dataset": lambda: {"task": plain(train=TensorDataset(*images()), test=TensorDataset(*images(10)))},
    "a Dataset read anew": lambda: {"task": plain(train=Flipped(*images()), cache=False)},
    "a Dataset read from the disk": lambda: {"task": plain(train=Flipped(*images()), memory_limit=0)},
    "a Dataset around one of the package": lambda: {
        "task": plain(train=part(qg.data.from_arrays(*images())), cache=False)
    },
    "a Dataset around that of a task": lambda: {
        "task": plain(train=Part(plain(train=Flipped(*images()), cache=False).data, plain().data.train), cache=False)
    },
    "a list": lambda: {"task": plain(train=[images(12), images(20), images(15), images(10)])},
    "a list of Datasets read anew": lambda: {
        "task": plain(train=[Flipped(*images(count)) for count in (12, 20, 15, 10)], cache=False)
    },
    "a dict of inputs": lambda: {
        "task": plain(model=Dicts(), train=({"a": pixels(40, 5), "b": pixels(40, 3)}, images()[1]))
    },
    # losses
    "another known loss": lambda: {"task": regression(loss=functional.huber_loss)},
    "a loss that uses a metric": lambda: {"task": regression(loss=robust)},
    "a loss with an option": lambda: {"task": plain(loss=functools.partial(sharp, power=1.5))},
    "a loss of torch": lambda: {"task": plain(loss=nn.CrossEntropyLoss(label_smoothing=0.125))},
    "a loss with weights": lambda: {"task": plain(loss=Weighted(0.5, 1.0, 2.0))},
    # metrics
    "known metrics": lambda: {"task": plain(metrics={"top5": metrics.top5, "accuracy": accuracy})},
    "known metrics with other names": lambda: {"task": plain(metrics={"share": accuracy, "best five": metrics.top5})},
    "metrics with options": lambda: {
        "task": plain(metrics={"micro": f1(average="micro"), "macro": f1(), "area": metrics.auc()})
    },
    "a subclass of a metric": lambda: {"task": plain(metrics={"micro": Micro()})},
    "metrics marked as lower": lambda: {
        "task": plain(metrics={"wrong": lower(wrong), "less": lower(accuracy), "f1": lower(f1)})
    },
    "a metric of a module": lambda: {"task": plain(metrics={"both": by_module})},
    "errors": lambda: {"task": regression(metrics={"mae": metrics.mae, "squares": mse, "total": Total()})},
    "the area of yes": lambda: {
        "task": plain(model=settled(nn.Linear(5, 2)), loss=functional.binary_cross_entropy_with_logits, train=answers(),
                      metrics={"area": metrics.auc(), "bound": lower(functools.partial(mse))})
    },
    "no metric": lambda: {"task": plain(metrics={})},
    # algorithms
    "an algorithm": lambda: {"algorithm": Sign()},
    "an algorithm as a class": lambda: {"algorithm": Sign},
    "an algorithm with options": lambda: {"algorithm": Heavy(beta=0.5, nesterov=True)},
    "a subclass of an algorithm": lambda: {"algorithm": Later(mu=0.5)},
    "a wrapper around a known algorithm": lambda: {"algorithm": Twice(base=QGDSGDm(nesterov=True))},
    "a wrapper around an own algorithm": lambda: {"algorithm": Twice(base=Heavy())},
    "a known wrapper around an own algorithm": lambda: {"algorithm": SlowMo(base=Heavy())},
    "a known wrapper around one with options": lambda: {"algorithm": SlowMo(base=DSGDm(beta=0.75), tau=3)},
    "a centralized own algorithm": lambda: {"algorithm": Centralized(base=Later())},
    "an outer optimizer around one with options": lambda: {"algorithm": DiLoCo(base=DAdamW(beta1=0.75), tau=2)},
    "gossip with an own algorithm": lambda: {"algorithm": Gossip(base=Heavy(beta=0.5))},
    "an overlapping algorithm": lambda: {"algorithm": Overlap(base=DSGD())},
    "an algorithm with state per edge": lambda: {"algorithm": Edgewise()},
    "an algorithm by its name": lambda: {"algorithm": Named()},
    "a known algorithm with options": lambda: {"algorithm": QGDSGDm(nesterov=True, mu=0.5)},
    # topologies
    "a known topology": lambda: {"topology": topology.one_peer_exponential(4)},
    "a graph of networkx": lambda: {"topology": nx.star_graph(3)},
    "a graph with weights": lambda: {
        "topology": topology.from_graph(weighted_path(), weight="weight", name="path of 4")
    },
    "neighbours": lambda: {"topology": {0: [1, 2], 1: [2], 2: [3], 3: [0]}},
    "matrices": lambda: {"topology": topology.from_matrices([np.full((4, 4), 0.25), np.eye(4)], name="now and then")},
    "a function of the step": lambda: {"topology": topology.from_function(drawn, name="odd steps")},
    "a random topology": lambda: {"topology": topology.matching(4, seed=3)},
    # partitions and schedules
    "a partition": lambda: {"partition": halves},
    "a partition that uses a topology": lambda: {"partition": like_a_ring},
    "a partition that uses the package": lambda: {"partition": like_the_package},
    "a partition that is an object": lambda: {"partition": Shares(0.1, 0.2, 0.3, 0.4)},
    "a partition that is a lambda": lambda: {
        "partition": lambda targets, n, rng: np.array_split(np.arange(len(targets))[::-1], n)
    },
    "a rate by step": lambda: {"lr": by_step},
    "a schedule": lambda: {"schedule": cooling},
    "a schedule with an option": lambda: {"schedule": functools.partial(cooling, floor=0.5)},
    # fields
    "fields": lambda: {
        "alpha": 0.5, "seed": 3, "precision": "fp64", "clip": 1.0, "weight_decay": 0.25, "drop": 0.125, "churn": 0.0625,
        "weights": "1,2,3,4", "eval_every": 2, "epochs": 4, "communication": "merge@end",
    },
    "a recipe": lambda: {"recipe": "cifar10", "epochs": 2},
}
"""The arguments of `qg.train`, besides those that are alike in all runs."""


LANGUAGE = {
    "transformers": lambda: {"task": plain(model=Texts(tiny_transformer()), train=ids())},
    "adapters of peft": lambda: {"task": plain(model=Texts(tiny_transformer(adapters=True)), train=ids())},
    "a transformer of the package": lambda: {
        "task": plain(model=LanguageModel(tiny_transformer(), pad=0), train=ids())
    },
}
"""The same, with transformers and peft."""
