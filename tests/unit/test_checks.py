"""All built-in algorithms pass the battery, and each of its checks detects its own fault."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import quasiglobal as qg
from quasiglobal.algorithms import Needs, Wrapper
from quasiglobal.algorithms.needs import needs_of
from quasiglobal.checks import CHECKS
from quasiglobal.common.fingerprint import fingerprint

VARIANTS = [
    "dsgdm:sync=momentum", "dsgdm-n:sync=momentum,over=all", "dsgdm-n:sync=gradient",
    "dsgdm:sync=gradient,over=all", "qg-dsgdm:tau=3", "qg-dsgdm-n:tau=2,released=true", "qg-dsgdm:mu=0.5",
    "qg-dadam:released=true", "slowmo:base=qg-dsgdm-n,tau=4", "slowmo:average=false",
    "slowmo:buffers=average,tau=5", "slowmo:released=true", "slowmo:base=dadam", "slowmo:base=dsgd-gt",
    "mimelite:tau=3", "mimelite:participation=0.5,tau=2", "sgdm:base=d2",
    "momentum-tracking:init=mean", "dadamw:lam=0.1", "noloco:base=dadamw,lam=0.1,tau=3", "lt-admm:rho=2",
]


FIRST = {type(qg.algorithms.algorithm(name)).__module__: name for name in reversed(qg.ALGORITHMS)}.values()
"""One algorithm of each file: the others of the file share its code."""


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in (*qg.ALGORITHMS, *VARIANTS)
])
def test_the_battery_passes(name):
    assert qg.check_algorithm(name) == list(CHECKS)


@dataclass(frozen=True, kw_only=True)
class Honest(qg.Algorithm):
    """DSGD; each subclass below breaks one rule."""

    def step(self, x, g, state, node):
        return node.mix(x - node.lr * g), state


class GrowsState(Honest):
    def step(self, x, g, state, node):
        x, _ = super().step(x, g, state, node)
        return x, {"g": g}


class LosesType(Honest):
    def step(self, x, g, state, node):
        return super().step(x.double(), g, state, node)


class StateWithoutRows(Honest):
    def init(self, x):
        return {"count": torch.zeros(())}

    def step(self, x, g, state, node):
        return super().step(x, g, state, node)[0], {"count": state["count"] + 1}


class MutatesX(Honest):
    def step(self, x, g, state, node):
        return node.mix(x.sub_(node.lr * g)), state


class MutatesState(Honest):
    def init(self, x):
        return {"m": torch.zeros_like(x)}

    def step(self, x, g, state, node):
        state["m"].add_(g)
        return super().step(x, state["m"], state, node)


class ReplacesState(Honest):
    def init(self, x):
        return {"m": torch.zeros_like(x)}

    def step(self, x, g, state, node):
        state["m"] = 0.9 * state["m"] + g
        return super().step(x, state["m"], state, node)


class AveragesRates(Honest):
    def step(self, x, g, state, node):
        return node.mix(x - node.lr.mean(dim=-1, keepdim=True) * g), state


class HidesMemory(Honest):
    kept: ClassVar[list] = []

    def step(self, x, g, state, node):
        if node.t == 1:
            self.kept.clear()
        self.kept.append(g)
        return super().step(x, self.kept[-2] if len(self.kept) > 1 else g, state, node)


class DrawsItsOwn(Honest):
    def step(self, x, g, state, node):
        return super().step(x, g + 0.01 * torch.randn_like(g), state, node)


class BranchesOnTime(Honest):
    def step(self, x, g, state, node):
        return super().step(x, g if node.t % 3 else 2 * g, state, node)


class PlaysFavourites(Honest):
    def step(self, x, g, state, node):
        first = torch.zeros_like(g)
        first[0] = g[0]
        return super().step(x, g + first, state, node)


class MovesTheMean(Honest):
    def step(self, x, g, state, node):
        x_new = node.mix(x - node.lr * g)
        return x_new + 0.1 * (x_new - x).clamp_min(0), state


class Drifts(Honest):
    needs = Needs(keeps_mean=False)

    def step(self, x, g, state, node):
        return node.mix(x - node.lr * (g + 0.01)), state


class ForgetsTheMissing(Honest):
    def step(self, x, g, state, node):
        came, _ = node.exchange(x[:, None])
        return (x + came.sum(dim=1)) / (1 + node.edges.senders.sum(dim=1)) - node.lr * g, state

    @property
    def keeps_mean(self):
        return False


class MixesRuns(Honest):
    def step(self, x, g, state, node):
        return x - node.lr * g.mean(dim=0, keepdim=True), state


class WantsScalarRate(Honest):
    def step(self, x, g, state, node):
        return node.mix(x - float(node.lr.flatten()[0]) * g * (1 if node.lr.ndim == 0 else 2)), state


class DividesByRate(Honest):
    def step(self, x, g, state, node):
        x_new = node.mix(x - node.lr * g)
        return x - node.lr * ((x - x_new) / node.lr), state


class NeedsCompany(Honest):
    def step(self, x, g, state, node):
        if len(x) == 1:
            raise IndexError("nobody to talk to")
        return super().step(x, g, state, node)


BROKEN = {
    GrowsState: "shapes: state 'g' changes its name, shape or type",
    LosesType: "shapes: x became [6, 5] of torch.float64",
    StateWithoutRows: "shapes:",
    MutatesX: "pure: step changed its input x in place",
    MutatesState: "pure: step changed its input state 'm' in place",
    ReplacesState: "pure: step changed the dict `state`",
    AveragesRates: "rates: parameters with different learning rates move alike",
    HidesMemory: "storage: step keeps a tensor outside of x and state",
    DrawsItsOwn: "pure: the same run gives another result: step draws random numbers",
    BranchesOnTime: "phase: step branches on node.t",
    PlaysFavourites: "permutation: the result depends on the order of the nodes",
    MovesTheMean: "mean: the nodes' mean moves though g = 0",
    Drifts: "consensus: x drifts",
    ForgetsTheMissing: "consensus: x drifts though all nodes agree and g = 0; after lost messages, use the mask",
    MixesRuns: "runs: runs that share a program disturb each other",
    WantsScalarRate: "rates: a learning rate of shape",
    DividesByRate: "zero rate: step divides by node.lr",
    NeedsCompany: "one node: step raised IndexError: nobody to talk to",
}


def test_the_honest_one_passes():
    qg.check_algorithm(Honest())


@pytest.mark.parametrize("broken", [
    pytest.param(one, marks=pytest.mark.slow if k % 2 else ()) for k, one in enumerate(BROKEN)
])
def test_each_check_says_what_is_broken(broken):
    with pytest.raises(qg.CheckFailed) as caught:
        qg.check_algorithm(broken())
    assert BROKEN[broken] in str(caught.value)
    assert str(caught.value).startswith(f"{broken.__name__} failed")


def test_a_lost_memory_shows_on_resume():
    with pytest.raises(qg.CheckFailed, match="resume: resuming after step 1 gives another result"):
        qg.check_algorithm(HidesMemory())


def test_runs_that_do_not_repeat_are_not_compared():
    with pytest.raises(qg.CheckFailed, match=f"failed 1 of {len(CHECKS)} checks"):
        qg.check_algorithm(DrawsItsOwn())


def test_a_class_will_do_for_an_instance():
    assert qg.check_algorithm(Honest) == list(CHECKS)


class DeclaresByItself(Honest):
    """Properties of a step as attributes of the class, next to `needs`, as version 2 had them."""

    keeps_mean, needs = False, Needs(fixed=True, divides_by_lr=True)

    @property
    def refuses_base(self):
        return None


@dataclass(frozen=True, kw_only=True)
class Around(Wrapper):
    def step(self, x, g, state, node):
        return self.base.step(x, g, state, node)


def test_properties_of_a_step_may_be_attributes_of_the_class():
    needs = needs_of(DeclaresByItself())
    assert needs == Needs(fixed=True, divides_by_lr=True, keeps_mean=False, refuses_base=None)
    assert needs.full_precision
    assert needs.bears_clipping
    assert needs_of(Around(base=DeclaresByItself())) == needs._replace(refuses_base=Needs().refuses_base)


def test_only_properties_that_are_set_count_in_the_name_of_a_run():
    def named(needs):
        return fingerprint(type("Own", (Honest,), {"needs": needs})())

    assert named(Needs(fixed=True)) == named(Needs(fixed=True, rests=True)) != named(Needs(fixed=True, rests=False))
