"""Nodes on several hosts: a link that is down for a while, and links with delay and loss."""

import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import hosts
import pytest
from commands import PATIENCE, wait_for
from federations import Sites

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


@pytest.mark.parametrize(("by", "timeout"), [("sites", 3), ("gloo", 16)])
def test_a_message_that_takes_longer_than_the_timeout_arrives_over_a_slow_link(tmp_path, by, timeout):
    """10 MB at 1 MB/s, as 500 MB at 50 Mbit/s with a timeout of 24 s. Gloo sends in one direction after the other."""
    with hosts.in_bad_weather(2, delay=0.0, loss=0.0, rate=1e6) as net:
        ways = 2 * [[net.address(k) for k in range(2)]]
        if by == "sites":
            federation = Sites(tmp_path, "complete:2", 2, addresses=[f"{net.address(k)}:7443" for k in range(2)])
            ways = [[str(site.path)] for site in federation.folders]
        program = [sys.executable, str(Path(__file__).parent / "slow_link.py")]
        commands = [[*net.inside(k), *program, str(k), "2500000", str(timeout), *ways[k]] for k in range(2)]
        started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        said = [process.communicate(timeout=PATIENCE)[0] for process in started]
    assert said == ["0.5 {}\n"] * 2


def netem():
    """Whether this kernel supports `tc netem`."""
    if not shutil.which("tc"):
        return False
    with hosts.on_a_bridge(1) as net:
        words = ["tc", "qdisc", "add", "dev", net.outer(0), "root", "netem", "delay", "1ms"]
        return subprocess.run(words, capture_output=True).returncode == 0
