"""Which algorithms allow another optimizer to make the local step, as `GossipOptimizer(base=…)` does."""

from __future__ import annotations

from quasiglobal.algorithms.adam import DAdam, QGDAdam
from quasiglobal.algorithms.base import Algorithm
from quasiglobal.algorithms.centralized import Centralized
from quasiglobal.algorithms.d2 import D2
from quasiglobal.algorithms.dmsgd import DMSGD
from quasiglobal.algorithms.gossip import Gossip
from quasiglobal.algorithms.gradient_tracking import GradientTracking
from quasiglobal.algorithms.mimelite import MimeLite
from quasiglobal.algorithms.quasi_global import QHM, QGDSGDm
from quasiglobal.algorithms.sgd import DSGD, DSGDm
from quasiglobal.algorithms.slowmo import SlowMo


def refusal(algorithm: Algorithm) -> str | None:
    """Why an algorithm does not accept a base optimizer; None if it does.

    The base replaces x − ηg by its own result x½, and the algorithm continues with x½ and gradient 0. This is the
    same algorithm only if it depends on x and g through x − ηg alone: steps from (x, g) and (x − ηg, 0) agree, also
    while η changes. D²₊ does, since it is x⁺ = W (x½ + (x − x½₋) η/η₋).
    """
    if type(algorithm) is DSGD or (type(algorithm) is D2 and algorithm.plus):
        return None
    if type(algorithm) is not SlowMo:
        return REASONS.get(type(algorithm), "is not known to be a local step followed by an average of the models")
    if algorithm.buffers == "average":
        return "averages buffers with buffers=average, but the base's buffers stay on their node"
    reason = refusal(algorithm.base)
    return reason and f"wraps {type(algorithm.base).__name__}, which {reason}"


REASONS: dict[type[Algorithm], str] = {
    DSGDm: "adds momentum of its own to the local step",
    DAdam: "scales the local step by moments of its own",
    QGDSGDm: "adds quasi-global momentum to the local step, which would be combined with the base's",
    QGDAdam: "scales the local step by quasi-global moments, which would be combined with the base's",
    QHM: "adds momentum of its own to the local step",
    D2: "applies the present lr to the last gradient, which the base's step does not show",
    GradientTracking: "steps along a tracked mean of all nodes' gradients, after the average",
    DMSGD: "adds momentum of its own to the local step, after the average",
    MimeLite: "needs the gradient over all of a node's data",
    Centralized: "averages the gradients before the step, whereas a base steps on this node's gradient",
    Gossip: "uses no gradients",
}
"""Reasons for `refusal`, continuing a sentence about the algorithm."""
