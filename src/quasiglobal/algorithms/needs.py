"""Requirements of an algorithm on the mixing matrix, the links and the data, and properties of its step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from quasiglobal.algorithms.base import Algorithm

TOLERANCE = 1e-9
"""Rounding tolerance of an eigenvalue."""

UNKNOWN = "is not known to be a local step followed by an average of the models"


class Needs(NamedTuple):
    """Requirements of an algorithm on the mixing matrix W, on the links and on the data, and properties of its step.

    W may be directed unless it must be symmetric, and may change with t unless it must be fixed.
    """

    doubly_stochastic: bool = True
    refuses_drift: bool = False
    """Whether a W that moves the nodes' mean is refused; otherwise a warning is shown."""
    lambda_min_above: float | None = None
    """Lower bound on the smallest eigenvalue of W; if set, W must also be fixed and symmetric."""
    undirected: bool = False
    """Whether each link needs its reverse at the same step: other graphs are refused."""
    tree: bool = False
    """Whether the links of every step must be a spanning tree: other graphs are refused."""

    lazy: bool = False
    """Whether the engine mixes with (I + W)/2 if W does not meet the bound."""
    fixed: bool = False
    symmetric: bool = False
    loss: Literal["proof", "tolerated", "harmed", "refused"] = "tolerated"
    """Effect of a message that is lost in one direction: none, a larger error, a wrong result, or not supported."""
    absence: Literal["tolerated", "harmed"] = "tolerated"
    """Effect of a node that is cut off for many steps and continues to train: a larger error, or a wrong result."""
    alike_data: bool = False
    """Whether the method is meant for data that are alike at all nodes."""

    divides_by_lr: bool = False
    """Whether `step` divides by the learning rate, so that a schedule may not reach 0."""
    decouples_decay: bool = False
    """Whether `step` applies `node.weight_decay` to the model; else the engine adds weight_decay · x to g."""
    needs_full_precision: bool | None = None
    """Whether `step` uses small differences of mixed models, which the rounding of bf16 messages would hide.

    By default, whether it divides by the learning rate.
    """
    compresses: bool = False
    """Whether all messages are sent by `node.tell`, and the state holds the error of their compression."""
    follows_messages: bool = False
    """Whether the state has to agree with all sent and received messages, so that no step's state may be discarded."""
    keeps_mean: bool = True
    """Whether the nodes' mean does not change while g = 0 and W is doubly stochastic."""
    rests: bool = True
    """Whether nodes that agree stay where they are while g = 0."""
    refuses_base: str | None = UNKNOWN
    """Reason why no torch optimizer can make the local step, as a predicate of the algorithm; None if one can.

    The optimizer replaces x − ηg by its own result x½, and the algorithm continues with x½ and gradient 0. This is the
    same algorithm only if steps from (x, g) and (x − ηg, 0) agree, also while η changes.
    """

    @property
    def full_precision(self) -> bool:
        """Whether messages may not be rounded to bf16."""
        return self.divides_by_lr if self.needs_full_precision is None else self.needs_full_precision

    @property
    def bears_clipping(self) -> bool:
        """Whether a neighbour's message may be clipped: it is a model, and losing a part of it is tolerated."""
        return self.loss == "tolerated" and not self.follows_messages

    def of_step(self) -> Needs:
        """Return the properties of the step alone, without requirements on W, the links and the data."""
        return Needs(doubly_stochastic=False)._replace(**{name: getattr(self, name) for name in OF_STEP})

    def allow(self, lambda_min: float | None) -> bool:
        """Whether the smallest eigenvalue of W is above the bound; None: W is not fixed or not symmetric."""
        bound = self.lambda_min_above
        return bound is None or lambda_min is None or lambda_min > bound + TOLERANCE

    def __str__(self) -> str:
        bound = self.lambda_min_above
        words = ["doubly stochastic"] if self.doubly_stochastic else []
        words += ["fixed"] if self.fixed or bound is not None else []
        words += ["symmetric"] if self.symmetric or bound is not None else []
        if bound is not None:
            words.append(f"λ_min > {bound:.3g}" + (", else (I + W)/2" if self.lazy else ""))
        words += ["spanning tree"] if self.tree else ["undirected"] if self.undirected else []
        return ", ".join(words) or "nothing"


OF_STEP = Needs._fields[Needs._fields.index("divides_by_lr") :]
"""Names of the properties of a step."""


def needs_of(algorithm: Algorithm) -> Needs:
    """Return the needs of an algorithm; attributes such as `keeps_mean = False` override properties of its step."""
    own = {name: getattr(algorithm, name) for name in OF_STEP if hasattr(algorithm, name)}
    return algorithm.needs._replace(**own)
