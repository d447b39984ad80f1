"""Each algorithm gives the same numbers over processes and on stacked tensors."""

import pytest
from agreement import DROP, SEEDS, Distributed, Lossy, hosted_rows, in_a_process, run
from federations import Sites
from processes import together

from later_methods import LATER
from quasiglobal.algorithms import ALGORITHMS
from quasiglobal.engines.simulator import Simulator
from quasiglobal.engines.wire import wire_of


def compare(processes, cases, rounded=False, drop=0.0, wire=None, shared=5, sites=None):
    how = (Lossy, SEEDS[:1]) if drop else (Distributed, SEEDS)
    everywhere = together(processes, in_a_process, processes, cases, rounded, *how, wire, shared, sites)
    options = {"seeds": how[1], "shared": shared, "rounded": rounded, "drop": drop, "wire": wire}
    for k, (name, topology) in enumerate(cases):
        whole = run(name, topology, lambda graph: Simulator(graph, **options), hosted_rows)
        for answers in everywhere:
            rows, x, state = answers[k]
            scale = whole.x.norm(dim=1).max()
            assert (x - whole.x[rows]).norm(dim=1).max() <= 1e-12 * scale, (name, topology)
            for key, value in state.items():
                expected = whole.state[key][rows]
                assert (value - expected).norm() <= 1e-9 * (1 + expected.norm()), (name, topology, key)


FAST = [name for name in ALGORITHMS if name not in (*LATER, "motef")] + ["momentum-tracking", "edm", "proxskip", "k-gt"]


@pytest.mark.filterwarnings("ignore:.* needs a fixed", "ignore:D2 needs")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FAST, id="fast"),
        pytest.param(
            [*LATER, "motef", "diloco:tau=7", "noloco:tau=7", "momentum-tracking:init=mean"], id="later",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_algorithm_is_the_same_over_processes(names):
    compare(2, [(name, "ring:8") for name in names])


@pytest.mark.filterwarnings("ignore:.* needs a fixed", "ignore:D2 needs")
def test_time_varying_and_directed_graphs_are_too():
    names = ("dsgd", "qg-dsgdm-n", "dsgdm-n-gt", "slowmo", "mimelite", "push-diging:sums=true,beta=0.9")
    compare(4, [*((name, "one-peer-exponential:8") for name in names), ("dsgdm-n-gt", "every:2/equidyn:8")])


def test_nodes_that_count_unequally_are_too():
    fixed, drawn = (f"{graph}@5,1,2,9,1,3,1,4" for graph in ("ring:8", "every:2/matching:8"))
    names = ("dsgd", "qg-dsgdm-n", "d2", "dsgdm-n-gt", "slowmo", "mimelite:participation=0.5")
    compare(2, [*((name, fixed) for name in names), ("qg-dsgdm-n", drawn)])


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sites_over_tls_are_too(processes, tmp_path):
    sites = [site.path for site in Sites(tmp_path, f"complete:{processes}", processes).folders]
    names = ("dsgd", "qg-dsgdm-n", "dsgdm-n-gt", "push-diging:sums=true,beta=0.9")
    compare(processes, [(name, "one-peer-exponential:8") for name in names], sites=sites)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:W of .*epidemic")
def test_graphs_that_are_drawn_at_each_step_are_too():
    pushed = [("sgp", "equidyn:8"), ("qg-sgp", "equidyn:8")]
    compare(4, [("qg-dsgdm-n", "epidemic:8:2"), ("slowmo", "matching:7"), *pushed])


@pytest.mark.filterwarnings("ignore:.*loses its exactness")
@pytest.mark.parametrize(
    "names",
    [
        ("qg-dsgdm-n", "lt-admm:tau=2"),
        pytest.param(
            ("relaysgd:fill=start", "sgp", "push-diging:sums=true,beta=0.9", "ab", "beer", "motef", "noloco:tau=3"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=("fast", "others"),
)
def test_lost_messages_have_the_same_effect(names):
    compare(4, [(name, "ring:4") for name in names], drop=DROP)


@pytest.mark.slow
@pytest.mark.parametrize("drop", [0.0, DROP])
def test_two_trees_at_once_are_too(drop):
    names = ("relaysgd:beta=0.9,nesterov=true", "relaysgd:fill=start,base=dadam")
    compare(5, [(name, "double-trees:5") for name in names], drop=drop, shared=None)


@pytest.mark.parametrize("rounded", [False, True])
def test_messages_of_several_sizes_are_too(rounded):
    names = ("SmallFirst", "Widths", "Growing", "Pushing")
    cases = [*((f"agreement:{name}", "ring:4") for name in names), ("agreement:EdgesLater", "complete:20")]
    compare(2, cases, rounded=rounded, shared=None)


def test_models_that_travel_in_16_bits_are_too():
    compare(2, [(name, "ring:8") for name in ("gossip", "dsgdm-n", "dsgdm-n-gt")], rounded=True)


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["qsgd:4", "topk:0.4", "randk:0.4", "sign"])
def test_compressed_messages_are_too(wire):
    compare(2, [(name, "ring:4") for name in ("choco", "adagossip", "beer", "motef")], wire=wire_of(wire))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* needs a fixed", "ignore:D2 needs")
@pytest.mark.parametrize(("topology", "processes"), [("ring:8", 8), ("one-peer-exponential:8", 8), ("social", 4)])
def test_every_algorithm_on_every_graph(topology, processes):
    fixed = () if topology != "one-peer-exponential:8" else ("ed", "edm", "led")        # refused if W changes
    compare(processes, [(name, topology) for name in ALGORITHMS if name not in fixed])
