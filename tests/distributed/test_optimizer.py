"""The optimizer in a user's training loop: the same numbers as the simulator, and no hang."""

import re
import subprocess
import sys
from pathlib import Path

import loops
import pytest
import torch
from commands import PATIENCE
from processes import together

import quasiglobal as qg

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("algorithm", "groups"), [("qg-dsgdm-n", False), ("dsgdm-n-gt", True), ("slowmo:tau=7", True)])
def test_a_loop_is_what_the_simulator_computes(algorithm, groups):
    size, net = 3, loops.model()
    sizes = [p.numel() for p in net.parameters()]
    first, second = sum(sizes[:2]), sum(sizes[2:])

    def of_groups(one, other):
        values = [one if groups else other] * first + [other] * second
        return torch.tensor([values], dtype=torch.float64)

    def gradient(x, t):
        rows = []
        for rank in range(size):
            torch.nn.utils.vector_to_parameters(x[rank], net.parameters())
            net.zero_grad()
            loops.loss_of(net, loops.batches(rank)[t - 1]).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            rows.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
        return torch.stack(rows)

    expected = qg.minimize(
        gradient, loops.row(loops.model(0)), algorithm, "ring:3",
        lambda t: of_groups(0.02, 0.05) * (1 if t <= 20 else 0.1), 30, of_groups(0.1, 0.01),
    ).x
    rows = torch.stack(together(size, loops.train, size, algorithm, groups))
    assert (rows - expected).norm() <= 1e-12 * expected.norm()


def test_it_goes_on_from_its_state_dict():
    for whole, resumed in together(2, loops.interrupted, 2):
        assert whole.equal(resumed)


def test_an_overflow_still_mixes_and_keeps_the_state():
    for rank, (kept, frozen, finite, steps) in enumerate(together(2, loops.scaled, 2)):
        assert kept == (rank == 0)
        assert frozen
        assert finite
        assert steps == 6


def test_different_architectures_are_refused():
    assert all("hold another architecture" in error for error in together(2, loops.different, 2))


def test_a_node_that_runs_out_of_batches_is_left_behind():
    answers = together(3, loops.uneven, 3)
    assert all(0 in lost for lost, _ in answers[1:])
    assert all(finite for _, finite in answers)


def test_models_are_averaged_exactly_or_by_gossip():
    for gossiped, exact, expected in together(4, loops.averaged, 4):
        torch.testing.assert_close(exact, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(gossiped, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_example_runs_under_torchrun():
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [sys.executable, *words, str(ROOT / "examples" / "torchrun_digits.py")],
        capture_output=True, text=True, timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    scores = re.findall(r"reads ([\d.]+)%", done.stdout)         # two processes may write into one line
    assert len(scores) == 4
    assert len(set(scores)) == 1
    assert float(scores[0]) > 85


def test_without_torchrun_it_says_so():
    with pytest.raises(qg.InputError, match="torchrun"):
        qg.optim.GossipOptimizer(loops.model().parameters(), "dsgd", "ring:3")


def test_nodes_with_different_matrices_of_one_name_do_not_meet():
    for said in together(2, loops.with_own_weights, 2):
        assert re.search(r"nodes \[\d\] hold another architecture, algorithm or topology", said)


def test_the_rates_of_groups_are_one_row_that_is_kept():
    for same, changed, values in together(1, loops.rates_of_groups, 1):
        assert same
        assert changed
        assert values == [0.5, 0.5, 0.5, 0.25]
