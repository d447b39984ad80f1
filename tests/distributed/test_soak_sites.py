"""Random faults between sites on four hosts, in waves of several at once: killed and suspended nodes, damaged
checkpoints, cut and flapping links. All renew their certificates, and in some schedules a site is revoked.

Nobody hangs, everybody finishes, nothing is lost, and the models are as good as those of an undisturbed run. A revoked
site is not heard of again. One limit is known (docs/deploy.md): parts of a ring that were too long apart clip each
other to the end, and know nothing of each other's digits. Such a schedule is reported as an expected failure.
"""

import os
import random
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import hosts
import pytest
import torch
from commands import PATIENCE, wait_for
from federations import Sites
from owners import write_data

from quasiglobal.peers.audit import Story, Trail
from quasiglobal.runs import checkpoints
from quasiglobal.runs.building import data_of
from quasiglobal.runs.checkpoints import newest_of_parts, parts_of
from quasiglobal.runs.export import export
from quasiglobal.runs.local import simulate
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import find_runs
from quasiglobal.training.experiment import from_toml

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not())),
]

EPOCHS, NODES, TIMEOUT = 200, 4, 2.0
FAULTS = ("kill", "damage", "stop", "cut", "flap")
IMPATIENT = (str(Path(__file__).parent / "impatient.py"),)

POINTS = 0.02
"""Largest loss of accuracy. It is 0.915 to 0.94 in undisturbed runs with other seeds, and 0.2 if nobody exchanges."""


class FourHosts:
    """A node of each of four sites, each on its own host."""

    def __init__(self, folder, four, stack):
        self.folder, self.four = folder, four
        self.net = stack.enter_context(hosts.on_a_bridge(NODES))
        stack.callback(four.close)
        addresses = [f"{self.net.address(k)}:7443" for k in range(NODES)]
        self.sites = Sites(folder, "ring:4", NODES, addresses=addresses)
        self.nodes, self.starts, self.damaged = {}, [0] * NODES, [0] * NODES

    def start(self, k, timeout=TIMEOUT):
        words = ["--peer-timeout", str(timeout), "--checkpoint-seconds", "0", "--patience", str(PATIENCE)]
        site, before = self.sites.folders[k], self.net.inside(k)
        self.nodes[k] = self.four.join(k, site, *words, before=before, program=IMPATIENT)
        self.starts[k] += 1

    def epochs(self, k):
        files = self.folder.glob(f"runs{k}/*/parts/*/metrics.jsonl")
        return max((len(path.read_text().splitlines()) for path in files), default=0)

    def kill(self, k):
        self.nodes[k].kill()
        self.nodes[k].wait()

    def damage(self, k):
        """Truncate the newest checkpoint; what reads it says so."""
        saved = sorted(self.folder.glob(f"runs{k}/*/parts/{k}/checkpoint/*[0-9].json"))
        if len(saved) > 1:
            os.truncate(saved[-1].with_suffix(".safetensors"), 1000)
            self.damaged[k] += 1

    def link(self, k, state):
        hosts.ip("link", "set", "dev", self.net.outer(k), state)

    def timeline(self, draw, k, kind):
        """The begin and the end of a fault of node k, as calls after some seconds."""
        at, seconds = draw.uniform(0, 2), draw.uniform(0.1, 8.0)
        if kind == "stop":
            pid = self.nodes[k].pid
            return [(at, os.kill, pid, signal.SIGSTOP), (at + seconds, os.kill, pid, signal.SIGCONT)]
        if kind in ("cut", "flap"):
            times = [at, at + seconds]
            if kind == "flap":                              # up and down again and again
                times = [at + sum(draw.uniform(0.05, 1.0) for _ in range(n)) for n in range(2 * draw.randint(2, 4))]
            return [(one, self.link, k, ("down", "up")[n % 2]) for n, one in enumerate(sorted(times))]
        damages = [(at + seconds / 3, self.damage, k)] if kind == "damage" else []
        return [(at, self.kill, k), *damages, (at + seconds / 3, self.start, k)]

    def wave(self, draw, faults):
        began = time.monotonic()
        running = [(k, kind) for k, kind in faults if self.nodes[k].poll() is None]
        calls = [call for k, kind in running for call in self.timeline(draw, k, kind)]
        for at, call, *arguments in sorted(calls, key=lambda one: one[0]):
            time.sleep(max(began + at - time.monotonic(), 0))
            call(*arguments)

    def run(self, k):
        (run,) = find_runs(self.folder / f"runs{k}")
        return run

    def clips(self, k):
        """Whether a node clips models to the end."""
        edges = [one["edges"].values() for one in parts_of(self.run(k).folder)[0].read_measures()[-2:]]
        before, last = (sum(edge["clipped"] for edge in one) for one in edges)
        return last > before

    def score(self, nodes):
        """The accuracy of these nodes on all digits that they have, whoever of them has a digit."""
        return score([export(self.run(k), str(k)) for k in nodes], nodes, self.folder, self.run(0).experiment)


def score(models, owners, folder, experiment):
    tests = data_of(experiment, None, f"folder:{folder / 'all.npz'}")
    y = tests.test.y
    theirs = torch.tensor([min(digit // 2, 3) in owners for digit in y.tolist()])
    return float(torch.stack([model.outputs(tests).argmax(dim=1) == y for model in models])[:, theirs].double().mean())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The simulator's run of the experiment on the data of all."""
    from owners import EXPERIMENT

    folder = tmp_path_factory.mktemp("undisturbed")
    write_data(folder)
    (folder / "experiment.toml").write_text(EXPERIMENT.format(epochs=EPOCHS))
    pooled = {"data": f"folder:{folder / 'all.npz'}", "partition": "by:owner"}
    (run,) = simulate(replace(from_toml(folder / "experiment.toml"), **pooled), Options(runs=folder / "runs"))
    return run


def test_undisturbed_sites_on_four_hosts_get_what_the_simulator_gets(tmp_path, owners, undisturbed):
    with ExitStack() as stack:
        four = FourHosts(tmp_path, owners(epochs=EPOCHS), stack)
        for k in range(NODES):
            four.start(k, timeout=PATIENCE)
        for k in range(NODES):
            assert "continues without" not in four.four.said(four.nodes[k], k)
    expected = checkpoints.newest(undisturbed.folder / "checkpoint").rows["x"]
    for k in range(NODES):
        assert torch.allclose(newest_of_parts(four.run(k).folder)[0].rows["x"][0], expected[k], rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(50))
def test_a_random_schedule_of_faults_between_sites_is_survived(tmp_path, owners, monkeypatch, undisturbed, seed):
    draw = random.Random(seed)
    monkeypatch.setenv("PAUSE", "0.15")
    waves = [
        [(k, draw.choice(FAULTS)) for k in draw.sample(range(NODES), draw.randint(1, 3))]
        for _ in range(draw.randint(1, 2))
    ]
    revoked = draw.choice([None, *range(NODES)]) if draw.random() < 0.5 else None
    print(waves, "revoked:", revoked)
    with ExitStack() as stack:
        four = FourHosts(tmp_path, owners(epochs=EPOCHS), stack)
        for site in four.sites.folders:
            site.renew(timedelta(seconds=60))
        for k in range(NODES):
            four.start(k)
        wait_for(lambda: all(four.epochs(k) >= 2 for k in range(NODES)))
        for faults in waves:
            four.wave(draw, faults)
        left = [k for k in range(NODES) if k != revoked]
        if revoked is not None:
            four.sites.organiser.revoke(f"site{revoked}")
            four.sites.folders[draw.choice(left)].accept(four.sites.text)
        said = {k: four.four.said(four.nodes[k], k) for k in left}
    for k in left:
        run, epochs = four.run(k), [record["epoch"] for record in four.run(k).records()]
        assert run.status == "finished"
        assert epochs[-1] == EPOCHS
        if four.starts[k] == 1 and "steps behind" not in said[k]:
            assert epochs == [*range(1, EPOCHS + 1)], "nobody leaves out an epoch without a word"
        assert epochs == sorted(set(epochs))
        assert all(torch.isfinite(value).all() for value in newest_of_parts(run.folder)[0].rows.values())
        assert ("is damaged" in said[k]) == bool(four.damaged[k])
        trail = Trail.read(run.folder / "audit.jsonl")
        story = Story(trail.lines)
        assert trail.breaks == {}
        assert min(2, four.starts[k]) <= len(story.processes) <= four.starts[k], "one may be killed before it trains"
        assert story.processes[-1]["end"] == "finished"
    everybody = [export(undisturbed, str(k)) for k in left]
    reached, expected = four.score(left), score(everybody, left, tmp_path, four.run(left[0]).experiment)
    print("accuracy:", reached, "undisturbed:", expected)
    if reached < expected - POINTS and any(four.clips(k) for k in left):
        pytest.xfail("parts of the ring clip each other to the end (docs/deploy.md)")
    assert reached >= expected - POINTS
