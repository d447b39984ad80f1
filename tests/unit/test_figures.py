"""Facts that the toy figures show."""

import csv
from dataclasses import replace

import pytest
import torch

import quasiglobal as qg
from quasiglobal import topology
from quasiglobal.reproduction.demo import BASE, DemoSetting, compare, draw, numbers
from quasiglobal.reproduction.paper.toy import (
    FIGURES,
    NONCONVEX,
    ROSENBROCK,
    consensus_curve,
    crossings,
    figure_consensus,
    figure_speedup,
    figure_topology,
    make_figure,
    rosenbrock,
    steps_needed,
    trajectory,
    two_agents,
    winding_valley,
)
from quasiglobal.training.metrics import path_length

FAST = [pytest.param("figure-2d", marks=pytest.mark.slow), "figure-topology"]


@pytest.mark.parametrize("name", FAST)
def test_a_figure_is_a_png_an_svg_and_a_csv(name, tmp_path):
    made, paths = make_figure(name, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.{kind}" for kind in ("png", "svg", "csv")}
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in paths[1].read_text()
    with open(paths[2]) as file:
        assert len(list(csv.DictReader(file))) == len(made.rows) > 0
    assert made.says.endswith(".")


def test_the_same_figure_is_the_same_file(tmp_path):
    for run in ("a", "b"):
        make_figure("figure-topology", tmp_path / run)
    for name in ("figure-topology.svg", "figure-topology.png", "figure-topology.csv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_figure_is_computed_on_one_thread(monkeypatch, tmp_path):
    seen = []

    def watched():
        seen.append(torch.get_num_threads())
        return figure_topology()

    monkeypatch.setitem(FIGURES, "figure-topology", watched)
    torch.set_num_threads(2)
    try:
        make_figure("figure-topology", tmp_path)
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(1)


def test_an_unknown_figure_is_one_sentence(tmp_path):
    with pytest.raises(qg.InputError, match="did you mean 'figure-2d'"):
        make_figure("figure-2", tmp_path)


def test_two_agents_stay_together_under_quasi_global_momentum():
    apart = {}
    for name in ("dsgd", "dsgdm", "qg-dsgdm"):
        agents, model = two_agents(name)
        torch.testing.assert_close(agents.mean(dim=1), model[1:])
        apart[name] = float((agents[:, 0] - agents[:, 1]).norm(dim=-1).mean())
    assert apart["dsgdm"] > 5 * apart["qg-dsgdm"]
    assert apart["qg-dsgdm"] == pytest.approx(apart["dsgd"], rel=0.05)


@pytest.mark.parametrize("beta", [0.9, 0.95, 0.99])
def test_local_momentum_oscillates_more_than_quasi_global(beta):
    heavy_ball = path_length(two_agents(f"dsgdm:beta={beta}")[0][:, 0])
    quasi_global = path_length(two_agents(f"qg-dsgdm:beta={beta}")[0][:, 0])
    assert heavy_ball > 1.1 * quasi_global


def crossing(name, algorithm, level, which, steps):
    return crossings(consensus_curve(algorithm, topology.parse(name), steps), level)[which]


@pytest.mark.parametrize(("name", "steps"), [
    ("ring:32", 600), pytest.param("ring:64", 1000, marks=pytest.mark.slow),
])
def test_quasi_global_gossip_reaches_a_hundredth_in_half_the_steps_on_rings(name, steps):
    for which in (0, 1):
        quasi = crossing(name, "qg-gossip", 1e-2, which, steps)
        assert quasi < 0.5 * crossing(name, "gossip", 1e-2, which, steps)
    assert crossing(name, "qg-gossip", 1e-4, 0, steps) < crossing(name, "gossip", 1e-4, 0, steps)


@pytest.mark.parametrize("name", ["torus:16", "torus:64", "social"])
def test_plain_gossip_wins_at_a_ten_thousandth_on_tori_and_the_social_network(name):
    assert crossing(name, "gossip", 1e-4, 1, 300) < crossing(name, "qg-gossip", 1e-4, 1, 300)


def test_quasi_global_gossip_rebounds():
    first, last = (crossing("ring:16", "qg-gossip", 1e-2, which, 150) for which in (0, 1))
    assert first < last


def test_consensus_says_where_plain_gossip_wins():
    says = figure_consensus(["ring:16", "torus:16"]).says
    assert "first reaches 0.01 sooner on ring:16; plain gossip wins on none of them." in says, "a tie on the torus"
    assert "reaches for good 0.01 sooner on none of them; plain gossip wins on ring:16." in says
    assert "reaches for good 0.0001 sooner on none of them; plain gossip wins on ring:16, torus:16." in says


# (sgdm, qg-sgdm) over 1,000 steps from each start; the straight line to the minimum is 1.41 long.
ROSENBROCK_LENGTHS = {
    (0.9, (0, 0)): (5.96, 2.87),
    (0.9, (2, 0)): (6.39, 2.88),
    (0.9, (0, 2)): (6.13, 2.89),
    (0.9, (2, 2)): (6.17, 2.91),
    (0.99, (0, 0)): (58.48, 2.98),
    (0.99, (2, 0)): (63.12, 2.95),
    (0.99, (0, 2)): (59.15, 2.95),
    (0.99, (2, 2)): (59.34, 2.99),
}


@pytest.mark.parametrize(("beta", "start"), [
    pytest.param(*case, marks=() if case == (0.9, (2, 0)) else pytest.mark.slow) for case in ROSENBROCK_LENGTHS
])
def test_path_lengths_on_rosenbrock(beta, start):
    lengths = [
        float(path_length(trajectory(rosenbrock, f"{name}:beta={beta}", start, 0.001, 1000)))
        for name in ("sgdm", "qg-sgdm")
    ]
    assert lengths == pytest.approx(ROSENBROCK_LENGTHS[beta, start], abs=0.01)
    assert lengths[0] > 2 * lengths[1]


def test_the_panels_are_the_papers():
    assert {(s.beta, s.start) for s in ROSENBROCK} == set(ROSENBROCK_LENGTHS)
    assert [(s.beta, s.lr) for s in NONCONVEX] == [
        (0.9, 0.05), (0.9, 0.01), (0.9, 0.005), (0.99, 0.01), (0.99, 0.005),
    ]


@pytest.mark.parametrize(
    "setting", [NONCONVEX[1], *(pytest.param(one, marks=pytest.mark.slow) for one in NONCONVEX[2:])], ids=str
)
def test_quasi_global_momentum_winds_less_in_the_valley(setting):
    def length(name):
        text = f"{name}:beta={setting.beta}"
        return path_length(trajectory(winding_valley, text, setting.start, setting.lr, 500))

    assert length("qg-sgdm") < length("sgdm")


def test_crossings():
    assert crossings(torch.tensor([0.1, 0.05]), 0.2) == (0, 0)
    assert crossings(torch.tensor([1.0, 0.5]), 0.2) == (None, None)
    assert crossings(torch.tensor([1.0, 0.1, 0.5]), 0.2) == (1, None)


def test_steps_needed_interpolates_between_horizons():
    values = torch.tensor([1.0, 0.5, 0.25])
    assert steps_needed([10, 20, 40], values, 0.5) == pytest.approx(20)
    assert steps_needed([10, 20, 40], values, 0.5**1.5) == pytest.approx(20 * 2**0.5)
    assert steps_needed([10, 20, 40], values, 0.1) is None


@pytest.mark.slow
def test_more_nodes_need_fewer_steps_on_the_complete_graph_but_not_on_the_ring():
    made = figure_speedup(sizes=(4, 32), horizons=(64, 128, 256, 512, 1024), level=0.2, repeats=2)
    steps = {(row["topology"], row["n"]): row["steps"] for row in made.rows}
    assert 4 < steps["complete", 4] / steps["complete", 32] < 16
    assert steps["ring", 32] is None or steps["ring", 32] > 2 * steps["complete", 32]


@pytest.mark.slow
def test_linear_speedup_at_full_size():
    made = figure_speedup()
    steps = {(row["topology"], row["n"]): row["steps"] for row in made.rows}
    for kind in ("complete", "one-peer-exponential"):
        assert 12 < steps[kind, 4] / steps[kind, 64] < 24      # 16 times the nodes
    assert steps["ring", 64] is None or steps["ring", 64] > 4 * steps["complete", 64]


@pytest.mark.slow
def test_the_demo_shows_what_it_says(tmp_path):
    setting = DemoSetting(alphas=(0.01,), rates=(0.1,), seeds=1, base=replace(BASE, epochs=20, eval_every=10))
    rows = {row["algorithm"]: row for row in numbers(compare(setting, tmp_path))}
    assert rows["qg-dsgdm-n"]["accuracy"] > rows["dsgdm-n"]["accuracy"] + 1
    assert rows["sgdm-n"]["accuracy"] > rows["qg-dsgdm-n"]["accuracy"]
    assert rows["qg-dsgdm-n"]["consensus_distance"] < rows["dsgdm-n"]["consensus_distance"]


def test_the_demo_runs_every_cell_once_and_draws_it(tmp_path):
    base = replace(BASE, epochs=1, topology="ring:4", model="mlp")
    setting = DemoSetting(alphas=(0.1,), rates=(0.1,), seeds=1, base=base)
    heard = []
    outcomes = compare(setting, tmp_path, heard.append)
    assert len(heard) == setting.epochs
    assert [row["algorithm"] for row in numbers(outcomes)] == ["sgdm-n", "dsgd", "dsgdm-n", "qg-dsgdm-n"]
    assert len(draw(setting, outcomes).axes) == 1
    again = compare(setting, tmp_path, heard.append)
    assert [numbers([one]) for one in again] == [numbers([one]) for one in outcomes]
    assert len(heard) == setting.epochs                 # nothing was run again
