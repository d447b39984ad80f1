"""What a site sees of its neighbour's data in the models that it receives: docs/deploy.md does not deny it."""

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from federations import Sites
from owners import Owners

from quasiglobal.engines.distributed import Distributed
from quasiglobal.peers.edge import HEADER, Edge
from quasiglobal.peers.tls import TLSChannel
from quasiglobal.runs.node import InFederation, train_node
from quasiglobal.runs.options import Options
from quasiglobal.training.experiment import from_toml

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "curious_neighbour.py")

AGREED = """
model = "mlp"
topology = "complete:2"
epochs = 1
steps = 1
batch = 4
lr = 0.1
classes = ["0", "1"]
shape = [1, 12, 12]
mean = [0.35]
std = [0.25]
"""


def test_the_script_recovers_images_from_a_message(capsys):
    runpy.run_path(SCRIPT, run_name="__main__")
    said = capsys.readouterr().out
    recovered = dict(re.findall(r"^batch (\d+) +(\d+) images recovered", said, re.MULTILINE))
    assert (recovered["4"], recovered["8"]) == ("4", "8")
    deploy = (ROOT / "docs" / "deploy.md").read_text()
    (page,) = re.findall(r"^\$ python examples/curious_neighbour.py\n(.*?)```", deploy, re.MULTILINE | re.DOTALL)
    shown, printed = ([float(value) for value in re.findall(r"\b[01]\.\d{3}\b", text)] for text in (page, said))
    assert printed == pytest.approx(shown, abs=0.01)


def test_a_neighbour_over_mutual_tls_recovers_images_though_only_models_are_sent(tmp_path, monkeypatch):
    """Real sites: the honest one is `qg node`, and the curious one the same program, which keeps what it has."""
    script, kept, sent, dialled, unpickled, on = runpy.run_path(SCRIPT), {}, [], set(), [], [True]
    sites, owners = Sites(tmp_path, "complete:2", 2), Owners(tmp_path, 1)
    (tmp_path / "experiment.toml").write_text(AGREED)
    for k in range(2):
        (x, y), (x_test, y_test) = script["scans"](4, k), script["scans"](10, 9)
        np.savez(tmp_path / f"{k}.npz", x=x, y=y, x_test=x_test, y_test=y_test)
    connect, receive, send = Distributed.connect, Edge.receive, TLSChannel.send

    def keep_start(engine, step, patience, last_step, models, **more):
        kept["start"] = models[0].clone()
        return connect(engine, step, patience, last_step, models, **more)

    def keep_message(edge, *terms):
        message = receive(edge, *terms)
        kept.setdefault("message", message.flatten().clone())
        return message

    def keep_sent(channel, message):
        sent.append(message.numpy().tobytes())
        return send(channel, message)

    def watch(event, arguments):
        if on and event == "socket.connect" and not isinstance(arguments[1], str):
            dialled.add(arguments[1][:2])
        if on and event == "pickle.find_class":
            unpickled.append(arguments)

    monkeypatch.setattr(Distributed, "connect", keep_start)
    monkeypatch.setattr(Edge, "receive", keep_message)
    monkeypatch.setattr(TLSChannel, "send", keep_sent)
    sys.addaudithook(watch)
    try:
        honest = owners.join(0, sites.folders[0], "--linger", "0")
        train_node(
            from_toml(tmp_path / "experiment.toml"), InFederation(sites.folders[1].path), str(tmp_path / "1.npz"),
            Options(runs=tmp_path / "runs", device="cpu", engine="distributed"), patience=300,
        )
        owners.said(honest, 0)
    finally:
        on.clear()
        owners.close()
    seen = script["images_in"](kept["start"], kept["message"], units=128)
    assert (script["likeness"](script["scans"](4, 0)[0], seen) > 0.99).sum() >= 3
    assert (script["likeness"](script["scans"](4, 5)[0], seen) < 0.95).all()       # images of nobody

    host, _, port = sites.addresses[0].rpartition(":")
    assert dialled == {(host, int(port))}, "it connects to its neighbour and to nothing else"
    assert unpickled == []
    model = kept["start"].numel() * 4
    swapped, header = 32, 8 * HEADER
    assert {*map(len, sent)} <= {swapped, header, model}
    assert [len(message) for message in sent].count(model) == 1
    assert not any(image.tobytes() in message for image in script["scans"](4, 1)[0] for message in sent)
