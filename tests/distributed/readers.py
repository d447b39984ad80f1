"""Fine-tune a transformer with one node per process; test processes import this module."""

from functools import partial

import torch
from tiny_models import experiment, task

from quasiglobal.engines.distributed import Distributed
from quasiglobal.engines.simulator import Simulator
from quasiglobal.peers.rendezvous import spread
from quasiglobal.training.loop import Loop
from quasiglobal.training.program import Program

CPU, NODES, STEPS = torch.device("cpu"), 4, 20


def fine_tuned(model, train, algorithm, engine=Simulator, connect=lambda engine: None):
    """Return the rows here after 20 steps, in float64 and without dropout."""
    chosen = experiment(model, train=train, algorithm=algorithm, steps=5, epochs=STEPS // 5)
    program = Program(task(chosen), [chosen], CPU, engine)
    connect(program.engine)
    Loop(program).run()
    return program.state.x


def in_a_process(rank, store, model, train, algorithm):
    hosted, engines = spread(NODES, NODES), []

    def connect(engine):
        engines.append(engine)
        engine.connect()

    made = partial(Distributed, store=store, rank=rank, hosted=hosted, timeout=60)
    x = fine_tuned(model, train, algorithm, made, connect)
    store.set(f"done/{rank}", "1")
    store.wait([f"done/{process}" for process in range(NODES)])             # no process exits before all have received
    engines[0].close()
    return x
