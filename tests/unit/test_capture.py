"""The order in which steps run, are recorded and are replayed, with graphs that run on the CPU."""

import warnings
from contextlib import contextmanager

import pytest
import torch

from quasiglobal.stacked.capture import Captured


class Graph:
    """Records functions instead of kernels."""

    recording = None

    def __init__(self):
        self.functions = []

    def replay(self):
        for function in self.functions:
            function()


@contextmanager
def record(graph, pool):
    Graph.recording = graph
    yield
    Graph.recording = None


@pytest.fixture
def on_a_cpu(monkeypatch):
    for name, value in {
        "CUDAGraph": Graph, "graph": record, "graph_pool_handle": lambda: "memory", "get_rng_state": lambda: None,
        "set_rng_state": lambda state: None, "get_sync_debug_mode": lambda: 0, "set_sync_debug_mode": lambda mode: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)


def test_each_call_runs_one_step_and_from_the_third_on_by_a_graph(on_a_cpu):
    counts, python = {"a": 0, "b": 0}, []
    run = Captured()

    def step(key):
        def add():
            counts[key] += 1

        python.append(key)
        if Graph.recording is None:
            add()
        else:
            Graph.recording.functions.append(add)

    for key in "aabaabab":
        run(key, lambda key=key: step(key))
    assert counts == {"a": 5, "b": 3}
    assert python.count("a") == 3, "two steps and the recording"
    assert list(run.graphs) == ["a", "b"]


def test_a_step_that_waits_is_never_recorded(on_a_cpu, caplog):
    done = []
    run = Captured()

    def step():
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        done.append(Graph.recording)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            run("key", step)
    assert done == [None] * 5
    assert caplog.text.count("waits for values on the GPU") == 1
