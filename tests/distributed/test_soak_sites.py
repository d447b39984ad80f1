"""Random faults between sites on four hosts: killed and stopped nodes, cut links, renewed certificates, a revoked site.

Nobody hangs, everybody finishes, and the revoked site is not heard of again.
"""

import os
import random
import signal
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import hosts
import pytest
import torch
from commands import PATIENCE, wait_for
from federations import Sites

from quasiglobal.runs.checkpoints import newest_of_parts
from quasiglobal.runs.store import find_runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not())),
]

EPOCHS, NODES, TIMEOUT = 200, 4, 4.0
IMPATIENT = (str(Path(__file__).parent / "impatient.py"),)


@pytest.mark.parametrize("seed", range(50))
def test_a_random_schedule_of_faults_between_sites_is_survived(tmp_path, owners, monkeypatch, seed):
    draw, four = random.Random(seed), owners(epochs=EPOCHS)
    monkeypatch.setenv("PAUSE", "0.1")
    with ExitStack() as stack:
        net = stack.enter_context(hosts.on_a_bridge(NODES))
        stack.callback(four.close)
        sites = Sites(tmp_path, "ring:4", NODES, addresses=[f"{net.address(k)}:7443" for k in range(NODES)])
        for site in sites.folders:
            site.renew(timedelta(seconds=60))

        def start(k):
            words = ["--peer-timeout", str(TIMEOUT), "--checkpoint-seconds", "0", "--patience", str(PATIENCE)]
            return four.join(k, sites.folders[k], *words, before=net.inside(k), program=IMPATIENT)

        def epochs(k):
            files = tmp_path.glob(f"runs{k}/*/parts/*/metrics.jsonl")
            return max((len(path.read_text().splitlines()) for path in files), default=0)

        nodes, revoked = [start(k) for k in range(NODES)], draw.randrange(NODES)
        wait_for(lambda: all(epochs(k) >= 2 for k in range(NODES)))
        for _ in range(draw.randint(1, 3)):
            victim, kind, seconds = draw.randrange(NODES), draw.choice(["kill", "stop", "cut"]), draw.uniform(0.1, 10.0)
            if nodes[victim].poll() is not None:
                continue
            if kind == "kill":
                nodes[victim].kill()
                nodes[victim].wait()
                time.sleep(seconds / 3)
                nodes[victim] = start(victim)
            elif kind == "stop":
                os.kill(nodes[victim].pid, signal.SIGSTOP)
                time.sleep(seconds)
                os.kill(nodes[victim].pid, signal.SIGCONT)
            else:
                hosts.ip("link", "set", "dev", net.outer(victim), "down")
                time.sleep(seconds)
                hosts.ip("link", "set", "dev", net.outer(victim), "up")
        others = [k for k in range(NODES) if k != revoked]
        sites.organiser.revoke(f"site{revoked}")
        arrives = draw.choice(others)
        sites.folders[arrives].accept(sites.text)
        for k in others:
            four.said(nodes[k], k)
            (run,) = find_runs(tmp_path / f"runs{k}")
            assert run.status == "finished"
            assert run.records()[-1]["epoch"] == EPOCHS
            assert all(torch.isfinite(value).all() for value in newest_of_parts(run.folder)[0].rows.values())
