"""D²: cancels the bias of heterogeneous data with the movement and gradient of the last step.

H. Tang, X. Lian, M. Yan, C. Zhang, J. Liu: D²: decentralized training over decentralized data. ICML 2018.
D²₊: T. Lin, S. P. Karimireddy, S. U. Stich, M. Jaggi: Quasi-Global Momentum. ICML 2021, footnote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from quasiglobal.algorithms.base import Algorithm, Node, State, zeros
from quasiglobal.algorithms.needs import Needs


@dataclass(frozen=True, kw_only=True)
class D2(Algorithm):
    """Each step repeats the last movement and adds the change of the gradient.

        x⁺ ← W (x − ((x₋ − x) + η (g − g₋)))          the first step is DSGD's
        D²₊: W (x − η ((x₋ − x)/η₋ + g − g₋))          η₋: the learning rate of the last step

    Differs from `dsgd` in reaching the exact minimiser; from `dsgd-gt` in needing no second message, but
    a fixed symmetric W with λ_min > −1/3. D² as published breaks when η decays, since it repeats a movement
    made with the old η; D²₊ (`plus=true`) rescales it.
    """

    citation: ClassVar[str] = "Tang et al. 2018; D²₊: Lin et al. 2021"

    plus: bool = False

    def init(self, x: Tensor) -> State:
        return zeros(x, "moved", "g_old")

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        last = node.lr * state["moved"] if self.plus else state["moved"]
        x_new = node.mix(x - (last + node.lr * (g - state["g_old"])))
        moved = (x - x_new) / node.lr if self.plus else x - x_new
        return x_new, {"moved": moved, "g_old": g}

    @property
    def needs(self) -> Needs:
        """A base can make the step of D²₊, x⁺ = W (x½ + (x − x½₋) η/η₋)."""
        plain = "applies the present lr to the last gradient, which the base's step does not show"
        return Needs(
            refuses_drift=True, lambda_min_above=-1 / 3, loss="harmed", divides_by_lr=self.plus,
            refuses_base=None if self.plus else plain,
        )
