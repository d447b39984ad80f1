"""`--trust`: one neighbour of eight lies, and honest ones are not taken for liars."""

import json
import logging
import math
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from statistics import fmean

import lies
import pytest
import torch
from commands import wait_for
from federations import Sites
from torch.distributed import HashStore

import quasiglobal as qg
from quasiglobal.cli import look
from quasiglobal.engines.distributed import Distributed
from quasiglobal.engines.trust import SUGGESTED
from quasiglobal.runs.checkpoints import newest_of_parts
from quasiglobal.runs.store import find_runs
from quasiglobal.stacked import step_blocks
from quasiglobal.stacked.step_blocks import ModelRows

NOTHING = 35.0
"""Accuracy in percent of models that have learned almost nothing; chance is 10."""

COSTS = 3.0
"""Points that a liar may cost."""


@cache
def without_a_liar(topology, spread="iid"):
    return fmean(lies.simulated(topology, math.inf, spread=spread)[0])


def test_a_huge_liar_over_real_edges_is_clipped_and_named_once(caplog):
    with caplog.at_level(logging.WARNING):
        results = lies.in_threads("ring:8", SUGGESTED, 40, "huge")
    assert all(right > 80 for _, right, _ in filter(None, results))
    assert {(k, there) for k, result in enumerate(results) if result for there in result[2]} == {(2, 3), (4, 3)}
    said = [record.getMessage() for record in caplog.records if "clips" in record.getMessage()]
    assert sorted(said) == [f"process {k} clips process 3 from step 1: its model is too far away" for k in (2, 4)]


def test_honest_numbers_are_the_same_bits_with_and_without_trust():
    with_trust, without = (lies.in_threads("ring:8", trust, 20, spread="sorted") for trust in (SUGGESTED, math.inf))
    for ours, theirs in zip(with_trust, without, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert ours[2] == {}


@pytest.mark.slow
def test_steps_in_blocks_clip_like_whole_steps(monkeypatch):
    def steps(in_place):
        """The models after 10 steps; node 1 sends a huge one from step 4 on."""
        store, models = HashStore(), [None] * 3

        def work(rank):
            engine = Distributed(qg.topology.parse("ring:3"), store, rank, [(0,), (1,), (2,)], timeout=60, trust=4.0)
            draw, method = torch.Generator().manual_seed(rank), qg.algorithm("qg-dsgdm-n")
            x = torch.zeros(1, 40, dtype=torch.float64)
            state = engine.connect().begin(method, x)
            for t in range(1, 11):
                g = torch.randn(1, 40, generator=draw, dtype=x.dtype) * (1e9 if rank == 1 and t > 3 else 1)
                how = {"t": t, "lr": torch.tensor(0.1, dtype=x.dtype), "full_gradient": torch.sin}
                if in_place:
                    engine.step_in_place(method, ModelRows([x]), ModelRows([g]), state, **how)
                else:
                    x, state = engine.step(method, x, g, state, **how)
            models[rank] = x, sum(one["clipped"] for one in engine.accounts().values())
            assert in_place == any(engine._in_blocks.programs.values())
            engine.close()

        with ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(work, rank) for rank in range(3)]:
                done.result()
        return models

    monkeypatch.setattr(step_blocks, "BLOCK", 12 // torch.get_num_threads())
    for whole, in_blocks in zip(steps(False), steps(True), strict=True):
        assert torch.allclose(whole[0], in_blocks[0], rtol=1e-12, atol=0)
        assert whole[1] == in_blocks[1]
    assert whole[1] > 0
    assert whole[0].norm() < 1e3


@pytest.mark.parametrize("cut", [lies.away, lies.halved])
def test_nodes_that_were_apart_are_not_clipped(cut):
    assert lies.simulated("ring:8", SUGGESTED, 100, cut=cut(20, 90), spread="sorted")[1] == {}


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["ring:8", "complete:8"])
@pytest.mark.parametrize("lie", lies.LIES)
def test_a_liar_costs_three_points_at_most(topology, lie):
    right, clipped = lies.simulated(topology, SUGGESTED, lie=lie)
    assert fmean(right) > without_a_liar(topology) - COSTS
    assert {there for _, there in clipped} <= {lies.LIAR} or lie == "copied"


@pytest.mark.slow
@pytest.mark.parametrize("lie", ["huge", "opposite", "noise", "stale", "zeros"])
def test_a_liar_costs_everything_without_trust(lie):
    assert fmean(lies.simulated("ring:8", math.inf, lie=lie)[0]) < NOTHING


@pytest.mark.slow
@pytest.mark.parametrize("lie", ["huge", "opposite", "noise", "stale", "zeros"])
def test_with_sorted_labels_a_liar_costs_what_its_silence_would(lie):
    silent, _ = lies.simulated("ring:8", math.inf, cut=lies.away(1, math.inf), spread="sorted")
    others = silent[: lies.LIAR] + silent[lies.LIAR + 1 :]
    right, _ = lies.simulated("ring:8", SUGGESTED, lie=lie, spread="sorted")
    assert fmean(right) > fmean(others) - COSTS


@pytest.mark.slow
@pytest.mark.parametrize("lie", lies.LIES)
def test_liars_over_real_edges(lie):
    results = lies.in_threads("ring:8", SUGGESTED, 150, lie)
    assert fmean(result[1] for result in results if result) > without_a_liar("ring:8") - COSTS


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["ring:8", "one-peer-exponential:8", "exponential:8"])
@pytest.mark.parametrize("spread", ["iid", "0.1", "sorted"])
@pytest.mark.parametrize("method", [("qg-dsgdm-n", 0.05), ("dsgdm-n", 0.05), ("dsgd", 0.1), ("dadam", 0.002)])
def test_honest_nodes_clip_nothing_even_if_one_is_away_for_20_steps(topology, spread, method):
    algorithm, lr = method
    for cut in (lies.away(0, 0), lies.away(60, 79)):
        how = {"cut": cut, "spread": spread, "algorithm": algorithm, "lr": lr}
        assert lies.simulated(topology, SUGGESTED, **how)[1] == {}


# ------------------------------------------------------------------------------------------------ sites


def clipped_by(folder, capsys):
    """The clipped models of each neighbour, as `qg status` counts them."""
    (run,) = find_runs(folder)
    look.status(run.folder, json=True)
    (row,) = json.loads(capsys.readouterr().out)
    return row["clipped"]


@pytest.mark.slow
@pytest.mark.parametrize("lie", ["huge", "opposite"])
def test_a_lying_site_is_clipped_named_and_counted(tmp_path, owners, capsys, lie):
    four, sites = owners(epochs=40), Sites(tmp_path, "ring:4", 4)
    liar = (str(Path(__file__).parent / "liar.py"), lie)
    nodes = [four.join(k, sites.folders[k], program=liar if k == 2 else ("-m", "quasiglobal")) for k in range(4)]
    for k in (0, 1, 3):
        said = four.said(nodes[k], k)
        assert said.count("clips node 2 (site2)") == (k != 0), said
        assert list(clipped_by(tmp_path / f"runs{k}", capsys)) == (["2"] if k else [])
        (run,) = find_runs(tmp_path / f"runs{k}")
        assert run.summary.last["accuracy"] > 2 * NOTHING / 100          # they learn; lies.py measures how well


@pytest.mark.slow
def test_sites_that_were_killed_or_stopped_come_back(tmp_path, owners, capsys):
    four, sites = owners(epochs=600), Sites(tmp_path, "ring:4", 4)
    words = ["--peer-timeout", "3", "--checkpoint-seconds", "0"]
    nodes = [four.join(k, sites.folders[k], *words) for k in range(4)]
    wait_for(lambda: list(tmp_path.glob("runs2/*/parts/2/checkpoint/000005.json")))
    nodes[2].kill()
    nodes[2].wait()
    time.sleep(3)
    nodes[2] = four.join(2, sites.folders[2], *words)
    wait_for(lambda: "reconnected to node 2" in four.log(1).read_text())
    os.kill(nodes[1].pid, signal.SIGSTOP)
    time.sleep(8)
    os.kill(nodes[1].pid, signal.SIGCONT)
    for k, process in enumerate(nodes):
        four.said(process, k)
        assert all(count < 50 for count in clipped_by(tmp_path / f"runs{k}", capsys).values())
    runs = [next(find_runs(tmp_path / f"runs{k}")) for k in range(4)]
    models = torch.cat([newest_of_parts(run.folder)[0].rows["x"] for run in runs])
    assert (models - models.mean(dim=0)).norm() < 0.05 * models.norm()
