"""Neighbours that are slow, with a deadline for each step (`round_deadline`)."""

import json
import math
import statistics
from pathlib import Path
from types import SimpleNamespace

import meetings
import pytest
import torch
from commands import PATIENCE, ended, train_apart
from processes import together
from torch.distributed import HashStore

import quasiglobal as qg
from quasiglobal import topology
from quasiglobal.engines.distributed import Distributed
from quasiglobal.engines.simulator import Simulator
from quasiglobal.peers.membership import Pace
from quasiglobal.peers.rendezvous import serve
from quasiglobal.runs.agreement import refuse_faults
from quasiglobal.runs.store import find_runs
from quasiglobal.training.experiment import Experiment


@pytest.mark.slow
def test_a_peer_that_only_gives_signs_of_life_costs_few_deadlines():
    for mixed, seconds, late in together(3, meetings.only_alive, 0.3)[:2]:
        assert max(seconds) < 1.5
        assert sum(seconds) < 3.0                           # 20 deadlines are 6 s, 20 timeouts of heartbeats 600 s
        assert late == {2: "it is late"}
        torch.testing.assert_close(mixed, torch.full((1, 4), 0.5), rtol=0, atol=0.01)


@pytest.mark.slow
def test_models_sent_ahead_meet_the_deadline():
    graph, algorithm = qg.topology.ring(3), qg.algorithms.Overlap(base=qg.algorithm("qg-dsgdm-n"))
    start = torch.randn(3, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    engine, x = Simulator(graph), start
    state = engine.begin(algorithm, x)
    for t in range(1, 9):
        x, state = engine.step(algorithm, x, x.sin(), state, t=t, lr=x.new_tensor(0.1), full_gradient=torch.sin)
    rows, skipped = zip(*together(3, meetings.ahead, graph, algorithm, start, 30.0), strict=True)
    assert skipped == (0, 0, 0)
    torch.testing.assert_close(torch.cat(rows), x, rtol=0, atol=1e-12)


def test_who_sends_half_as_often_or_less_is_not_waited_for():
    def waits(arrived):
        pace = Pace(1.0)
        pace.begin((1, 0))
        return [pace.until(7, count) > 0 for count in arrived]

    assert all(waits([0, 1, 2, 3, 4, 5, 6]))
    assert all(waits([0, 1, 1, 3, 3, 4, 5])), "a stall of a step or two"
    assert waits([0, 0, 0, 0, 0, 0, 0]) == [True, True, True, False, False, False, False]
    assert waits([0, 0, 0, 0, 1, 1, 1, 1, 1, 2])[3:] == [False] * 7, "now and then"
    assert waits([0, 0, 0, 0, 0, 1, 2, 3, 4])[-3:] == [True, True, True], "back in step"
    assert Pace(None).until(7, 0) == math.inf


def test_a_process_that_is_behind_makes_the_next_step_of_its_neighbours():
    def behind(*newest, deadline=1.0, missing=0):
        hosted = [(k,) for k in range(1 + len(newest) + missing)]
        engine = Distributed(topology.complete(len(hosted)), HashStore(), 0, hosted, round_deadline=deadline)
        engine.members.last_step = 100
        engine.members.edges = {k: SimpleNamespace(newest=(step, 0)) for k, step in enumerate(newest, start=1)}
        return engine._behind(5)

    assert behind(6, 6) == 0
    assert behind(25, 25) == 21
    assert behind(25, 10**9, 90) == 21
    assert behind(100) == 95
    assert behind(25, deadline=None) == 0
    assert behind(100, missing=1) == 0, "a liar, while another neighbour may reconnect"


def test_a_deadline_is_hashed_only_where_it_is_set_and_refused_for_exact_means():
    assert Experiment(round_deadline=None).hash == Experiment().hash != Experiment(round_deadline=2).hash
    with pytest.raises(qg.InputError, match="round_deadline must be > 0 seconds"):
        Experiment(round_deadline=0)
    with pytest.raises(qg.InputError, match="slowmo needs exact means over all nodes"):
        refuse_faults(Experiment(algorithm="slowmo", round_deadline=1))
    with pytest.raises(qg.InputError, match="decentlam collapses when messages are late or lost"):
        refuse_faults(Experiment(algorithm="decentlam", round_deadline=1))
    with pytest.warns(UserWarning, match="momentum-tracking loses its exactness"):
        refuse_faults(Experiment(algorithm="momentum-tracking", round_deadline=1))


STEP, EPOCHS, DEADLINE = 0.2, 40, 0.6


def measures(folder, port, slow):
    """Train 8 nodes in 8 processes, in which process 3 takes `slow` times as long; return what each measured."""
    words = ["--topology", "ring:8", "--epochs", str(EPOCHS), "--round-deadline", str(DEADLINE), "--milestones"]
    program = Path(__file__).parent / "slow.py"
    programs = [(program, str(STEP * (slow if rank == 3 else 1))) for rank in range(8)]
    for process in train_apart(folder, port, 8, *words, programs=programs):
        ended(process, seconds=2 * PATIENCE)
    (run,) = find_runs(folder)
    assert run.status == "finished"
    files = [run.folder / "parts" / str(rank) / "metrics.jsonl" for rank in range(8)]
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in files]


@pytest.mark.slow
def test_a_site_20_times_slower_slows_nobody_and_learns_the_same(tmp_path):
    server = serve("127.0.0.1", 0)

    def seconds(of):
        return statistics.median(lines[-1]["written"] - lines[0]["written"] for k, lines in enumerate(of) if k != 3)

    alike, slow = (measures(tmp_path / str(factor), server.port, factor) for factor in (1, 20))
    print("seconds", seconds(alike), seconds(slow))
    accuracies = [lines[-1]["accuracy"][0] for lines in slow]
    print("accuracies", accuracies, "epochs of the slow site", [line["epoch"] for line in slow[3]])
    assert all(lines[-1]["epoch"] == EPOCHS for lines in slow)
    assert len(slow[3]) < EPOCHS / 2, "it leaves out epochs"
    assert seconds(slow) < 1.1 * seconds(alike)
    others = statistics.mean(accuracies[:3] + accuracies[4:])
    assert accuracies[3] > others - 0.02
