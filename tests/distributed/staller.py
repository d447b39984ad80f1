"""`qg` that trains for STEPS steps, and then keeps its neighbours waiting: `python staller.py LIFE STEPS WORDS`.

LIFE is a kind of message that it sends for ever.
"""

import itertools
import sys
import time

import torch

from quasiglobal import cli
from quasiglobal.training.program import Program

LIVES = {
    "past": lambda edge, step, n, row: edge.send((1, 0), row, 1.0),
    "alive": lambda edge, step, n, row: edge.send_heartbeat(step),
    "notes": lambda edge, step, n, row: edge.send_note(b"{}"),
}


def stall(engine, life):
    """Send messages over all edges, also over those that are opened again."""
    members, row = engine.members, torch.zeros(engine.models.model.count, dtype=engine.models.model.dtype)
    for n in itertools.count():
        members.take_back()
        for there, edge in list(members.edges.items()):
            with members.watched(there):
                edge.check()
                LIVES[life](edge, members.step, n, row)
        time.sleep(0.1)


if __name__ == "__main__":
    kind, steps, honest = sys.argv.pop(1), int(sys.argv.pop(1)), Program._step

    def stalling(self, t, *arguments, **options):
        if t[0] > steps:
            stall(self.engine, kind)
        honest(self, t, *arguments, **options)

    Program._step = stalling
    cli.main()
