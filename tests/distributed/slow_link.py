"""Mix models twice with another host: `python slow_link.py RANK NUMBERS TIMEOUT WAY…`; prints the mean and the lost.

WAY is the folder of a site, or the addresses of both hosts, of which the first has the store.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore

from quasiglobal import topology
from quasiglobal.engines.distributed import Distributed
from quasiglobal.peers.folders import SiteFolder
from quasiglobal.peers.sites import SiteOpener

if __name__ == "__main__":
    del os.memfd_create                                     # else the other process reads the message from memory
    rank, numbers, timeout, way = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
    if len(way) == 1:
        store = SiteOpener(SiteFolder(Path(way[0])))
    else:
        store = TCPStore(way[0], 29500, is_master=rank == 0, wait_for_workers=False, timeout=timedelta(seconds=60))
    host = {"host": way[rank]} if way[1:] else {}
    engine = Distributed(topology.complete(2), store, rank, [(0,), (1,)], timeout=timeout, **host)
    engine.connect(patience=60.0)
    x = torch.full((1, numbers), float(rank))
    for t in (1, 2):
        (x,) = engine.mix(t, (x,))
    print(float(x.mean()), engine.lost, flush=True)
    engine.close()                                          # sends what is left
    time.sleep(5)                                           # the store outlives the other's last message
