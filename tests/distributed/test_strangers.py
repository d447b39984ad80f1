"""Unauthorized peers and invalid data are refused and reported, and training continues."""

import os
import random
import signal
import socket
import subprocess
import sys

import meetings
import psutil
import pytest
import torch
from commands import ended, train, train_apart, wait_for_epoch
from processes import together

from quasiglobal.runs.store import find_runs


def test_neighbours_with_one_secret_and_experiment_tell_their_step():
    assert together(2, meetings.admission, ("e", "e"), ("s", "s")) == [8, 7]
    assert together(2, meetings.admission, ("e", "e"), ("", "")) == [8, 7]


@pytest.mark.parametrize(
    ("experiments", "secrets"), [(("e", "e"), ("s", "")), (("e", "e"), ("s", "t")), (("e", "f"), ("s", "s"))]
)
def test_others_are_refused_by_both_sides(experiments, secrets):
    answers = together(2, meetings.admission, experiments, secrets)
    assert answers == ["it runs another experiment, or has another secret"] * 2


@pytest.mark.parametrize("bad", ["nan", "huge", "shape", "step"])
def test_the_messages_of_a_liar_alone_do_not_count(bad):
    answers = together(3, meetings.mixing, bad)
    for rank, (mixed, missed, lost, dead) in enumerate(answers[:2]):
        torch.testing.assert_close(mixed, torch.full((1, 4), 0.5), rtol=0, atol=0.2)    # two of three share 0 and 1
        assert missed == {str(1 - rank): 0, "2": 3}
        assert not lost
        assert not dead


def test_a_compressed_message_that_cannot_be_restored_does_not_count():
    for mixed, dead in together(3, meetings.telling)[:2]:
        assert mixed.equal(torch.tensor([[3.0, 0.0, 0.0, 4.0]]))
        assert not dead


@pytest.mark.parametrize(
    ("claimed", "believed"),
    [([0, 0, 10**9], 0), ([0, 40, 50], 40), ([0, 40, 41, 10**18], 40)],
)
def test_a_claimed_step_is_believed_if_the_run_has_it_and_others_are_there(claimed, believed):
    assert together(len(claimed), meetings.claims, claimed, 100)[0] == believed


def test_a_model_of_the_own_size_is_taken_and_no_other():
    assert together(2, meetings.offered_model, (4, 4))[0].equal(torch.ones(4))
    for offered in (3, 5, 10**6):
        answer = together(2, meetings.offered_model, (4, offered))[0]
        assert answer == "it offers a model of another size than 4 numbers"


@pytest.mark.parametrize("seconds", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_stranger_at_the_store_has_no_lasting_effect(seconds):
    answers = together(3, meetings.strangers, seconds)
    for mixed, dead in answers[:2]:
        torch.testing.assert_close(mixed, torch.full((1, 4), 0.5))
        assert not dead


@pytest.mark.slow
def test_garbage_on_the_ports_disturbs_nobody(tmp_path):
    words = ["--topology", "ring:3", "--epochs", "40", "--engine", "distributed", "--processes", "3"]
    process = train(tmp_path, *words, env=os.environ | {"QG_SECRET": "right"})
    wait_for_epoch(tmp_path, 1, 2)
    launcher = psutil.Process(process.pid)
    listening = [c.laddr for p in (launcher, *launcher.children()) for c in p.net_connections() if c.status == "LISTEN"]
    assert {address.ip for address in listening} == {"127.0.0.1"}       # loopback by default
    held = []
    for address in listening:
        for garbage in ([b"GET / HTTP/1.0\r\n\r\n"], [random.Random(0).randbytes(10_000)], [bytes(1_000_000)] * 1_000):
            try:
                held.append(socket.create_connection(address, timeout=0.5))
                held[-1].settimeout(0.2)
                for part in garbage:
                    held[-1].sendall(part)
            except OSError:
                pass
    grown = [p.memory_info().rss for p in (launcher, *launcher.children())]
    assert max(grown) < 1.5e9                               # a gigabyte of zeros is not buffered
    said = ended(process)
    for connection in held:
        connection.close()
    assert "continues without" not in said
    (run,) = find_runs(tmp_path)
    assert run.status == "finished"


@pytest.mark.slow
def test_training_goes_on_without_the_place_where_it_met(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "quasiglobal", "rendezvous", "--port", "0"], stdout=subprocess.PIPE, text=True
    ) as place:
        port = place.stdout.readline().split(":")[1].split(";")[0]
        started = train_apart(tmp_path, int(port), 3, "--topology", "ring:3", "--epochs", "40")
        wait_for_epoch(tmp_path, 1, 2)
        place.send_signal(signal.SIGKILL)
        for process in started:
            ended(process)
    (run,) = find_runs(tmp_path)
    assert run.status == "finished"
    assert run.records()[-1]["epoch"] == 40
