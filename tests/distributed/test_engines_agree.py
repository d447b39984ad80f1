"""Each algorithm gives the same numbers over processes and on stacked tensors."""

import pytest
from agreement import SEEDS, hosted_rows, in_a_process, run
from processes import together

from quasiglobal.algorithms import ALGORITHMS
from quasiglobal.engines.simulator import Simulator


def compare(processes, cases, rounded=False):
    everywhere = together(processes, in_a_process, processes, cases, rounded)
    for k, (name, topology) in enumerate(cases):
        whole = run(name, topology, lambda graph: Simulator(graph, seeds=SEEDS, shared=5, rounded=rounded), hosted_rows)
        for answers in everywhere:
            rows, x, state = answers[k]
            scale = whole.x.norm(dim=1).max()
            assert (x - whole.x[rows]).norm(dim=1).max() <= 1e-12 * scale, (name, topology)
            for key, value in state.items():
                expected = whole.state[key][rows]
                assert (value - expected).norm() <= 1e-9 * (1 + expected.norm()), (name, topology, key)


@pytest.mark.filterwarnings("ignore:D2 needs")
def test_every_algorithm_is_the_same_over_processes():
    compare(2, [(name, "ring:8") for name in ALGORITHMS])


@pytest.mark.filterwarnings("ignore:D2 needs")
def test_time_varying_and_directed_graphs_are_too():
    names = ("dsgd", "qg-dsgdm-n", "dsgdm-n-gt", "slowmo", "mimelite")
    compare(4, [(name, "one-peer-exponential:8") for name in names])


def test_models_that_travel_in_16_bits_are_too():
    compare(2, [(name, "ring:8") for name in ("gossip", "dsgdm-n", "dsgdm-n-gt")], rounded=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:D2 needs")
@pytest.mark.parametrize(("topology", "processes"), [("ring:8", 8), ("one-peer-exponential:8", 8), ("social", 4)])
def test_every_algorithm_on_every_graph(topology, processes):
    compare(processes, [(name, topology) for name in ALGORITHMS])
