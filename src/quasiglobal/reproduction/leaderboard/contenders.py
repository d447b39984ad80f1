"""Contenders: every registered algorithm on a ring, variants with their own row, and your own method."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import filter as fnfilter
from fnmatch import fnmatch
from pathlib import Path

from quasiglobal.algorithms import ALGORITHMS, algorithm, name_of
from quasiglobal.algorithms.gossip import Gossip
from quasiglobal.checks import CheckFailed, check_algorithm
from quasiglobal.common.objects import fault, sources
from quasiglobal.engines.costs import traffic
from quasiglobal.engines.draws import Faults
from quasiglobal.engines.links import misfit
from quasiglobal.engines.needs import check_needs
from quasiglobal.errors import InputError
from quasiglobal.reproduction.leaderboard.protocol import NODES, Tier
from quasiglobal.reproduction.leaderboard.standings import file_name, read_standing
from quasiglobal.topology.parsing import count_nodes, parse
from quasiglobal.training.communication import MERGE
from quasiglobal.training.experiment import Experiment

RING, CHAIN, TREES, BASE = f"ring:{NODES}", f"chain:{NODES}", f"double-trees:{NODES}", f"base:{NODES}:1"

GRAPHS = (RING, CHAIN)
"""The graph of all methods, and one of about equal traffic for methods that need a tree."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A row of the leaderboard: an algorithm, on a graph, with a scale of its learning rate."""

    name: str
    algorithm: str
    topology: str = RING
    communication: str = ""
    wire: str = "full"
    lr: float = 0.0
    """The middle of the first grid of learning rates; 0 means: the tier's rate × `times`."""
    times: float = 0.0
    """Its learning rates relative to those of methods with momentum; 0 means: the algorithm's (`TIMES`)."""
    rates: dict[str, float] = field(default_factory=dict)
    """The rate under each condition, in a tier that does not tune."""
    published: dict[str, float] = field(default_factory=dict)
    """The published score under each condition, in per cent."""

    def scale(self, tier: Tier) -> float:
        """The middle of the first grid of learning rates."""
        name = name_of(self.algorithm)
        return self.lr or ADAPTIVE.get(name) or tier.lr * (self.times or TIMES.get(name, 1.0))

    @property
    def settings(self) -> tuple[str, ...]:
        """The algorithm, topology, schedule of communication and wire, as of a `Standing`."""
        return self.algorithm, self.topology, self.communication, self.wire

    def set_on(self, experiment: Experiment) -> Experiment:
        """An experiment of the tier with this method."""
        return replace(
            experiment, algorithm=self.algorithm, topology=self.topology, communication=self.communication,
            wire=self.wire,
        )


PLAIN = (
    "sgd", "dsgd", "dsgd-ac", "dsgd-clip", "d2", "d2+", "ed", "edm", "sgp", "push-diging", "ab", "choco",
    "adagossip", "beer", "motef", "gossip-pga", "gut", "k-gt", "led", "proxskip",
)
"""Algorithms without momentum, or with a mean of gradients as momentum."""

TIMES = dict.fromkeys(PLAIN, 4.0)
"""Learning rates of algorithms, relative to those of methods with momentum; a wrong scale only costs further trials."""

ADAPTIVE = dict.fromkeys(("adam", "dadam", "dadamw", "qg-dadam", "diloco", "noloco"), 0.005) | {"gt-nsgdm": 0.05}
"""Learning rates of algorithms that normalise their steps."""

VARIANTS = (
    Contender(name="relaysgd, momentum", algorithm="relaysgd:beta=0.9,nesterov=true", topology=CHAIN),
    Contender(name="relaysgd, momentum, trees", algorithm="relaysgd:beta=0.9,nesterov=true", topology=TREES),
    Contender(name="noloco, 20 local steps", algorithm="noloco:tau=20", topology=f"matching:{NODES}"),
    Contender(name="beer, top 10 %", algorithm="beer", wire="topk:0.1"),
    Contender(name="motef, top 10 %", algorithm="motef", wire="topk:0.1"),
    Contender(name="d2+, lazy ring", algorithm="d2+", topology=f"lazy/{RING}"),
    Contender(name="push-diging, sums", algorithm="push-diging:sums=true"),
    Contender(name="push-diging, sums, momentum", algorithm="push-diging:sums=true,beta=0.9"),
    Contender(name="sgp, momentum", algorithm="sgp:beta=0.9,nesterov=true", times=1.0),
    Contender(name="gossip-pga, momentum", algorithm="gossip-pga:beta=0.9,nesterov=true", times=1.0),
    Contender(name="diloco, 20 local steps", algorithm="diloco:tau=20"),
    Contender(name="lt-admm, momentum", algorithm="lt-admm:beta=0.9,tau=1,beta_a=0.2", times=8.0),
    Contender(name="dsgd, base graph", algorithm="dsgd", topology=BASE),
    Contender(name="dsgdm-n, base graph", algorithm="dsgdm-n", topology=BASE),
    Contender(name="qg-dsgdm-n, base graph", algorithm="qg-dsgdm-n", topology=BASE),
    Contender(name="choco, top 10 %", algorithm="choco", wire="topk:0.1"),
    Contender(name="adagossip, top 10 %", algorithm="adagossip", wire="topk:0.1"),
    *(
        Contender(name=f"{name} + merge", algorithm=name, communication=MERGE)
        for name in ("dsgd", "dsgdm-n", "qg-dsgdm-n", "edm")
    ),
)
"""Variants of algorithms, for the tiers that tune."""

PUBLISHED = (
    Contender(
        name="all-reduce, momentum", algorithm="sgdm-n", rates={"α = 0.1": 0.1, "α = 0.01": 0.1},
        published={"α = 0.1": 90.2, "α = 0.01": 90.2},
    ),
    Contender(
        name="qg-dsgdm-n", algorithm="qg-dsgdm-n", rates={"α = 0.1": 0.025, "α = 0.01": 0.05},
        published={"α = 0.1": 84.8, "α = 0.01": 63.3},
    ),
    Contender(
        name="relaysgd, momentum", algorithm="relaysgd:beta=0.9,nesterov=true,fill=start", topology=CHAIN,
        rates={"α = 0.1": 0.5, "α = 0.01": 0.125}, published={"α = 0.1": 89.2, "α = 0.01": 88.4},
    ),
    Contender(
        name="relaysgd, momentum, trees", algorithm="relaysgd:beta=0.9,nesterov=true,fill=start", topology=TREES,
        rates={"α = 0.1": 0.3, "α = 0.01": 0.15}, published={"α = 0.1": 89.5, "α = 0.01": 89.1},
    ),
    Contender(                              # 1/(1 − β) times the rate of D² with momentum, which has no factor 1 − β
        name="edm", algorithm="edm", rates={"α = 0.1": 0.5, "α = 0.01": 0.126},
    ),
)
"""The methods of tier relay: T. Vogels et al.: RelaySum for decentralized deep learning on heterogeneous data (2021),
Table 2, the worst node; EDM is not in it."""


def objections(experiment: Experiment) -> tuple[str, tuple[str, ...]]:
    """The library's reason to refuse an experiment's method, empty if there is none, and its warnings."""
    refused, faults = "", Faults(experiment.drop, experiment.churn)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            of = experiment.resolved
            check_needs(of.algorithm, of.topology, faults, alike=experiment.data_alike)
        except InputError as error:
            refused = str(error)
    return refused, tuple(dict.fromkeys(str(warning.message) for warning in said))


def contenders(tier: Tier) -> list[Contender]:
    """All methods of a tier. Algorithms that take no gradients are left out."""
    if not tier.validation:
        return list(PUBLISHED)
    learning = [name for name, one in ALGORITHMS.items() if not isinstance(one, Gossip)]
    return [*(contender(name, tier) for name in learning), *VARIANTS]


def contender(text: str, tier: Tier, name: str = "", topology: str = "", lr: float = 0.0) -> Contender:
    """An algorithm given as text, on the given graph, or on the first of `GRAPHS` that it accepts."""
    if not tier.validation and not lr:
        raise InputError(f"tier {tier.name} does not tune; give the learning rate with --lr")
    needs = algorithm(text).needs
    if topology and (n := count_nodes(topology)) != NODES:
        raise InputError(f"all methods of the leaderboard run on {NODES} nodes, but {topology} has {n}")
    graphs = [topology] if topology else GRAPHS
    fitting = [graph for graph in graphs if misfit(needs, parse(graph)) is None]
    rates = {} if tier.validation else dict.fromkeys((one.name for one in tier.conditions), lr)
    return Contender(name=name or text, algorithm=text, topology=(fitting or graphs)[0], lr=lr, rates=rates)


def select(tier: Tier, patterns: Sequence[str]) -> list[Contender]:
    """The methods whose name matches one of the patterns; all methods if there are no patterns."""
    everybody = {one.name: one for one in contenders(tier)}
    for pattern in patterns:
        if not fnfilter(everybody, pattern):
            names = ", ".join(everybody)
            raise InputError(f"no method of tier {tier.name} matches {pattern!r}; * matches any text; it has {names}")
    return [one for name, one in everybody.items() if any(fnmatch(name, pattern) for pattern in patterns or "*")]


# ------------------------------------------------------------------------------------------------ your own


def newcomer(text: str, tier: Tier, name: str, topology: str, lr: float, records: Path) -> Contender:
    """Your own method; raise InputError if it fails, or if its name is taken, also in the records."""
    if not 0 <= lr < math.inf:
        raise InputError(f"lr must be a number > 0, got {lr}")
    chosen = algorithm(text)
    try:
        traffic(chosen)                                     # runs a step
        one = contender(text, tier, name, topology, lr)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{text} fails, {fault(error)}; check it with `qg algorithms {text} --check`") from error
    if name_of(text) not in ALGORITHMS:
        try:
            check_algorithm(chosen)                         # a class that breaks the rules would get a wrong row
        except CheckFailed as failed:
            raise InputError(str(failed)) from None
    if file_name(one.name) == file_name(""):
        raise InputError(f"a name needs a letter or a digit, got {one.name!r}")
    taken = next((other for other in contenders(tier) if file_name(other.name) == file_name(one.name)), None)
    built_in = taken is not None and taken.settings == one.settings
    if taken is not None and not built_in:
        whose = "" if taken.name == one.name else f", {taken.name}, as a file"
        raise InputError(
            f"{one.name} is the name of another method of tier {tier.name}{whose}; give yours another --name"
        )
    found = read_standing(path := records / tier.name / file_name(one.name))
    if found is not None and (found.name, found.settings) != (one.name, one.settings):
        raise InputError(
            f"{path} is the record of {found.name} ({found.algorithm}, {found.topology}); give yours another --name, "
            "or delete it"
        )
    if found is not None and built_in:
        raise InputError(
            f"{path} is the record of this method already; to train it anew: "
            f"qg leaderboard {tier.name} --methods {one.name!r} --again"
        )
    return one


def source(text: str) -> str:
    """Hash of a method's files and options; a change repeats its runs. Empty for a built-in method."""
    name = name_of(text)
    if name in ALGORITHMS:
        return ""
    options = repr(algorithm(text)).encode()                # imports the files
    files = b"".join(path.read_bytes() for path in sources(name.partition(":")[0]))
    return hashlib.sha256(files + options).hexdigest()[:8]
