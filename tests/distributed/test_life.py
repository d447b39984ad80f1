"""Neighbours that keep a process waiting, and processes that were away: nobody stands still for them."""

import re
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import meetings
import pytest
import torch
from commands import QG, ended, train_apart, wait_for, wait_for_epoch
from connections import at_once, channels, soon
from federations import Sites
from processes import together
from torch.distributed import HashStore

from quasiglobal import topology
from quasiglobal.engines.distributed import Distributed, LateModels
from quasiglobal.peers.edge import MAGIC, MOVE, Edge, Expected, Late, Lost
from quasiglobal.peers.gloo import GlooChannel, GlooOpener
from quasiglobal.peers.membership import FEW, Membership
from quasiglobal.peers.rendezvous import serve
from quasiglobal.runs.checkpoints import newest_of_parts
from quasiglobal.runs.store import find_runs
from quasiglobal.stacked.step_blocks import ModelRows

COUNT, STEP, TIMEOUT, PATIENCE = 1000, 50, 0.3, 60
ROW = torch.ones(COUNT)


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    return Sites(tmp_path_factory.mktemp("life"), "ring:4", 4)


def dribble(edge, n):
    """One byte of a message for the current step at each call."""
    edge.channel.send(edge._head((STEP, 0), COUNT, 4) if n == 0 else torch.zeros(1, dtype=torch.uint8))


LIVES = {
    "nothing": lambda edge, n: None,
    "past steps": lambda edge, n: edge.send((1, 0), ROW, 5.0),
    "further past steps": lambda edge, n: edge.send((1 + n % (STEP - 1), n), ROW, 5.0),
    "notes": lambda edge, n: edge.send_note(b"{}"),
    "moves": lambda edge, n: edge.channel.send(torch.tensor([MAGIC, 0, MOVE, 0, 1, 0])),
    "heartbeats": lambda edge, n: edge.send_heartbeat(STEP),
    "single bytes": dribble,
}


@pytest.mark.parametrize("life", LIVES)
def test_who_never_sends_the_awaited_message_is_given_up(sites, life):
    here, there = (Edge(k, 1 - k, channel, 0) for k, channel in enumerate(channels(sites)))
    done = threading.Event()

    def send():
        for n in range(100 * PATIENCE):
            with suppress(Lost):
                LIVES[life](there, n)
            if done.wait(0.01):
                return

    for edge in (here, there):
        edge.listen(4 * COUNT)
    threading.Thread(target=send, daemon=True).start()
    began = time.monotonic()
    try:
        with pytest.raises(Late):
            here.receive((STEP, 0), Expected(COUNT, torch.float32), TIMEOUT)
        assert time.monotonic() - began < PATIENCE / 2
    finally:
        done.set()
        for edge in (here, there):
            edge.close()


@pytest.mark.parametrize("life", ["heartbeats", "bytes"])
def test_who_waits_itself_or_sends_slowly_has_ten_timeouts(sites, life):
    """The message takes more than a timeout, in pieces that come far more often."""
    here, there = (Edge(k, 1 - k, channel, 0) for k, channel in enumerate(channels(sites)))

    def send():
        pieces = ROW.view(torch.uint8).split(ROW.nbytes // 25) if life == "bytes" else 25 * [None]
        there.channel.send(there._head((STEP, 0), COUNT, 4)) if life == "bytes" else None
        for piece in pieces:
            there.send_heartbeat(STEP) if piece is None else there.channel.send(piece)
            time.sleep(0.1)
        if life == "heartbeats":
            there.send((STEP, 0), ROW, 5.0)

    for edge in (here, there):
        edge.listen(4 * COUNT)
    came, _ = at_once(lambda: here.receive((STEP, 0), Expected(COUNT, torch.float32), 2.0), send)
    assert came.equal(ROW)
    for edge in (here, there):
        edge.close()


def test_a_large_message_is_seen_to_arrive_over_gloo():
    store, size, seen = HashStore(), 2**26, set()
    ends = at_once(*(lambda k=k: GlooChannel(store, k, "127.0.0.1", 20.0) for k in range(2)))
    buffer, done = torch.zeros(size, dtype=torch.uint8), threading.Event()

    def receive():
        ends[1].recv_into(buffer, soon(60))
        done.set()

    def look():
        while not done.is_set():
            seen.add(ends[1].moved()[1])

    at_once(receive, look, lambda: ends[0].send(torch.ones(size, dtype=torch.uint8)).wait(soon(60)))
    assert buffer.all()
    assert len(seen) > 2, "0, and something in between"


def ring_member(store, rank, step=0, timeout=2.0):
    members = Membership(
        GlooOpener(store, "127.0.0.1"), rank, [1 - rank], experiment="e", topology="t", timeout=timeout,
        handover=LateModels(lambda: None),
    )
    members.step, members.last_step = step, 100
    return members


def test_who_is_killed_before_its_first_step_is_admitted_again():
    """It was admitted, and this process still loads its data or waits for others."""
    store = HashStore()
    stays, killed = ring_member(store, 0), ring_member(store, 1)
    at_once(lambda: stays.find(20), lambda: killed.find(20))
    for edge in killed._opening.values():
        edge.cut("killed")
    killed._closing.set()
    again = ring_member(store, 1)
    try:
        again.find(20)
        at_once(lambda: stays.begin(1000), lambda: again.begin(1000))
        assert list(stays.edges) == [1]
        assert list(again.edges) == [0]
    finally:
        at_once(stays.close, again.close, killed.close)


def test_sigterm_ends_a_process_whatever_it_waits_for():
    for wait, seconds in zip(meetings.WAITS, together(2, meetings.told_to_stop)[0], strict=True):
        assert seconds < 60, f"{wait}: in place of the timeout of 600 s"


def test_a_vain_wait_is_not_repeated_at_every_step():
    members = ring_member(HashStore(), 0)

    def rest():
        """The time in which it is not waited for after a vain wait of 60 s, which begins after the rest before."""
        members._unawaited.clear()
        members._note_vain(1, 60)
        return round(members._unawaited.get(1, 0.0) - time.monotonic(), -1)

    assert rest() < 0, "once, as in a short absence"
    assert [rest(), rest(), rest()] == [60, 120, 240]
    members._note_vain(1, 60)
    assert members._vain[1] == 4, "it was not waited for"
    for _ in range(4 * 16):
        members.heard(1)
    assert rest() < 0


# ------------------------------------------------------------------------------------------------ catching up


def joins(here, *claims, last_step=1000, missing=()):
    """The step at which a process joins neighbours that claim these steps; the last ones have no edge."""
    members = ring_member(HashStore(), 0)
    members.last_step, members.neighbours = last_step, range(1, 1 + len(claims) + len(missing))
    members.edges = {k: SimpleNamespace(step_there=0, newest=(claim, 0)) for k, claim in enumerate(claims, start=1)}
    return members.step_to_join(here, FEW)


def test_a_process_joins_at_the_median_of_its_neighbours_steps():
    assert joins(10, 500, 502) == 500, "of two the lower"
    assert joins(10, 500, 502, 504) == 502
    assert joins(10, 10 + FEW, 10 + FEW) == 0, "a few steps are made one by one"
    assert joins(10, 1000) == 1000, "the last step of the run at most"


def test_a_single_liar_does_not_make_a_process_leave_out_steps():
    assert joins(10, 900, 10) == 0
    assert joins(10, 900, 10, 10) == 0
    assert joins(10, 10**9, 10) == joins(10, 10**9, 10**18) == joins(10, 1001) == 0, "steps that the run does not have"
    assert joins(10, 900, missing=[2]) == 0, "another neighbour may reconnect"


def test_who_was_away_takes_up_the_step_and_the_model_of_the_others():
    """Node 0 sleeps while the others make 60 steps of length 1; then all make 10 together."""
    store, awake, graph, last = HashStore(), threading.Event(), topology.complete(3), [10**6]

    def work(rank):
        engine = Distributed(graph, store, rank, [(0,), (1,), (2,)], timeout=2.0)
        x, t, joined = torch.full((1, 4), float(rank)), 1, None
        engine.connect(patience=PATIENCE, last_step=last[0], models=x)
        while t <= last[0]:
            if rank == 0 and t == 3 and joined is None:
                awake.wait(PATIENCE)
            found = engine.catch_up(t, x)
            if found is not None:
                (t, x), joined = found, found
                last[0] = t + 10
            if rank and t == 60:
                awake.set()
            (x,) = engine.mix(t, (x + 1,))
            engine._latest = ModelRows([x])
            if awake.is_set():
                time.sleep(0.05)
            t += 1
        engine.close()
        return joined, x

    (joined, mine), *others = at_once(*(lambda rank=rank: work(rank) for rank in range(3)))
    step, model = joined
    assert step >= 59
    assert (model > 50).all(), "not the 3 that it was"
    for found, theirs in others:
        assert found is None
        torch.testing.assert_close(mine, theirs, rtol=0, atol=5)


# ------------------------------------------------------------------------------------------------ commands


@pytest.mark.slow
def test_a_process_that_was_killed_between_admission_and_first_step_comes_back(tmp_path):
    server, words = serve("127.0.0.1", 0), ["--topology", "ring:4", "--epochs", "2"]
    mortal = (Path(__file__).parent / "mortal.py",)
    stays, killed = train_apart(tmp_path, server.port, 2, *words, programs=[QG, mortal])
    killed.communicate(timeout=PATIENCE)
    assert killed.returncode == -signal.SIGKILL
    time.sleep(1)
    idle, again = train_apart(tmp_path, server.port, 2, *words, programs=[("-c", "pass"), QG])
    for process in (idle, stays, again):
        ended(process)
    (run,) = find_runs(tmp_path)
    assert [record["epoch"] for record in run.records()] == [1, 2]


def stalling(life, steps):
    return str(Path(__file__).parent / "staller.py"), life, str(steps)


@pytest.mark.slow
@pytest.mark.parametrize("life", ["past", "alive", "notes"])
def test_sites_finish_though_one_keeps_its_neighbours_waiting(tmp_path, owners, life):
    four, ring = owners(epochs=100), Sites(tmp_path, "ring:4", 4)
    programs = {2: stalling(life, 20)}
    nodes = [
        four.join(k, ring.folders[k], "--peer-timeout", "2", program=programs.get(k, QG)) for k in range(4)
    ]
    for k in (0, 1, 3):
        said = four.said(nodes[k], k)
        lost = f"node {k} (site{k}) continues without node 2 (site2) from step 21: it did not answer in time"
        assert (lost in said) == (k != 0)
        (run,) = find_runs(tmp_path / f"runs{k}")
        assert [record["epoch"] for record in run.records()] == [*range(1, 101)], "nobody leaves out an epoch"


@pytest.mark.slow
@pytest.mark.parametrize("life", ["past", "alive"])
def test_sigterm_ends_a_site_whose_neighbour_keeps_it_waiting(tmp_path, owners, life):
    four, ring = owners(epochs=100), Sites(tmp_path, "ring:4", 4)
    words = ["--peer-timeout", "600", "--checkpoint-seconds", "0"]
    nodes = [
        four.join(k, ring.folders[k], *words, program=stalling(life, 20) if k == 2 else QG) for k in range(4)
    ]
    wait_for(lambda: list(tmp_path.glob("runs1/*/parts/1/checkpoint/000004.json")))
    time.sleep(2)
    for k in (0, 1):                                        # one that waits for the other, and that one
        nodes[k].send_signal(signal.SIGTERM)
    for k in (0, 1):
        assert "stopped; run the same command again to resume" in four.said(nodes[k], k, status=130)
    assert max(saved.stem for saved in tmp_path.glob("runs1/*/parts/1/checkpoint/*.json")) == "000004"


@pytest.mark.slow
def test_a_suspended_site_takes_up_the_step_of_the_others(tmp_path, owners):
    four, ring = owners(epochs=400), Sites(tmp_path, "ring:4", 4)
    nodes = [four.join(k, ring.folders[k], "--peer-timeout", "3", "--checkpoint-seconds", "0") for k in range(4)]
    wait_for_epoch(tmp_path / "runs2", 2, 10)
    nodes[2].send_signal(signal.SIGSTOP)
    wait_for_epoch(tmp_path / "runs1", 1, 100)
    nodes[2].send_signal(signal.SIGCONT)
    said = [four.said(process, k) for k, process in enumerate(nodes)]
    behind = r"node 2 \(site2\) is \d+ steps behind: it continues at step \d+ with its neighbours' model"
    assert re.search(behind, said[2])
    assert sum(one.count("steps behind") for one in said) == said[2].count("steps behind")
    epochs = [[record["epoch"] for record in next(find_runs(tmp_path / f"runs{k}")).records()] for k in range(4)]
    assert epochs[0] == epochs[1] == epochs[3] == [*range(1, 401)]
    assert len(epochs[2]) < 350, "it makes up for no epoch"
    assert epochs[2][-1] == 400
    models = torch.cat([newest_of_parts(next(find_runs(tmp_path / f"runs{k}")).folder)[0].rows["x"] for k in range(4)])
    assert (models - models.mean(dim=0)).norm() < 0.05 * models.norm()
