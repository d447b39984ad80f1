from dataclasses import fields
from fractions import Fraction

import pytest
import torch

import quasiglobal as qg
from quasiglobal.algorithms import text_of
from quasiglobal.algorithms.momentum_tracking import MomentumTracking
from quasiglobal.algorithms.quasi_global import QGDSGDm
from quasiglobal.algorithms.sgd import DSGDm
from quasiglobal.algorithms.slowmo import SlowMo
from quasiglobal.engines.costs import catalogue, describe, traffic
from quasiglobal.engines.simulator import Simulator


@pytest.mark.parametrize("name", qg.ALGORITHMS)
def test_each_carries_citation_equation_and_difference(name):
    entry, text = describe(name), type(qg.ALGORITHMS[name]).__doc__
    assert any(year in entry.citation for year in map(str, range(2004, 2027)))
    assert "←" in text
    assert "Differs from" in text


def test_options_are_read_by_their_type():
    assert qg.algorithm("qg-dsgdm-n:mu=0.5,tau=2") == QGDSGDm(nesterov=True, mu=0.5, tau=2)
    assert qg.algorithm("qg-dsgdm:mu=none,released=true") == QGDSGDm(released=True)
    assert qg.algorithm("dsgdm:sync=momentum,over=all") == DSGDm(sync="momentum", over="all")
    assert qg.algorithm("dsgdm: beta = 0.5 ") == DSGDm(beta=0.5)
    assert qg.algorithm("dmsgd:option=2") == qg.ALGORITHMS["dmsgd-2"]


def test_an_option_may_have_the_name_of_a_method():
    chosen = qg.algorithm("momentum-tracking:init=mean")
    assert chosen == MomentumTracking(init_="mean")
    assert text_of(chosen) == "momentum-tracking:init=mean"
    assert qg.algorithm("slowmo:base=momentum-tracking,init=mean").base == chosen


def test_wrappers_take_a_base_and_its_options():
    assert qg.algorithm("slowmo:base=dsgdm,tau=5") == SlowMo(base=DSGDm(), tau=5)
    assert qg.algorithm("sgdm:beta=0.8").base == DSGDm(beta=0.8)
    base = DSGDm(nesterov=True, beta=0.8)
    assert qg.algorithm("slowmo:beta=0.5,base.beta=0.8") == SlowMo(base=base, beta=0.5)
    assert qg.algorithm("slowmo:nesterov=false").base == DSGDm()
    assert qg.algorithm("slowmo:base.beta=0.3,base=dsgdm").base == DSGDm(beta=0.3)
    assert qg.algorithm("slowmo:base=sgdm,nesterov=true").base.base == DSGDm(nesterov=True)


def test_an_instance_is_its_own_name():
    algorithm = QGDSGDm(beta=0.3)
    assert qg.algorithm(algorithm) is algorithm
    assert qg.algorithm(QGDSGDm) == QGDSGDm()


def test_your_own_by_its_path():
    path = "quasiglobal.algorithms.quasi_global:QGDSGDm"
    assert qg.algorithm(path) == QGDSGDm()
    assert qg.algorithm(f"{path}:tau=3") == QGDSGDm(tau=3)


def test_your_own_may_have_options_without_a_default(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nimport quasiglobal as qg\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(qg.Algorithm):\n    k: int\n"
    )
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert qg.algorithm("mine:Mine:k=3").k == 3
    with pytest.raises(qg.InputError, match=r"cannot make mine:Mine: .*'k'"):
        qg.algorithm("mine:Mine")
    with pytest.raises(qg.InputError, match=r"cannot import broken .* division by zero"):
        qg.algorithm("broken:Mine")


WRONG = {
    "unknown sync 'momentun'; did you mean 'momentum'": lambda: DSGDm(sync="momentun"),
    "over=all says with whom": lambda: DSGDm(over="all"),
    "tau must be a whole number, got 2.5": lambda: QGDSGDm(tau=2.5),
    "beta must be a number, got '0.9'": lambda: QGDSGDm(beta="0.9"),
    "nesterov must be true or false, got 1": lambda: QGDSGDm(nesterov=1),
    "base must be an algorithm, got 'dsgdm'": lambda: SlowMo(base="dsgdm"),
    "alpha must be finite, got nan": lambda: SlowMo(base=DSGDm(), alpha=float("nan")),
    "an algorithm is a name or an Algorithm, got None": lambda: qg.algorithm(None),
}


@pytest.mark.parametrize("words", WRONG)
def test_options_are_checked_in_python_too(words):
    with pytest.raises(qg.InputError, match=words):
        WRONG[words]()


BAD = {
    "qg-dsgd": "unknown algorithm 'qg-dsgd'; did you mean 'qg-dsgdm'?",
    "": "unknown algorithm ''",
    "qg-dsgdm:betta=0.9": "unknown option of qg-dsgdm 'betta'; did you mean 'beta'?",
    "dsgd:beta=0.9": "unknown option of dsgd 'beta'; there is none",
    "slowmo:taw=3": "did you mean 'tau'?",
    "sgdm:neterov=true": "did you mean 'nesterov'?",
    "qg-dsgdm:beta": "option 'beta' of qg-dsgdm needs a value",
    "qg-dsgdm:beta=high": "beta of qg-dsgdm must be a number, got 'high'",
    "qg-dsgdm:beta=nan": "beta of qg-dsgdm must be finite, got nan",
    "qg-dsgdm:beta=1.5": "beta must be in [0, 1], got 1.5",
    "qg-dsgdm:tau=0": "tau must be in [1, inf), got 0",
    "qg-dsgdm:tau=1.5": "tau of qg-dsgdm must be a whole number, got '1.5'",
    "qg-dsgdm:nesterov=yes": "nesterov of qg-dsgdm must be true or false, got 'yes'",
    "dsgdm:sync=momentun": "did you mean 'momentum'?",
    "dmsgd:option=3": "known: 1, 2",
    "slowmo:base=dsgdn": "did you mean 'dsgd'?",
    "slowmo:alpha=inf": "alpha of slowmo must be finite, got inf",
    "mimelite:participation=2": "participation must be in (0, 1], got 2.0",
    "dadam:beta2=-1": "beta2 must be in [0, 1), got -1.0",
    "no.such.module:Name": "cannot import no.such.module",
    "nomodule:Name": "cannot import nomodule",
    "dadam:eps=0": "eps must be in (0, inf), got 0.0",
    "dadam:beta2=1": "beta2 must be in [0, 1), got 1.0",
    "dsgdm:over=all": "over=all says with whom to synchronize",
    "quasiglobal.algorithms:Nothing": "has no 'Nothing'; write the algorithm as",
    "quasiglobal.algorithms.base:Node": "is not an Algorithm",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_text_is_one_sentence_with_the_remedy(text):
    with pytest.raises(qg.InputError) as caught:
        qg.algorithm(text)
    assert BAD[text] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_traffic_and_memory_are_the_known_ones():
    costs = {entry.name: (str(entry.traffic), entry.memory) for entry in catalogue()}
    assert costs["dsgd"] == ("1", 0)
    assert costs["dsgdm-n"] == costs["qg-dsgdm-n"] == ("1", 1)
    assert costs["dsgd-gt"] == ("2", 2)
    assert costs["d2"] == ("1", 2)
    assert costs["sgdm-n"] == ("1 to all", 1)
    assert costs["slowmo"] == ("1 + 1/12 to all", 3)
    assert costs["mimelite"] == ("2 to all", 2)
    assert costs["qg-dadam"] == ("1", 2)
    assert costs["momentum-tracking"] == ("2", 2)
    assert costs["edm"] == ("1", 2)
    assert costs["decentlam"] == ("1", 1)
    assert costs["gossip-pga"] == ("15/16 + 1/16 to all", 0)
    assert costs["qg-gut"] == ("1", 4)
    assert costs["k-gt"] == ("2/5", 2)
    assert costs["led"] == costs["proxskip"] == ("1/5", 1)
    assert costs["gt-nsgdm"] == ("2", 2)
    assert costs["diloco"] == ("1/500 to all", 4)
    assert costs["noloco"] == ("1/50", 4)
    assert costs["beer"] == costs["motef"] == ("2", 6)
    assert costs["dfedsam"] == ("1/5", 1)


def test_options_change_the_cost():
    assert str(describe("dsgdm:sync=momentum").traffic) == "2"
    assert str(describe("dsgdm:sync=gradient,over=all").traffic) == "1 + 1 to all"
    assert str(describe("mimelite:tau=4").traffic) == "1/2 to all"
    assert str(describe("slowmo:average=false").traffic) == "1"
    assert describe("slowmo:buffers=average,tau=6").traffic.everybody == Fraction(2, 6)
    assert describe("qg-dsgdm:tau=3,released=true").memory == 2
    assert str(describe("slowmo:tau=1000").traffic) == "1 + 1/1000 to all"


def test_traffic_is_found_by_the_phases_alone():
    class EveryThird(qg.Algorithm):
        def step(self, x, g, state, node):
            return node.mix(x) if self.phase(node.t) else x, state

        def phase(self, t):
            return t % 3 == 0

    assert str(traffic(EveryThird())) == "1/3"


def test_d2_says_what_it_needs_of_w():
    assert describe("d2").needs == "doubly stochastic, fixed, symmetric, λ_min > -0.333"
    assert describe("edm").needs == "doubly stochastic, fixed, symmetric, λ_min > -0.333, else (I + W)/2"
    assert describe("proxskip").needs == describe("decentlam").needs == "doubly stochastic, fixed, symmetric"
    assert describe("gut").needs == describe("dmsgd").needs == "doubly stochastic, fixed, symmetric"
    assert describe("sgd").needs == "nothing"


def test_each_says_what_lost_messages_do_to_it():
    effects = {name: describe(name).loss for name in ("qg-dsgdm-n", "dsgd-gt", "d2+", "edm", "decentlam", "slowmo")}
    assert effects == {
        "qg-dsgdm-n": "tolerated", "dsgd-gt": "harmed", "d2+": "harmed", "edm": "harmed", "decentlam": "refused",
        "slowmo": "refused",
    }


@pytest.mark.parametrize("name", qg.ALGORITHMS)
def test_options_are_the_config(name):
    algorithm = qg.ALGORITHMS[name]
    options = {field.name: getattr(algorithm, field.name) for field in fields(algorithm)}
    assert type(algorithm)(**options) == algorithm


def test_mimelite_draws_its_clients_from_seed_and_round():
    def moved(seed):
        result = qg.minimize(
            lambda x, t: torch.ones_like(x), torch.zeros(2), "mimelite:participation=0.5,tau=2",
            "complete:8", lr=1.0, steps=16, seed=seed,
        )
        changed = result.history.diff(dim=0)[::2, :, 0] != 0      # the first step of each round
        return [tuple(clients.nonzero().flatten().tolist()) for clients in changed]

    rounds = moved(0)
    assert all(len(clients) == 4 for clients in rounds)
    assert len(set(rounds)) > 1
    assert rounds == moved(0)
    assert rounds != moved(1)


@pytest.mark.parametrize(("algorithm", "rates"), [("dadam", (0, 1)), ("qg-dadam:released=true", (1e6, 1e9))])
def test_the_released_adam_jumps_where_neighbours_cancel_and_the_next_gradient_is_zero(algorithm, rates):
    """In step 1, nodes 0, 1 and 2 move by −1, 1 and 0 learning rates: node 1 gets their mean 0, and its v stays 0."""
    gradient = torch.tensor([[1.0], [-1.0], [0.0], [-1.0]], dtype=torch.float64)
    start, lr = torch.zeros(1, dtype=torch.float64), 1e-3
    before, after = (
        qg.minimize(lambda x, t: gradient * (t == 1), start, algorithm, "ring:4", lr=lr, steps=k).x for k in (1, 2)
    )
    moved = float((after - before).abs().max()) / lr
    assert rates[0] < moved < rates[1]


def test_the_nodes_of_a_run_mix_together_at_steps_drawn_from_its_seed():
    graph, p, steps = qg.topology.ring(5), 0.3, 400
    x = torch.randn(10, 2, generator=torch.Generator().manual_seed(1))

    def mixed(seeds):
        engine, rows = Simulator(graph, seeds=seeds), x[: 5 * len(seeds)]
        after = [engine.mix_sometimes(p, t, (rows,), torch.tensor(float(t)))[0] for t in range(1, steps + 1)]
        return torch.stack([(one != rows).any(dim=1) for one in after]).view(steps, len(seeds), 5)

    both = mixed((3, 4))
    assert both.eq(both[:, :, :1]).all()
    assert both[:, :1].equal(mixed((3,)))
    assert not both[:, 0].equal(both[:, 1])
    assert abs(both.double().mean() - p) < 5 * (p * (1 - p) / (2 * steps)) ** 0.5
