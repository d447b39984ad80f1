"""Two or three processes that meet as they should not."""

import math
import time

import torch

from quasiglobal import topology
from quasiglobal.engines.distributed import Distributed
from quasiglobal.engines.distributed.edge import Lost, open_edge


def admission(rank, store, experiments, secrets):
    """What each side says of the other."""
    edge = open_edge(store, rank, 1 - rank, "127.0.0.1", 20.0)
    try:
        edge.admit(experiments[rank].encode(), secrets[rank].encode(), 7 + rank, time.monotonic() + 10)
    except Lost as error:
        return str(error)
    return edge.step_there


def mixing(rank, store, bad):
    """Two rounds of gossip in which process 2 sends something bad; what is mixed, and who was missed."""
    engine = Distributed(topology.complete(3), store, rank, [(0,), (1,), (2,)], timeout=3.0).connect()
    x = torch.full((1, 4), float(rank))
    if rank == 2:
        x = {"nan": torch.full((1, 4), math.nan), "shape": torch.zeros(1, 5)}[bad]
    (mixed,) = engine.mix(1, (x,))
    missed = {there: account["missed"] for there, account in engine.accounts().items()}
    time.sleep(1)
    return mixed, missed, dict(engine.lost)
