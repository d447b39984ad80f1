"""Under torchrun: train every kind of task of a user's own over processes."""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import own_tasks
from torch import nn
from torch.nn import functional

import quasiglobal as qg


def people():
    """One data set per node, of unequal sizes, with an object metric."""
    parts = []
    for person, size in enumerate((12, 25, 40, 18)):
        x = torch.randn(size, 3, generator=torch.Generator().manual_seed(person)) + person
        parts.append(own_tasks.Pairs(x, (x.sum(dim=1) > 3 * person).long()))
    metrics = {"f1": qg.metrics.f1, "accuracy": qg.metrics.accuracy}
    return qg.Task(nn.Linear(3, 2), functional.cross_entropy, parts, metrics=metrics)


TASKS = {**own_tasks.KINDS, "people": people}
HOW = {"algorithm": "qg-dsgdm-n", "topology": {0: [1, 3], 1: [0, 2], 2: [1, 3], 3: [2, 0]}, "epochs": 3, "lr": 0.1}
HOW |= {"device": "cpu", "batch": 8, "precision": "fp64"}


class Notes:
    """A callback that runs in process 0, on the records of all nodes."""

    def __init__(self):
        self.nodes = []

    def on_epoch(self, run):
        self.nodes.append(len(run.records[-1]["test_loss_nodes"]))


class Average:
    """A callback that asks for the average of all models, which process 0 does not have."""

    said = ""

    def on_end(self, run):
        try:
            run.average()
        except qg.InputError as error:
            self.said = str(error)


class Enough:
    def on_epoch(self, run):
        if run.epoch >= 2:
            run.stop()


def trained(kind, runs=None, engine="simulator", **how):
    torch.manual_seed(0)
    weights = "examples" if kind == "people" else "equal"
    return qg.train(TASKS[kind](), **HOW | how, runs=runs, engine=engine, weights=weights)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for number, kind in enumerate(TASKS):
        notes, keep = Notes(), qg.callbacks.KeepBest()
        run = trained(kind, folder / str(number), "distributed", callbacks=[notes, keep])
        assert len(run.records) == 3
        assert run.average() is not None
        if os.environ["RANK"] == "0":
            assert notes.nodes == [4, 4, 4], notes.nodes
        assert len(keep.best[0]) == 2, keep.best
    average, keep, board = Average(), qg.callbacks.KeepBest(), qg.callbacks.TensorBoard(folder / "board")
    in_memory = trained("regression", None, "distributed", callbacks=[average, keep, board])
    assert len(in_memory.records) == 3
    assert len(keep.models[0]) == 2, "without a run folder each process keeps the models of its nodes"
    if os.environ["RANK"] == "0":
        assert "use average() of the result" in average.said
        assert list((folder / "board").glob("*/tensorboard/*")) or list((folder / "board").rglob("events*"))
    assert in_memory.model(3) is not None
    early = trained("regression", folder / "early", "distributed", callbacks=[Enough()], epochs=400)
    assert len(early.records) < 400
    trained("regression", folder / "early", "distributed", callbacks=[Enough()], epochs=400)
