"""Two sites, of which one closes its connection after each step: what the other one keeps of it."""

import gc
import json
import logging
import os
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import torch

from quasiglobal import topology
from quasiglobal.engines.distributed import Distributed
from quasiglobal.peers.edge import Edge
from quasiglobal.peers.folders import SiteFolder
from quasiglobal.peers.sites import Audit, Guest, Link, SiteOpener
from quasiglobal.peers.tls import TLSChannel

WARM = 5
"""Reconnects before the first measurement."""

KINDS = (Edge, TLSChannel, Link, Guest)


class Lines(logging.Handler):
    """Keeps the lines of the log."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def kept():
    """Objects, threads, descriptors and memory of this process, once what is under way has ended."""
    process = psutil.Process()
    time.sleep(0.5)
    objects = Counter(type(one).__name__ for one in gc.get_objects() if type(one) in KINDS)
    return objects, process.num_threads(), process.num_fds(), process.memory_info().rss


def reconnect(rank, store, folders, count, numbers):
    """Mix `count` times, without garbage collection; the site of rank 1 closes its connection after each step.

    Return what was kept after `WARM` and after all reconnects, the lines of the log and of the audit, and the minutes.
    """
    began = time.monotonic()
    gc.collect()
    gc.disable()
    lines, audit = Lines(), Path(folders[rank]) / "audit.jsonl"
    logging.getLogger("quasiglobal").addHandler(lines)
    opener = SiteOpener(SiteFolder(Path(folders[rank])), audit=Audit(audit))
    engine = Distributed(topology.complete(2), opener, rank, [(0,), (1,)], timeout=20.0)
    engine.connect(patience=60.0)
    members, x, before = engine.members, torch.full((1, numbers), float(rank)), None
    for t in range(1, count + 1):
        (x,) = engine.mix(2 * t, (x,))
        assert 1 - rank in members.edges
        store.set(f"mixed/{rank}/{t}", "")
        store.wait([f"mixed/{1 - rank}/{t}"])
        if rank == 1:
            members.edges[0].cut("a test")
        engine.mix(2 * t + 1, (x,))                         # loses the edge
        deadline = time.monotonic() + 60
        while members._opened.empty():
            assert time.monotonic() < deadline, "the connection did not come back"
            time.sleep(0.002)
        if t == WARM:
            before = kept()
            store.set(f"measured/{rank}", "")
            store.wait([f"measured/{1 - rank}"])
    after = kept()
    store.set(f"ended/{rank}", "")
    store.wait([f"ended/{1 - rank}"])
    gc.set_debug(gc.DEBUG_SAVEALL * ("QG_CYCLES" in os.environ))
    gc.collect()
    if "QG_CYCLES" in os.environ:
        print(rank, Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage).most_common(40),
              file=sys.stderr)
    engine.close()
    minutes = 1 + int((time.monotonic() - began) // 60)
    return before, after, lines.lines, [json.loads(line) for line in audit.read_text().splitlines()], minutes
