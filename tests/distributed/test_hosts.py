"""Nodes on several hosts: a link that is down for a while, and links with delay and loss."""

import shutil
import subprocess
import sys
import time
from contextlib import ExitStack

import hosts
import pytest
from commands import wait_for

from quasiglobal.runs.store import find_runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not())),
]


def training(net, four, stack, *words):
    """Start a rendezvous on the first host and one node per host; wait until all have the checkpoint of epoch 2."""
    place = f"{net.address(0)}:29500"
    at = ["--port", "29500", "--host", net.address(0)]
    command = [*net.inside(0), sys.executable, "-m", "quasiglobal", "rendezvous", *at]
    meeting = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    stack.callback(meeting.wait)
    stack.callback(meeting.kill)
    stack.callback(four.close)
    words = ["--checkpoint-seconds", "0", *words]
    nodes = [four.start(k, place, "--host", net.address(k), *words, before=net.inside(k)) for k in range(4)]
    wait_for(lambda: all(list(four.folder.glob(f"runs{k}/*/parts/{k}/checkpoint/000002.json")) for k in range(4)))
    return nodes


def finished(four, nodes, epochs):
    said = [four.said(process, k) for k, process in enumerate(nodes)]
    for k in range(4):
        (run,) = find_runs(four.folder / f"runs{k}")
        assert run.status == "finished"
        assert run.records()[-1]["epoch"] == epochs
    return said


def test_a_cut_link_is_missed_and_comes_back(owners):
    four = owners(epochs=400)
    with ExitStack() as stack:
        net = stack.enter_context(hosts.on_a_bridge(4))
        nodes = training(net, four, stack, "--peer-timeout", "2")
        hosts.ip("link", "set", "dev", net.outer(2), "down")
        time.sleep(5)
        hosts.ip("link", "set", "dev", net.outer(2), "up")
        said = finished(four, nodes, 400)
    for k in (1, 3):
        assert f"process {k} continues without process 2" in said[k]
        assert f"process {k} reconnected to process 2" in said[k]
    assert "continues without" not in said[0]


def test_delay_and_loss_on_every_link_cost_time_alone(owners):
    four, by_the_kernel = owners(epochs=10), netem()
    with ExitStack() as stack:
        if by_the_kernel:
            net = stack.enter_context(hosts.on_a_bridge(4))
            for k in range(4):
                words = ["dev", net.outer(k), "root", "netem", "delay", "20ms", "loss", "1%"]
                subprocess.run(["tc", "qdisc", "add", *words], check=True)
        else:
            net = stack.enter_context(hosts.in_bad_weather(4, delay=0.02, loss=0.01))
        nodes = training(net, four, stack, "--peer-timeout", "20")
        said = finished(four, nodes, 10)
        if not by_the_kernel:
            assert net.switch.lost > 10
    assert not any("continues without" in text for text in said)


def netem():
    """Whether this kernel supports `tc netem`."""
    if not shutil.which("tc"):
        return False
    with hosts.on_a_bridge(1) as net:
        words = ["tc", "qdisc", "add", "dev", net.outer(0), "root", "netem", "delay", "1ms"]
        return subprocess.run(words, capture_output=True).returncode == 0
