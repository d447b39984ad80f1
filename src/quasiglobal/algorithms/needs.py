"""What an algorithm asks of the mixing matrix, of the links and of the data."""

from __future__ import annotations

from typing import Literal, NamedTuple

from quasiglobal.common.mixing import TOLERANCE


class Needs(NamedTuple):
    """Requirements of an algorithm on the mixing matrix W, on the links and on the data.

    W may be directed unless it must be symmetric, and may change with t unless it must be fixed.
    """

    doubly_stochastic: bool = True
    refuses_drift: bool = False
    """Whether a W that moves the nodes' mean is refused; otherwise it is warned of."""
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
    """Effect of a node that is cut off for many steps and trains on: a larger error, or a wrong result."""
    alike_data: bool = False
    """Whether the method is meant for data that are alike at all nodes."""

    def allow(self, lambda_min: float | None) -> bool:
        """Whether the smallest eigenvalue of W is above the bound; None is that of a W not fixed or not symmetric."""
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
