"""Experiment: one frozen dataclass with all settings of a run. Its hash names the run.

Only this module decides whether two experiments are equal, differ only in the seed, or can share a program.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar

from quasiglobal.algorithms.base import checked
from quasiglobal.algorithms.centralized import Centralized
from quasiglobal.common import own_code
from quasiglobal.common.objects import Named, facts_of, readable
from quasiglobal.engines.draws import check_probability
from quasiglobal.errors import InputError, unknown, whole
from quasiglobal.models.language import PREFIX, rank_of
from quasiglobal.topology.parsing import weights_text
from quasiglobal.training.resolution import resolve
from quasiglobal.training.schedule import scaled_lr


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """All settings that change the result. The device, the engine and the number of rows per program do not.

    The string under a field is its `--help` text. `data` is "own" if every node brings its own data (`qg node`).
    `steps` counts the steps of one epoch; `qg.minimize(steps=…)` counts all steps of a run.
    """

    data: str = "digits"
    """digits, fashion-mnist, cifar10, imagenet32, imagenet, folder:PATH; texts agnews, sst2, csv:PATH; or mine:data."""
    model: str = "cnn"
    """cnn, mlp, resnet20 (any depth 6k + 2), resnet18, vgg11, hf:NAME, hf:FOLDER, or your own package.module:Name."""
    norm: str | None = None
    """bn, gn, evonorm, evonorm-released, -first-release or -running, or none; by default the model's own."""
    width: float = 1.0
    """Multiplier for the model's number of channels."""
    bn: Literal["shared", "local"] = "shared"
    """BatchNorm weights: shared (gossiped), or local (kept at the node, as in FedBN)."""
    algorithm: str = "qg-dsgdm-n"
    """Algorithm with options, such as qg-dsgdm-n:mu=0.5; `qg algorithms` lists all."""
    topology: str = "ring:16"
    """Communication graph, by name or as a CSV file of links; `qg topology` lists and describes graphs."""
    partition: str = "dirichlet"
    """Data split: dirichlet, dirichlet-plain, iid, shards:K, by:COLUMN, or whole (every node has all data)."""
    alpha: float = 0.1
    """Dirichlet concentration: 10 is nearly uniform, 0.1 very heterogeneous."""
    epochs: int = 30
    """Number of epochs."""
    batch: int = 32
    """Batch size per node."""
    steps: int = 0
    """Steps per epoch; 0: one pass through the data of a node of average size."""
    lr: float | None = None
    """Peak learning rate; by default 0.1 per 64 examples of the global batch."""
    warmup: float = 5.0
    """Epochs of linear warm-up from `warmup_from` to `lr`; skipped unless `lr` is higher."""
    warmup_from: float = 0.1
    """Learning rate at the start of the warm-up."""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """Fractions of the run at which the learning rate is multiplied by `decay`; empty: constant."""
    decay: float = 0.1
    """Learning rate factor at each milestone."""
    schedule: str = "steps"
    """steps (warm-up, then milestones), cosine or linear (warm-up, then to 0), or constant (`lr` alone)."""
    clip: float | None = None
    """Largest norm of a node's gradient; larger gradients are scaled down. By default no limit."""
    weight_decay: float = 1e-4
    """L2 weight decay of all parameters, added to the gradient."""
    augment: bool = True
    """Random flips and crops, if the data set supports them."""
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    """bf16 uses autocast inside the model; parameters, momentum and mixing stay float32."""
    eval_every: int = 1
    """Epochs between tests; the last epoch is always tested. Affects the best score."""
    seed: int = 0
    """Random seed of the partition, initial weights, data order and faults."""
    drop: float = 0.0
    """Probability that a message is lost; its weight is added to the receiver's own. Simulator only."""
    churn: float = 0.0
    """Probability that a node is offline for 20 steps and trains alone. Simulator only."""
    wire: str = "full"
    """full; bf16 (not for qg methods); topk:0.01, randk:0.01, sign, qsgd:4 (choco, adagossip, beer, motef)."""
    communication: str = ""
    """merge@end (replace the models by their mean at the end), complete@0.9-1.0 (average over all nodes meanwhile)."""
    classes: tuple[str, ...] = ()
    """Class names in order, if data owners must agree on them; by default those of the data."""
    shape: tuple[int, ...] = ()
    """Input shape: channels height width, by default as in the data; for texts the number of tokens, by default 128."""
    mean: tuple[float, ...] = ()
    """Mean of each channel (pixels in [0, 1]); by default the data set's, or measured on the training data."""
    std: tuple[float, ...] = ()
    """Standard deviation of each channel; default as for mean."""
    pretrained: bool = True
    """Start an hf: model from pretrained weights; otherwise from random weights."""
    loss: str = ""
    """cross-entropy (default for classes), mse (for numbers), mae, huber, bce (on logits), or package.module:name."""
    metric: tuple[str, ...] = ()
    """Test metrics: accuracy, top5, f1, auc, mse, mae, or your own package.module:name. The first one is the score."""
    label: str = ""
    """Label column of a CSV table of numbers; the other columns are the input."""
    validation: float = 0.0
    """Fraction of the training examples to hold out and test on, in place of the test set; 0: the test set."""
    draws: Literal["own", "shared"] = "own"
    """Random order, flips and crops: own at each node, or shared by all nodes, as in the paper's released code."""
    train: str = "all"
    """Parameters of an hf: model to train, gossip and save: all, head, or lora:RANK (low-rank adapters and head)."""
    round_deadline: float | None = None
    """Seconds after which a step continues without late neighbours (distributed runs); by default it waits for all."""
    weights: str = "equal"
    """Weights of the nodes: equal, examples (numbers of training examples), or one number per node: 1200,340,80."""

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
        for name, most in (("warmup", MOST_EPOCHS), ("epochs", MOST_EPOCHS), ("seed", MOST_SEED)):
            if getattr(self, name) > most:
                raise InputError(f"{name} must be at most {most:,}, got {getattr(self, name)}")
        for name in ("decay", "width"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"{name} must be > 0 and finite, got {getattr(self, name):g}")
        if self.steps < 0:
            raise InputError(f"steps must be a whole number >= 0, got {self.steps}; it counts the steps per epoch")
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise InputError(f"clip must be > 0 and finite, got {self.clip:g}")
        if self.round_deadline is not None and not 0 < self.round_deadline < float("inf"):
            raise InputError(f"round_deadline must be > 0 seconds and finite, got {self.round_deadline:g}")
        for name in ("drop", "churn", "validation"):
            check_probability(name, getattr(self, name))
        rank_of(self.train)
        if self.train != "all" and not self.reads_texts:
            raise InputError(f"train = {self.train} is for hf: models; leave it out with {self.model}")
        _ = self.resolved

    resolved = cached_property(resolve)
    """The objects that the strings name."""

    @property
    def hash(self) -> str:
        """Hash of all fields, eight hexadecimal digits."""
        defaults = {field.name: field.default for field in fields(self) if field.name not in FIRST_FIELDS}
        values = {name: value for name, value in asdict(self).items() if value != defaults.get(name, MISSING)}
        text = json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """Name of the run folder: a readable part, then the hash.

        >>> Experiment(topology="ring:8", alpha=1.0).name.rpartition("-")[0]
        'digits-cnn-qg-dsgdm-n-ring8-a1-s0'
        """
        what = map(readable, (self.data, self.model, self.algorithm, self.topology))
        parts = [*what, f"a{self.alpha:g}", f"s{self.seed}"]
        text = "-".join(parts).replace(":", "").replace("/", "-").replace(",", "-").replace("=", "")
        return f"{text[:LONGEST_NAME]}-{self.hash}"

    @property
    def reads_texts(self) -> bool:
        """Whether the model is a transformer that classifies texts, hf:NAME or hf:FOLDER."""
        return self.model.startswith(PREFIX)

    @property
    def uses_alpha(self) -> bool:
        """Whether the partition depends on α."""
        return self.partition.startswith("dirichlet")

    @property
    def data_alike(self) -> bool:
        """Whether the nodes' data are alike, according to the partition: α = 10 is nearly uniform."""
        return self.partition in ("iid", "whole") or (self.uses_alpha and self.alpha >= 10)

    @property
    def peak_lr(self) -> float:
        """The given learning rate, or by default the rate scaled with the global batch."""
        return scaled_lr(self.batch, self.resolved.nodes) if self.lr is None else self.lr

    def with_seed(self, seed: int) -> Experiment:
        """The same experiment with another seed."""
        return replace(self, seed=seed)


LONGEST_NAME = 200
"""Longest readable part of a run's name; file systems allow 255 bytes."""

MOST_EPOCHS, MOST_SEED = 10**9, 2**63 - 1
"""Largest accepted values; larger seeds do not fit the random generators."""

FIRST_FIELDS = (
    "data", "model", "norm", "width", "bn", "algorithm", "topology", "partition", "alpha", "epochs", "batch", "lr",
    "warmup", "warmup_from", "milestones", "decay", "weight_decay", "augment", "precision", "eval_every", "seed",
)
"""Fields that are always hashed. Fields added later are hashed only if not at their default, so that older runs keep
their names."""

# --------------------------------------------------------------------------------------------- comparing experiments

OWN = (
    "seed", "partition", "alpha", "lr", "warmup", "warmup_from", "milestones", "decay", "schedule", "algorithm",
    "topology",
)
"""Fields in which the rows of one program may differ; their topologies need the same number of nodes."""

Item = TypeVar("Item")
_Key = TypeVar("_Key")


def together(experiments: Sequence[Experiment]) -> tuple[Experiment, ...]:
    """Return the experiments if they can be rows of one program; raise InputError otherwise."""
    first = _in_common(experiments[0])
    for one in experiments:
        for name, value in _in_common(one).items():
            if value != first[name]:
                raise InputError(f"runs that train together need one {name}, got {first[name]} and {value}")
    return tuple(experiments)


def program_key(experiment: Experiment) -> str:
    """Key that is equal for experiments that can be rows of one program, as far as known without the data."""
    return json.dumps(_in_common(experiment), sort_keys=True)


def step_order(experiment: Experiment) -> tuple[str, str]:
    """Sort key for the rows of a program: experiments with the same algorithm and topology are adjacent."""
    return experiment.algorithm, experiment.topology


@cache
def setting(experiment: Experiment) -> str:
    """Key that is equal for experiments that differ only in seed and learning rate, or in fields without effect.

    α has an effect on Dirichlet partitions only, and the graph has none on a centralized algorithm.
    """
    if not experiment.uses_alpha:
        experiment = replace(experiment, alpha=1.0)
    if isinstance(experiment.resolved.algorithm, Centralized):
        experiment = replace(experiment, topology=f"complete:{experiment.resolved.nodes}")
    return replace(experiment, seed=0, lr=None).hash


def spellings(experiment: Experiment) -> tuple[Experiment, ...]:
    """The experiment and its equivalents: the default learning rate may be explicit or omitted."""
    left_out = replace(experiment, lr=None)
    return (experiment, left_out) if left_out.peak_lr == experiment.peak_lr else (experiment,)


def grouped(items: Iterable[Item], key: Callable[[Item], _Key]) -> dict[_Key, list[Item]]:
    """The items by key; keys and items stay in the order of their first appearance.

    >>> grouped([1, 4, 3], lambda number: number % 2)
    {1: [1, 3], 0: [4]}
    """
    groups: dict[_Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def group_by_seed(items: Sequence[Item], of: Callable[[Item], Experiment]) -> dict[str, list[Item]]:
    """Group items whose experiments differ only in the seed; label each group by the fields that vary between groups.

    >>> group_by_seed([Experiment(seed=0), Experiment(seed=1), Experiment(batch=8)], lambda one: one).keys()
    dict_keys(['batch=32', 'batch=8'])
    """
    groups = grouped(items, lambda item: of(item).with_seed(0).hash)
    chosen = {key: of(group[0]).with_seed(0) for key, group in groups.items()}
    values = {key: asdict(one) | ({} if one.uses_alpha else {"alpha": None}) for key, one in chosen.items()}
    names = next(iter(values.values()), {})
    varying = [name for name in names if len({str(of[name]) for of in values.values()}) > 1] or ["algorithm"]
    labels = {
        key: ", ".join(_label(name, values[key][name]) for name in varying if _is_told(name, values[key][name]))
        for key in groups
    }
    return {
        label if list(labels.values()).count(label) == 1 else f"{label} ({key})": groups[key]
        for key, label in labels.items()
    }


def _in_common(experiment: Experiment) -> dict[str, object]:
    """Values that all rows of one program must share."""
    values = {name: value for name, value in asdict(experiment).items() if name not in OWN}
    return values | {"number of nodes": experiment.resolved.nodes}


def _label(name: str, value: object) -> str:
    if isinstance(value, tuple):
        value = " ".join(readable(str(one)) for one in value)
    value = readable(value) if isinstance(value, str) else value
    return str(value) if name in ("algorithm", "data", "model", "topology") else f"{name}={value}"


def _is_told(name: str, value: object) -> bool:
    """Whether a label shows a setting: α and the later fields only if they are set."""
    return (name in FIRST_FIELDS and name != "alpha") or value not in ("", (), None)


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
"""The paper's training recipes; the peak learning rate scales with the global batch unless given."""


@cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(Experiment)


def from_mapping(values: dict[str, Any], source: str, others: Sequence[str] = ()) -> Experiment:
    """Build an experiment from names and values; raise InputError for an invalid entry.

    `others` are more names that the source may have, suggested for a misspelt one.
    """
    hints = _hints()
    known = [field.name for field in fields(Experiment)]
    values = dict(values)
    objects = values.pop("objects", {})
    if not isinstance(objects, dict) or not all(isinstance(facts, dict) for facts in objects.values()):
        raise InputError(f"objects in {source} must be a table of tables, got {objects!r}")

    def known_as(value: object) -> object:
        """The value; a string without its object gets its stored facts."""
        return Named(value, None, objects[value]) if type(value) is str and value in objects else value

    recipe = values.pop("recipe", None)
    if recipe is not None and recipe not in RECIPES:
        raise unknown(f"recipe in {source}", str(recipe), RECIPES)
    for name, value in values.items():
        if name not in known:
            raise unknown(f"key in {source}", name, [*known, "recipe", *others])
        if name == "weights" and not isinstance(value, str):
            value = weights_text(value)
        value = typed(hints[name], value, f"{name} in {source}")
        values[name] = tuple(map(known_as, value)) if isinstance(value, tuple) else known_as(value)
    return Experiment(**(RECIPES.get(recipe or "", {}) | values))


def stored(experiment: Experiment) -> dict[str, object]:
    """The experiment as JSON values, with the facts of objects that were given from Python."""
    values = asdict(experiment)
    texts = [one for value in values.values() for one in (value if isinstance(value, tuple) else [value])]
    objects = {text: facts_of(text) for text in texts if isinstance(text, str) and facts_of(text)}
    return values | ({"objects": objects} if objects else {})


def from_toml(path: Path) -> Experiment:
    """Read an experiment from a TOML file, or from the experiment.json of a run."""
    return from_mapping(read_settings(path), str(path))


def read_settings(path: Path) -> dict[str, Any]:
    """The entries of a TOML file, or of the experiment.json of a run."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        values = json.loads(text) if kind == "JSON" else tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:           # also of tomllib
        raise InputError(f"{path} is not {kind}: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} is not an experiment: it holds a {type(values).__name__}")
    own_code.read_from(path, values)
    return values


def typed(hint: Any, value: object, what: str) -> Any:
    """Convert `value` to the field's type: integers may stand for floats, lists for tuples, strings for paths."""
    if hint is Path:
        return Path(typed(str, value, what))
    if hint is str and not isinstance(value, str):
        raise InputError(f"{what} must be a string, got {value!r}")
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise InputError(f"{what} must be a list, got {value!r}")
        return tuple(typed(typing.get_args(hint)[0], entry, what) for entry in value)
    if NoneType in typing.get_args(hint):
        return None if value is None else typed(typing.get_args(hint)[0], value, what)
    value = checked(hint, value, what)
    return hint(value) if hint in (int, float) else value       # NumPy's numbers become Python's
