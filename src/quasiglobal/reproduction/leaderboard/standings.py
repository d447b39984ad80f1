"""Records of the leaderboard: one small JSON file per method and tier, from which all tables are made."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from types import NoneType
from typing import get_args, get_origin, get_type_hints

from quasiglobal.common.files import finite, read_json, write_json
from quasiglobal.errors import InputError, unknown
from quasiglobal.reproduction.leaderboard.protocol import LEARNS, SMALLER_STEPS, STEPS_OF_TWO, TIERS, VERSION, Tier
from quasiglobal.reproduction.report.noise import Sample
from quasiglobal.runs.comparison import Score

MEASURES = {"mean": "mean of nodes", "worst": "worst node", "averaged": "averaged model"}
"""The scores of a run, and their titles; accuracies as fractions."""


@dataclass(frozen=True)
class SeedResult:
    """The numbers of one run."""

    seed: int
    diverged: bool = False
    mean: float | None = None
    worst: float | None = None
    averaged: float | None = None
    bytes: float | None = None
    """Bytes that a node sent in the run, on average."""
    seconds: float | None = None
    """Time of the run, as a share of the time of its program."""
    partition: str = ""
    """Fingerprint of the partition."""


@dataclass(frozen=True)
class Placing:
    """A method under one condition: its rate, and the results of the seeds; or why it is refused."""

    refused: str = ""
    lr: float | None = None
    inside: bool = True
    """Whether the best rate lies inside the grid; False if the largest grid was not enough."""
    trials: dict[str, float | None] = field(default_factory=dict)
    """Validation accuracy, mean of nodes, of each rate; None if it diverged."""
    seeds: tuple[SeedResult, ...] = ()
    notes: tuple[str, ...] = ()
    """Warnings of the library, for example that lost messages harm the method."""

    @property
    def learns(self) -> bool:
        """Whether a trial learnt something; otherwise the rate is a matter of chance."""
        return not self.trials or max(value or 0.0 for value in self.trials.values()) >= LEARNS

    def complete(self, seeds: Sequence[int]) -> bool:
        """Whether nothing is left to run: all seeds are there, at a rate chosen by the protocol."""
        tuned = self.learns or len(self.trials) >= len(SMALLER_STEPS + STEPS_OF_TWO)
        return bool(self.refused) or (tuned and set(seeds) <= {one.seed for one in self.seeds})

    def joined(self, before: Placing | None) -> Placing:
        """Add the further seeds of an earlier record at the same rate."""
        if before is None or before.lr != self.lr:
            return self
        found = {one.seed: one for one in (*before.seeds, *self.seeds)}
        return replace(self, seeds=tuple(found[seed] for seed in sorted(found)))

    @property
    def diverged(self) -> int:
        """Number of seeds that diverged."""
        return sum(one.diverged for one in self.seeds)

    def values(self, measure: str) -> dict[int, float]:
        """A measure of each seed that did not diverge; scores in per cent."""
        factor = 100.0 if measure in MEASURES else 1.0
        found = {one.seed: getattr(one, measure) for one in self.seeds}
        return {seed: factor * value for seed, value in found.items() if value is not None}

    def score(self, measure: str = "mean") -> Score | None:
        """A measure over the seeds; None if it is refused or a seed diverged."""
        values = list(self.values(measure).values())
        return Score.of(values) if values and not self.diverged else None

    def sample(self, measure: str, partition: str) -> Sample | None:
        """The score as a sample for comparisons seed by seed."""
        score, values = self.score(measure), self.values(measure)
        return Sample(score.mean, score.std, len(values), values, partition) if score else None


@dataclass(frozen=True)
class Standing:
    """A method in a tier, under all its conditions."""

    tier: str
    name: str
    algorithm: str
    topology: str
    communication: str = ""
    wire: str = "full"
    central: bool = False
    """Whether it communicates only by exact means over all nodes."""
    version: int = VERSION
    device: str = ""
    torch: str = ""
    published: dict[str, float] = field(default_factory=dict)
    conditions: dict[str, Placing] = field(default_factory=dict)

    @property
    def settings(self) -> tuple[str, ...]:
        """The algorithm, topology, schedule of communication and wire."""
        return self.algorithm, self.topology, self.communication, self.wire

    @property
    def graph(self) -> str:
        """The graph, with a schedule of communication and a compression if there are any."""
        graph = "all nodes" if self.central else self.topology
        return ", ".join(filter(None, (graph, self.communication, self.wire.replace("full", ""))))


def _decoded(hint: object, value: object) -> object:
    """Convert a JSON value to a dataclass, dict, tuple, text or number, as annotated; raise TypeError if it differs."""
    origin, inner = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
        hints = get_type_hints(hint)
        return hint(**{name: _decoded(hints[name], one) for name, one in value.items()})
    if origin is dict and isinstance(value, dict):
        return {key: _decoded(inner[1], one) for key, one in value.items()}
    if origin is tuple and isinstance(value, list):
        return tuple(_decoded(inner[0], one) for one in value)
    if NoneType in inner:
        return None if value is None else _decoded(inner[0], value)
    if type(value) not in ((int, float) if hint is float else (hint,)):
        raise TypeError(f"{value!r} is not a {hint}")
    return value


def file_name(name: str) -> str:
    """The file of a method: its name with dashes for everything but letters, digits, + and dots.

    >>> file_name("push-diging, sums"), file_name("dsgd + merge"), file_name("mine.methods:Mine")
    ('push-diging-sums.json', 'dsgd-+-merge.json', 'mine.methods-Mine.json')
    """
    return re.sub(r"[^\w+.]+", "-", name).strip("-") + ".json"


def write_standing(standing: Standing, records: Path) -> Path:
    """Write a record; return its path. Keep conditions and seeds that only an earlier record of its settings has."""
    path = records / standing.tier / file_name(standing.name)
    before = read_standing(path)
    if before is not None and before.settings == standing.settings:
        ours = {name: one.joined(before.conditions.get(name)) for name, one in standing.conditions.items()}
        standing = replace(standing, conditions=before.conditions | ours)
    write_json(path, finite(asdict(standing)))
    return path


def read_standing(path: Path) -> Standing | None:
    """Read a record; None if there is none, or if it is damaged or of another version of the protocol."""
    try:
        found = _decoded(Standing, read_json(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        warnings.warn(f"{path} is damaged and ignored", stacklevel=2)
        return None
    return found if isinstance(found, Standing) and found.version == VERSION else None


def check_records(tier: Tier, records: Path, patterns: Sequence[str] = ()) -> None:
    """Raise InputError if there are no records of a tier, or if a pattern matches none of their names."""
    name, found = tier.name, [one.name for one in read_standings(records)[tier.name]]
    if not found:
        raise InputError(
            f"no records of tier {name} in {records}; run `qg leaderboard {name}`, or give their folder with --records"
        )
    for pattern in patterns:
        if not any(fnmatch(one, pattern) for one in found):
            raise unknown(f"method in the records of tier {name}", pattern, found)


def read_standings(records: Path) -> dict[str, list[Standing]]:
    """All records of each tier, sorted by name."""
    return {
        tier: [one for path in sorted((records / tier).glob("*.json")) if (one := read_standing(path))]
        for tier in TIERS
    }
