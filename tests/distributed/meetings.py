"""Two or three processes with mismatched secrets, experiments or data."""

import math
import os
import signal
import threading
import time
from contextlib import suppress

import torch

from quasiglobal import topology
from quasiglobal.engines.distributed import Distributed
from quasiglobal.engines.wire import TopK
from quasiglobal.peers import membership
from quasiglobal.peers.edge import Expected, Lost, Rejected
from quasiglobal.peers.gloo import open_edge
from quasiglobal.peers.rendezvous import Meeting
from quasiglobal.stacked.step_blocks import ModelRows
from quasiglobal.training.loop import patient_interrupts


def admission(rank, store, experiments, secrets):
    """Return the step of the other side, or the reason why it was refused."""
    edge = open_edge(store, rank, 1 - rank, "127.0.0.1", 20.0)
    try:
        edge.admit(experiments[rank].encode(), secrets[rank].encode(), 7 + rank, time.monotonic() + 10)
    except Lost as error:
        return str(error)
    return edge.step_there


BAD = {
    "nan": torch.full((1, 4), math.nan),
    "huge": torch.tensor([[3.4e38, -3.4e38, 3.4e38, -3.4e38]]),
    "shape": torch.zeros(1, 5),
    "step": torch.zeros(1, 4),
}


def mixing(rank, store, bad, rounds=3):
    """Gossip while process 2 sends bad data; return mixed rows, missed counts, lost processes and dead threads."""
    dead = noted_threads()
    engine = Distributed(topology.complete(3), store, rank, [(0,), (1,), (2,)], timeout=3.0)
    engine.connect(patience=20.0, last_step=100)
    x = torch.full((1, 4), float(rank))
    for t in range(1, rounds + 1):
        if rank < 2:
            (x,) = engine.mix(t, (x,))
        elif bad == "step":
            claim(engine, 10**9 + t)
        else:
            engine.mix(t, (BAD[bad],))
    missed = {there: account["missed"] for there, account in engine.accounts().items()}
    time.sleep(1)
    return x, missed, dict(engine.lost), dead


def telling(rank, store):
    """Send the largest half of the numbers while process 2 names places beyond the model; return what came."""
    dead = noted_threads()
    engine = Distributed(topology.complete(3), store, rank, [(0,), (1,), (2,)], timeout=3.0, wire=TopK(0.5))
    engine.connect(patience=20.0)
    x = torch.tensor([[3.0, 1.0, 0.0, 4.0]])
    if rank == 2:
        TopK.parts = lambda self, v, key: (v[..., :2], torch.full(v[..., :2].shape, 10**6, dtype=torch.int32))
        TopK.restored = lambda self, parts, c, key: parts[0].new_zeros(*parts[0].shape[:-1], c)
    _, mixed = engine.tell(1, x, torch.tensor(1.0), 0)
    time.sleep(0.5)
    return mixed, dead


def only_alive(rank, store, deadline):
    """Gossip while process 2 gives nothing but signs of life; return the rows, the seconds of each step, who is late.
    """
    hosted = [(0,), (1,), (2,)]
    engine = Distributed(topology.complete(3), store, rank, hosted, timeout=3.0, round_deadline=deadline)
    engine.connect(patience=20.0)
    x, seconds = torch.full((1, 4), float(rank)), []
    if rank == 2:
        engine.members.begin(largest=1000)
        for _ in range(40):
            time.sleep(0.1)
            for edge in list(engine.members.edges.values()):
                with suppress(Lost):
                    edge.send_heartbeat(1)
        return None
    for t in range(1, 21):
        began = time.monotonic()
        (x,) = engine.mix(t, (x,))
        seconds.append(time.monotonic() - began)
    return x, seconds, engine.lost


def ahead(rank, store, graph, algorithm, x, deadline):
    """Make 8 steps in place that send the models ahead; return this process's row, and how many steps were skipped."""
    hosted = [(node,) for node in range(graph.n)]
    engine = Distributed(graph, store, rank, hosted, timeout=30.0, round_deadline=deadline).connect()
    own, skipped = x[rank, None].clone(), 0
    state = {name: value.clone() for name, value in engine.begin(algorithm, own).items()}
    for t in range(1, 9):
        engine.step_in_place(
            algorithm, ModelRows([own]), ModelRows([own.sin()]), state, ahead=True, t=t, lr=x.new_tensor(0.1),
            full_gradient=torch.sin,
        )
        skipped += engine.skipped
    return own, skipped


def claim(engine, step):
    """Send a message for this step, without waiting for an answer."""
    if not engine.members.begun:
        engine.members.begin(largest=1000)
    for edge in engine.members.edges.values():
        edge.send((step, 0), BAD["step"], 3.0)


def claims(rank, store, claimed, last_step):
    """Join neighbours, of which the last one claims these steps; return the step to begin at."""
    n = len(claimed)
    engine = Distributed(topology.complete(n), store, rank, [(k,) for k in range(n)], timeout=3.0)
    engine.connect(claimed[rank], patience=20.0, last_step=last_step, models=torch.zeros(1, 4))
    time.sleep(0.5)
    return engine.members.step_of_others


def offered_model(rank, store, sizes):
    """Process 0 wants a model of the first size, process 1 offers one of the second; return what process 0 took."""
    edge = open_edge(store, rank, 1 - rank, "127.0.0.1", 20.0)
    try:
        if rank == 0:
            return edge.hand_over(None, Expected(sizes[0], torch.float32), 5)
        return edge.hand_over(torch.ones(sizes[1]), None, 5)
    except (Rejected, Lost) as error:
        return str(error)


RUBBISH = (b"-5", b"rubbish", b"\xff\xfe", b"9" * 40, b"", b"12345", b"1.5", b"-1")


def strangers(rank, store, seconds):
    """Gossip between processes 0 and 1 while process 2 writes into the store; return the rows and dead threads."""
    dead = noted_threads()
    if rank == 2:
        store.set("edge/0-1/generation", b"-5")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for value in RUBBISH:
                store.set("edge/0-1/offer", value)
        return None, dead
    engine = Distributed(topology.complete(2), store, rank, [(0,), (1,)], timeout=3.0)
    time.sleep(0.5)                                         # the stranger comes first
    engine.connect(patience=60.0)
    (mixed,) = engine.mix(1, (torch.full((1, 4), float(rank)),))
    return mixed, dead


def noted_threads():
    """Return a list to which the exceptions of threads that die are added."""
    dead = []
    threading.excepthook = lambda args: dead.append(repr(args.exc_value))
    return dead


WAITS = ("message", "rest of a message", "first step", "all processes", "mean")


def told_to_stop(rank, store):
    """Process 0 gets SIGTERM while it waits for process 1; return the seconds until it ended, for each of `WAITS`."""
    membership.LEAVE = 0.5
    return [_told_to_stop(rank, Meeting(store, wait), wait) for wait in WAITS]


def _told_to_stop(rank, store, wait):
    engine = Distributed(topology.complete(2), store, rank, [(0,), (1,)], timeout=600.0)
    engine.connect(patience=60.0)
    x = torch.zeros(1, 4)
    if wait != "first step":
        engine.members.begin(largest=1000)
    if wait == "mean":
        engine.mean(x, None)
    if rank == 1:
        (edge,) = engine.members.edges.values() or (None,)
        if wait == "rest of a message":
            edge.channel.send(edge._head((1, 0), 4, 4))
        while not store.check(["ended"]):
            if wait == "message":
                with suppress(Lost):
                    edge.send_heartbeat(1)
            time.sleep(0.1)
        engine.close()
        return None
    with patient_interrupts() as noted:
        engine.members.noted = noted
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        began = time.monotonic()
        try:
            engine.mean(x, None) if wait in ("all processes", "mean") else engine.mix(1, (x,))
        except KeyboardInterrupt:
            engine.close()
        store.set("ended", "")
        return time.monotonic() - began if noted else None
