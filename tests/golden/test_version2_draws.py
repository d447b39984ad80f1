"""What is drawn from a key, as recorded: graphs, lost messages, compressed messages, batches, crops and partitions.

A draw is a function of its key alone on every machine: whole numbers are compared exactly. version2/README.md
says by what these were recorded.
"""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

import quasiglobal as qg

RECORDED = Path(__file__).parent / "version2" / "steps" / "draws.npz"

STEPS = 20
CPU = torch.device("cpu")
COUNTS = (np.arange(8)[:, None] * 7 + np.arange(4) * 13) ** 2 % 47 + 1
LABELS = np.arange(244) * (np.arange(244) + 3) // 7 % 5

TOPOLOGIES = (
    "ring:5", "chain:4", "torus:9", "torus:16", "complete:4", "star:5", "tree:6", "double-trees:6",
    "hypercube:8", "exponential:6", "social", "erdos-renyi:8:0.5", "erdos-renyi:8:0.5:seed=3", "small-world:8:4:0.3",
    "small-world:8:4:0.3:seed=3", "k-regular:8:3", "k-regular:8:3:seed=3", "one-peer-exponential:6", "base:6:1",
    "base:7:2", "equidyn:6", "equidyn:6:seed=2", "equidyn:6:undirected=true", "matching:7", "matching:6:seed=3",
    "epidemic:6:2", "epidemic:6:2:seed=3", "stl-fw:8:3", "d-cliques:8:4", "lazy/ring:5", "every:3/base:4:1",
    "every:2/matching:6", "lazy/equidyn:6",
)

LOSSES = {
    "drop": ("complete:6", {"drop": 0.3}),
    "drop, another seed": ("complete:6", {"drop": 0.3, "seed": 7}),
    "drop, a large seed": ("complete:6", {"drop": 0.9, "seed": 2**40}),
    "churn": ("complete:6", {"churn": 0.4, "steps": 100}),
    "both": ("complete:6", {"drop": 0.2, "churn": 0.2, "seed": 1, "steps": 60}),
    "drop on random pairs": ("matching:6", {"drop": 0.3, "seed": 1}),
    "drop on random hops": ("equidyn:6", {"drop": 0.3}),
    "drop on random peers": ("epidemic:6:2", {"drop": 0.3}),
    "drop and local steps": ("every:2/ring:6", {"drop": 0.3}),
}


# ------------------------------------------------------------------------------------------- by the public interface

def mixing():
    """W(t) of every kind of topology, of 20 steps or one period."""
    found = {}
    for text in TOPOLOGIES:
        graph = qg.topology.parse(text, COUNTS)
        found[text] = np.stack([graph.weights(t) for t in range(1, min(STEPS, graph.period or STEPS) + 1)])
    found["weighted ring:5"] = qg.topology.ring(5).weighted([1, 2, 3, 4, 5]).weights()[None]
    shares = COUNTS / COUNTS.sum(axis=1, keepdims=True)
    found["a product of stl-fw"] = (np.eye(8) - 1 / 8) @ shares @ shares.T
    return found


def arrivals(graph, *, steps=STEPS, **faults):
    """Whether the message of node j changes node i, at each step: with g = x − I and lr = 1, dsgd's x⁺ is W itself."""
    eye = torch.eye(6, dtype=torch.float64)
    result = qg.minimize(lambda x, t: x - eye, eye, "dsgd", graph, 1.0, steps, **faults)
    return result.history[1:].abs().numpy() > 1e-12


def losses():
    return {what: arrivals(graph, **faults) for what, (graph, faults) in LOSSES.items()}


def compressed():
    """The signs of what choco sends at every step, 0 for what it leaves out."""
    start = torch.arange(45, dtype=torch.float64).view(5, 9).sin()
    found = {}
    for wire in ("randk:0.3", "qsgd:4", "topk:0.3"):
        result, sent = None, [torch.zeros_like(start)]
        for t in range(1, STEPS + 1):
            how = {"wire": wire, "seed": 3, "resume": result}
            result = qg.minimize(lambda x, t: x + start.flip(0), start, "choco", "ring:5", 0.1, t, **how)
            sent.append(result.state["x_hat"])
        found[wire] = torch.stack(sent).diff(dim=0).sign().to(torch.int8).numpy()
    return found


class Noisy(torch.utils.data.Dataset):
    """Draws from all global generators, and notes what it drew."""

    def __init__(self):
        self.drawn = set()

    def __len__(self):
        return 24

    def __getitem__(self, index):
        numbers = int(torch.randint(10**6, ())), int(np.random.randint(10**6)), random.randrange(10**6)
        self.drawn.add((index, *numbers))
        return torch.full((2,), float(index)), torch.zeros(1)


def examples():
    """The examples of a training that are read anew, [index, draw of PyTorch, of NumPy, of Python], sorted."""
    data, held = Noisy(), (torch.zeros(2, 2), torch.zeros(2, 1))
    task = qg.Task(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, data, held, cache=False)
    data.drawn.clear()
    qg.train(task, "dsgd", "ring:4", epochs=2, batch=3, lr=1e-4, seed=2, device="cpu")
    return {"all": np.array(sorted(data.drawn))}


def dropout():
    """The weights of all nodes after a training of a linear model behind dropout."""
    x, y = (torch.arange(m, dtype=torch.float64).sin().float().view(24, -1) for m in (24 * 6, 24))
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(6, 1))
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.zero_()
    task = qg.Task(model, torch.nn.functional.mse_loss, (x, y), (x, y))
    run = qg.train(task, "dsgd", "ring:4", epochs=3, batch=3, lr=0.1, seed=2, precision="fp64", device="cpu")
    return np.stack([run.model(node)[1].weight.flatten().detach().numpy() for node in range(4)])


def own(labels, n, rng):
    """A user's own partition."""
    return np.split(rng.permutation(len(labels)), [10 * (i + 1) for i in range(n - 1)])


def partitions():
    """The examples of all nodes, and the number of each node's."""
    found = {}
    columns = {"site": np.array(list("abcdefghijkl"))[np.arange(244) * 7 % 12]}
    for kind in ("dirichlet", "dirichlet-plain", "iid", "shards:2", "by:site", "whole", own):
        for n, alpha, seed in ((12, 1.0, 0), (12, 0.3, 0), (12, 1.0, 5), (7, 1.0, 0)):
            if (n, kind) != (7, "by:site"):
                parts = qg.data.split(LABELS, n, kind, alpha, seed, columns)
                name = f"{kind if kind is not own else 'own'}, {n} nodes, alpha {alpha}, seed {seed}"
                found[name] = np.concatenate([[len(part) for part in parts], *parts]).astype(np.int16)
    return found


def held_out():
    """The order of the examples in a training set of which a fifth is held out, and in the held-out fifth."""
    data = qg.data.from_arrays(np.arange(60.0, dtype=np.float32)[:, None], np.arange(60) % 2)
    return {name: of.x.flatten().numpy().astype(np.int16) for name, of in (("train", data.train), ("test", data.test))}


# ------------------------------------------------------------------------------------------------ by the inside


def inside():
    """Batches, flips, crops and keyed generators; only this function reads the package's inside."""
    from quasiglobal.common.randomness import generator, seeded
    from quasiglobal.data.batches import Owner, Plan
    from quasiglobal.data.inputs import Images

    pictures = torch.zeros(5, 3, 16, 24, dtype=torch.uint8)
    plans = {
        "equal": {"lengths": (11, 11, 11), "batch": 4},
        "unequal": {"lengths": (5, 11, 17), "batch": 4},
        "given steps": {"lengths": (11, 11, 11), "batch": 4, "steps": 5},
    }
    found = {}
    for augmentation in ("flip-crop", "resize-crop", "none"):
        images = Images(
            pictures, scale=255.0, mean=(0,) * 3, std=(1,) * 3, augmentation=augmentation, moving=True, device=CPU
        )
        for name, how in plans.items():
            ends = np.cumsum((0, *how["lengths"]))
            keys = ((0, 0), (0, 1), (3, 2))
            owners = [Owner(*key, np.arange(*ends[i : i + 2])) for i, key in enumerate(keys)]
            plan = Plan(owners, batch=how["batch"], steps=how.get("steps", 0), draw=images.draw)
            for epoch in (0, 7):
                drawn = plan.epoch(epoch, CPU)
                for what, values in zip(("index", "flips", "places"), (drawn.index, *drawn.moves), strict=False):
                    found[f"{what} of {augmentation}, {name}, epoch {epoch}"] = values.numpy().astype(np.int16)
    keys = [(0,), (0, 0), (0, 0, 0), (1, 2, 3), (2**40, 7), (17, 0, 8, 5)]
    found["generator"] = np.stack([generator(*key).integers(2**63, size=3) for key in keys])
    seeds = []
    for key in keys:
        with seeded(CPU, *key, elsewhere=True):
            drawn = [torch.randint(2**62, ()), np.random.randint(2**31), random.randrange(2**62)]
            seeds.append([torch.initial_seed(), *map(int, drawn)])
    found["seeded"] = np.array(seeds)
    return found


DRAWS = {
    "losses": losses, "compressed": compressed, "examples": examples, "partitions": partitions, "held out": held_out,
    "inside": inside,
}


def named(what, found):
    return {f"{what}: {name}": values for name, values in found.items()}


@pytest.fixture(scope="module")
def recorded():
    return dict(np.load(RECORDED))


def of(what, recorded):
    return {name: values for name, values in recorded.items() if name.startswith(f"{what}: ")}


@pytest.mark.filterwarnings("ignore:W of epidemic", "ignore:the partition uses")
@pytest.mark.parametrize("what", DRAWS)
def test_the_draws_are_the_recorded_ones(what, recorded):
    found, expected = named(what, DRAWS[what]()), of(what, recorded)
    assert list(found) == list(expected)
    assert [name for name, values in found.items() if not np.array_equal(values, expected[name])] == []


def test_the_weights_of_every_topology_are_the_recorded_ones(recorded):
    """Links exactly; tolerance of weights: a sum of 32 numbers below 1 in another order, as on another CPU.

    STL-FW's first permutation is as good as its reverse, so that the last digit of a product of matrices chooses: its
    graph is compared where that product is the recorded one.
    """
    found, expected = named("mixing", mixing()), of("mixing", recorded)
    assert list(found) == list(expected)
    name = "mixing: a product of stl-fw"
    if not np.array_equal(found[name], expected[name]):
        np.testing.assert_allclose(found.pop(name), expected[name], rtol=0, atol=1e-15)
        found.pop("mixing: stl-fw:8:3")
    for name, W in found.items():
        assert np.array_equal(W != 0, expected[name] != 0), name
        np.testing.assert_allclose(W, expected[name], rtol=0, atol=1e-15, err_msg=name)


def test_a_training_with_dropout_draws_the_recorded_numbers(recorded):
    """Tolerance: sums in another order."""
    np.testing.assert_allclose(dropout(), recorded["dropout"], rtol=0, atol=1e-12)


def record():
    """Write the file that these tests read."""
    found = named("mixing", mixing()) | {"dropout": dropout()}
    for what, draw in DRAWS.items():
        found |= named(what, draw())
    np.savez_compressed(RECORDED, **found)


if __name__ == "__main__":
    record()
