"""The protocol of the leaderboard: tiers, their conditions, budgets and seeds.

Every method has the same budget. Its learning rates are a grid of factors 2 around its own scale, which grows until
the best rate lies inside; if no rate learns anything, smaller ones follow. Rates are compared on a validation split of
the training set, with seed 0; the test set is not used. Then seeds 1 to 3 train on the whole training set at the best
rate. A seed draws the same partition, initial model, data order and lost messages for all methods. A change of
anything in this file that changes a record needs a new `VERSION`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch

from quasiglobal.errors import InputError, unknown
from quasiglobal.training.experiment import Experiment

VERSION = 1
"""Version of the protocol; records of other versions are not compared."""

NODES = 16

SEEDS = (1, 2, 3)
"""Seeds of the scores; seed 0 is for tuning alone."""

STEPS_OF_TWO = (-2, -1, 0, 1, 2)
"""First grid of a method: its own scale times these powers of 2."""

SMALLER_STEPS = (-7, -6, -5, -4, -3)
"""Further rates, if no rate of a grid learns anything: its best is then a matter of chance."""

LEARNS = 0.12
"""Validation accuracy, of ten classes, above which a trial has learnt something."""

MOST_RATES = 16
"""Maximum number of rates in a grid that grows."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Data and links of a comparison."""

    name: str
    partition: str = "dirichlet"
    alpha: float = 0.1
    drop: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A task at one scale, and the conditions under which all methods are tried on it."""

    name: str
    title: str
    experiment: Experiment
    """All settings except the method's and the condition's."""
    conditions: tuple[Condition, ...]
    lr: float = 0.1
    """Scale of the learning rates of methods with momentum; grids begin around it."""
    validation: float = 0.0
    """Fraction of the training set for choosing rates; 0 means: rates are given, and nothing is tuned."""
    trial_epochs: int = 0
    """Length of a trial in epochs; 0 means: as long as a run."""
    tests: int = 1
    """Number of last tests that a node's score averages."""
    seeds: tuple[int, ...] = SEEDS
    """Seeds of the scores."""

    def at(self, condition: Condition) -> Experiment:
        """The experiment under a condition."""
        return replace(
            self.experiment, partition=condition.partition, alpha=condition.alpha, drop=condition.drop
        )

    def trial(self, experiment: Experiment) -> Experiment:
        """The tuning trial of an experiment: seed 0, tested on the validation split."""
        epochs = self.trial_epochs or experiment.epochs
        warmup = experiment.warmup * epochs / experiment.epochs
        return replace(
            experiment, seed=0, validation=self.validation, epochs=epochs, warmup=warmup, eval_every=epochs
        )


LOSS = 0.3
"""Probability that a message is lost, each direction of a link on its own."""

COMMON = Experiment(
    topology=f"ring:{NODES}", batch=32, warmup_from=1e-4, milestones=(0.5, 0.75), decay=0.1, weight_decay=1e-4
)
"""Settings of all tiers. The warm-up starts near 0, but not at 0, since some methods divide by the rate."""

DIGITS = Tier(
    name="digits",
    title="Digits: 16 small networks, 400 steps",
    experiment=replace(
        COMMON, data="digits", model="mlp", width=0.5, epochs=8, steps=50, warmup=1.0, eval_every=8, augment=False
    ),
    conditions=(
        Condition(name="sorted", partition="shards:1"),
        Condition(name="α = 0.1"),
        Condition(name="sorted, 30 % loss", partition="shards:1", drop=LOSS),
        Condition(name="α = 0.1, 30 % loss", drop=LOSS),
    ),
    validation=0.2,
)

CIFAR = Tier(
    name="cifar",
    title="CIFAR-10: 16 ResNet-20s with group norm, 100 epochs",
    experiment=replace(
        COMMON, data="cifar10", model="resnet20", norm="gn", epochs=100, warmup=5.0, eval_every=100, precision="bf16"
    ),
    conditions=(Condition(name="α = 0.1"), Condition(name="α = 0.01", alpha=0.01)),
    lr=0.4,
    validation=0.1,
    trial_epochs=40,
)

RELAY = Tier(
    name="relay",
    title="CIFAR-10: 16 VGG-11s without normalisation, 200 epochs, at published rates",
    experiment=replace(
        COMMON, data="cifar10", model="vgg11-dropout", norm="none", epochs=200, steps=97, warmup=5.0,
        milestones=(0.75, 0.9), eval_every=196, precision="bf16",       # tests at epochs 196 and 200
    ),
    conditions=(Condition(name="α = 0.1"), Condition(name="α = 0.01", alpha=0.01)),
    tests=2,
)

TIERS = {tier.name: tier for tier in (DIGITS, CIFAR, RELAY)}
"""All tiers by name."""


def tier_named(name: str, patterns: Sequence[str] = (), seeds: Sequence[int] = ()) -> Tier:
    """A tier by name, with the conditions that match one of the patterns and with these seeds; by default with all."""
    if name not in TIERS:
        raise unknown("tier", name, TIERS)
    tier = TIERS[name]
    chosen = tuple(one for one in tier.conditions if any(fnmatch(one.name, pattern) for pattern in patterns or "*"))
    if not chosen:
        names = "; ".join(one.name for one in tier.conditions)
        raise InputError(f"no condition of {name} matches {' '.join(patterns)}; * matches any text; it has {names}")
    if not set(seeds) <= set(SEEDS):
        raise InputError(f"seeds are {', '.join(map(str, SEEDS))}, got {', '.join(map(str, seeds))}")
    return replace(tier, conditions=chosen, seeds=tuple(sorted(set(seeds))) or SEEDS)
