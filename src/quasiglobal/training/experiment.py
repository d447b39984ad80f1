"""What to run, all of it: one frozen dataclass. Its hash names the run.

Whether two experiments are the same, differ in the seed alone, or can share a program is answered here and nowhere
else.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
import typing
from collections.abc import Callable, Hashable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar

from quasiglobal.algorithms import algorithm
from quasiglobal.algorithms.base import checked
from quasiglobal.algorithms.centralized import Centralized
from quasiglobal.engines.faults import check_probability
from quasiglobal.errors import InputError, unknown, whole
from quasiglobal.models.language.adapters import rank_of
from quasiglobal.models.language.loading import PREFIX
from quasiglobal.topology import count_nodes, parse
from quasiglobal.training.schedule import scaled_lr


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that changes the result. Where it runs, and on how many rows at once, does not."""

    data: str = "digits"
    """digits, fashion-mnist, cifar10, imagenet32, imagenet, folder:PATH; texts: agnews, sst2, csv:PATH; own where every
    node brings its own."""
    model: str = "cnn"
    """cnn, mlp, resnet20 (any depth 6k + 2), resnet18, vgg11, hf:NAME or hf:FOLDER, or your own package.module:Name."""
    norm: str | None = None
    """bn, gn, evonorm, evonorm-released or none; by default the model's own."""
    width: float = 1.0
    """Times the model's usual number of channels."""
    bn: Literal["shared", "local"] = "shared"
    """Whether BatchNorm's weights are gossiped; local keeps all of it at the node (FedBN)."""
    algorithm: str = "qg-dsgdm-n"
    """An algorithm with its options; `qg algorithms` lists them."""
    topology: str = "ring:16"
    """Who talks to whom; `qg topology ring:16` explains one."""
    partition: str = "dirichlet"
    """dirichlet, dirichlet-plain, iid, shards:K, by:COLUMN, or whole: every node has all the data there is."""
    alpha: float = 0.1
    """Dirichlet's concentration: 10 is nearly uniform, 0.1 very heterogeneous."""
    epochs: int = 30
    """Passes of each node through its own data."""
    batch: int = 32
    """Examples a node takes a step."""
    steps: int = 0
    """Steps of one epoch; 0: once through a node's data, on average over the nodes. (`qg.minimize(steps=…)` counts all
    steps of a run.)"""
    lr: float | None = None
    """The peak learning rate; by default 0.1 for each 64 examples of the global batch."""
    warmup: float = 5.0
    """Epochs of linear warm-up from `warmup_from`, where the peak is above it."""
    warmup_from: float = 0.1
    """Where the warm-up starts."""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """Fractions of the run after which the learning rate is multiplied by `decay`; none: constant."""
    decay: float = 0.1
    """See milestones."""
    weight_decay: float = 1e-4
    """L2, into the gradient, for all parameters."""
    augment: bool = True
    """Random flips and crops, where the data set has them."""
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    """bf16 is autocast inside the model; parameters, momentum and mixing stay float32."""
    eval_every: int = 1
    """Epochs between tests; the last epoch is always tested. The best score depends on it."""
    seed: int = 0
    """Draws the partition, the start, the order of the data and the faults."""
    drop: float = 0.0
    """The probability that a message to a neighbour is lost; its weight returns to the receiver. Simulator only."""
    churn: float = 0.0
    """The probability that a node is away for a window of 20 steps, with its own data alone. Simulator only."""
    wire: Literal["full", "bf16"] = "full"
    """How models travel: as they are, or rounded to 16 bits, which quasi-global methods do not stand."""
    classes: tuple[str, ...] = ()
    """The names of the classes, in order, where several owners have to agree on them; by default the data's."""
    shape: tuple[int, ...] = ()
    """What the model sees of one example, as channels, height, width; by default the data's. Of a text: how many
    tokens, by default 128."""
    mean: tuple[float, ...] = ()
    """Subtracted from each channel, once it is between 0 and 1; by default measured on the training data."""
    std: tuple[float, ...] = ()
    """What each channel is then divided by."""
    pretrained: bool = True
    """Whether an hf: model starts from its weights, or from random ones of the same architecture."""
    train: str = "all"
    """What of an hf: model is trained, gossiped and saved: all, head, or lora:RANK (low-rank adapters and the head)."""

    def __post_init__(self) -> None:
        for name, hint in _hints().items():             # alpha=1 is alpha=1.0, with the same hash
            value = getattr(self, name)
            if whole(value) is not None and float in (hint, *typing.get_args(hint)[:1]):
                object.__setattr__(self, name, float(value))
        for name in ("epochs", "batch", "eval_every"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be a whole number >= 1, got {getattr(self, name)}")
        for name in ("warmup", "warmup_from", "weight_decay", "seed"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError(f"{name} must be >= 0 and finite, got {getattr(self, name)}")
        if not 0 < self.decay < float("inf"):
            raise InputError(f"decay must be > 0 and finite, got {self.decay:g}")
        if self.steps < 0:
            raise InputError(f"steps must be a whole number >= 0, got {self.steps}; it counts one epoch")
        for name in ("drop", "churn"):
            check_probability(name, getattr(self, name))
        rank_of(self.train)
        if self.train != "all" and not self.reads_texts:
            raise InputError(f"train = {self.train} is for hf: models; leave it out with {self.model}")
        algorithm(self.algorithm)

    @property
    def hash(self) -> str:
        """Eight digits that stand for all fields."""
        defaults = {field.name: field.default for field in fields(self) if field.name not in FIRST_FIELDS}
        values = {name: value for name, value in asdict(self).items() if value != defaults.get(name, MISSING)}
        text = json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """The run's folder: readable first, unique by its hash.

        >>> Experiment(topology="ring:8", alpha=1.0).name.rpartition("-")[0]
        'digits-cnn-qg-dsgdm-n-ring8-a1-s0'
        """
        parts = [self.data, self.model, self.algorithm, self.topology, f"a{self.alpha:g}", f"s{self.seed}"]
        readable = "-".join(parts).replace(":", "").replace("/", "-").replace(",", "-").replace("=", "")
        return f"{readable}-{self.hash}"

    @property
    def reads_texts(self) -> bool:
        """Whether the model is a transformer that classifies texts, hf:NAME or hf:FOLDER."""
        return self.model.startswith(PREFIX)

    @property
    def peak_lr(self) -> float:
        """The learning rate given, or the one that grows with the global batch."""
        return scaled_lr(self.batch, count_nodes(self.topology)) if self.lr is None else self.lr

    def with_seed(self, seed: int) -> Experiment:
        """The same with another seed."""
        return replace(self, seed=seed)


FIRST_FIELDS = (
    "data", "model", "norm", "width", "bn", "algorithm", "topology", "partition", "alpha", "epochs", "batch", "lr",
    "warmup", "warmup_from", "milestones", "decay", "weight_decay", "augment", "precision", "eval_every", "seed",
)
"""The fields that are always hashed. Any other came later, and is hashed where it is not at its default, so that runs
that were made before it keep their names."""

# ------------------------------------------------------------------------------------- the same experiment, or nearly

OWN = (
    "seed", "partition", "alpha", "lr", "warmup", "warmup_from", "milestones", "decay", "algorithm", "topology",
)
"""What experiments that are rows of one program may differ in; their topologies have as many nodes."""

Item = TypeVar("Item")


def together(experiments: Sequence[Experiment]) -> tuple[Experiment, ...]:
    """The experiments, if they can be rows of one program."""
    first = _in_common(experiments[0])
    for one in experiments:
        for name, value in _in_common(one).items():
            if value != first[name]:
                raise InputError(f"runs that train together need one {name}, got {first[name]} and {value}")
    return tuple(experiments)


def program_key(experiment: Experiment) -> str:
    """Equal for experiments that can be rows of one program, as far as they tell without data."""
    return json.dumps(_in_common(experiment), sort_keys=True)


def steps_alike(experiment: Experiment) -> Hashable:
    """Equal for experiments that step by the same algorithm on the same topology, however these are spelled."""
    return algorithm(experiment.algorithm), parse(experiment.topology)


def setting(experiment: Experiment) -> str:
    """Equal for experiments that differ in nothing but seed and learning rate, however they are spelled.

    Where data are alike α does not matter, nor does the graph where everybody has the same model.
    """
    if experiment.partition == "iid":
        experiment = replace(experiment, alpha=1.0)
    if isinstance(algorithm(experiment.algorithm), Centralized):
        experiment = replace(experiment, topology=f"complete:{count_nodes(experiment.topology)}")
    return replace(experiment, seed=0, lr=None).hash


def spellings(experiment: Experiment) -> tuple[Experiment, ...]:
    """The experiment and others of the same result: the default learning rate may be given, or left out."""
    left_out = replace(experiment, lr=None)
    return (experiment, left_out) if left_out.peak_lr == experiment.peak_lr else (experiment,)


def group_by_seed(items: Sequence[Item], of: Callable[[Item], Experiment]) -> dict[str, list[Item]]:
    """Items whose experiments differ in the seed alone, together, under the fields that set them apart from the others.

    >>> group_by_seed([Experiment(seed=0), Experiment(seed=1), Experiment(batch=8)], lambda one: one).keys()
    dict_keys(['batch=32', 'batch=8'])
    """
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(of(item).with_seed(0).hash, []).append(item)
    values = {key: asdict(of(group[0]).with_seed(0)) for key, group in groups.items()}
    names = next(iter(values.values()), {})
    varying = [name for name in names if len({str(of[name]) for of in values.values()}) > 1] or ["algorithm"]
    return {", ".join(_label(name, values[key][name]) for name in varying): group for key, group in groups.items()}


def _in_common(experiment: Experiment) -> dict[str, Any]:
    """What experiments that are rows of one program have to share."""
    values = {name: value for name, value in asdict(experiment).items() if name not in OWN}
    return values | {"number of nodes": count_nodes(experiment.topology)}


def _label(name: str, value: object) -> str:
    """How a legend names a setting."""
    return str(value) if name in ("algorithm", "data", "model", "topology") else f"{name}={value}"


# ---------------------------------------------------------------------------------------------------- from files

RECIPES: dict[str, dict[str, Any]] = {
    "cifar10": {
        "data": "cifar10", "model": "resnet20", "norm": "evonorm", "epochs": 300, "batch": 32,
        "warmup": 5.0, "milestones": (1 / 2, 3 / 4), "weight_decay": 1e-4, "eval_every": 10,
    },
    "imagenet": {
        "data": "imagenet", "model": "resnet18", "norm": "evonorm", "epochs": 90, "batch": 64,
        "warmup": 5.0, "milestones": (1 / 3, 2 / 3, 8 / 9), "weight_decay": 1e-4, "eval_every": 10,
    },
}
"""The paper's training recipes; the peak learning rate scales with the batch unless given."""


@cache
def _hints() -> dict[str, Any]:
    """The type of each field."""
    return typing.get_type_hints(Experiment)


def from_mapping(values: dict[str, Any], source: str) -> Experiment:
    """An experiment from names and values, with a sentence for whatever is wrong in them."""
    hints = _hints()
    known = [field.name for field in fields(Experiment)]
    values = dict(values)
    recipe = values.pop("recipe", None)
    if recipe is not None and recipe not in RECIPES:
        raise unknown(f"recipe in {source}", str(recipe), RECIPES)
    for name, value in values.items():
        if name not in known:
            raise unknown(f"key in {source}", name, [*known, "recipe"])
        values[name] = _typed(hints[name], value, f"{name} in {source}")
    return Experiment(**(RECIPES.get(recipe or "", {}) | values))


def from_toml(path: Path) -> Experiment:
    """An experiment from a TOML file."""
    try:
        with open(path, "rb") as file:
            return from_mapping(tomllib.load(file), str(path))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}") from None


def _typed(hint: Any, value: Any, what: str) -> Any:
    """`value` if it is of the field's type; a whole number will do for a number, a list for a tuple."""
    if hint is str and not isinstance(value, str):
        raise InputError(f"{what} must be a text, got {value!r}")
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise InputError(f"{what} must be a list, got {value!r}")
        return tuple(_typed(typing.get_args(hint)[0], entry, what) for entry in value)
    if NoneType in typing.get_args(hint):
        return None if value is None else _typed(typing.get_args(hint)[0], value, what)
    value = checked(hint, value, what)
    return float(value) if hint is float else value
