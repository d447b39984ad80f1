"""Two or three processes with mismatched secrets, experiments or data."""

import math
import time

import torch

from quasiglobal import topology
from quasiglobal.engines.distributed import Distributed
from quasiglobal.engines.distributed.channel import Lost
from quasiglobal.engines.distributed.edge import open_edge


def admission(rank, store, experiments, secrets):
    """Return the step of the other side, or the reason why it was refused."""
    edge = open_edge(store, rank, 1 - rank, "127.0.0.1", 20.0)
    try:
        edge.admit(experiments[rank].encode(), secrets[rank].encode(), 7 + rank, time.monotonic() + 10)
    except Lost as error:
        return str(error)
    return edge.step_there


def mixing(rank, store, bad):
    """Run one gossip round in which process 2 sends bad data; return mixed rows, missed counts and lost processes."""
    engine = Distributed(topology.complete(3), store, rank, [(0,), (1,), (2,)], timeout=3.0).connect()
    x = torch.full((1, 4), float(rank))
    if rank == 2:
        x = {"nan": torch.full((1, 4), math.nan), "shape": torch.zeros(1, 5)}[bad]
    (mixed,) = engine.mix(1, (x,))
    missed = {there: account["missed"] for there, account in engine.accounts().items()}
    time.sleep(1)
    return mixed, missed, dict(engine.lost)
