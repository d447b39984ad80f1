"""Large messages to a process on the same machine go through memory that it can read."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quasiglobal.peers import memory as shared
from quasiglobal.peers.edge import Lost
from quasiglobal.peers.gloo import GlooChannel
from quasiglobal.peers.memory import MessageMemory
from quasiglobal.peers.rendezvous import Meeting, serve

COUNT = shared.LARGE // 4 + 1

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


@pytest.fixture
def ends():
    server = serve("127.0.0.1", 0)
    with ThreadPoolExecutor(2) as threads:
        opening = [threads.submit(GlooChannel, Meeting(server, "edge"), rank, "127.0.0.1", 20.0) for rank in (0, 1)]
        channels = [one.result() for one in opening]
    yield channels
    for channel in channels:
        channel.close()


def sent(channels, message):
    """What the other end receives."""
    here, there = channels
    deadline = time.monotonic() + 20
    buffer, sending = torch.zeros_like(message), here.send(message)
    there.recv_into(buffer, deadline)
    sending.wait(deadline)
    return buffer


def message_in(memory):
    message = memory.empty(COUNT, torch.float32)
    return message.copy_(torch.arange(COUNT))


def test_a_message_in_shared_memory_is_read_there(ends, monkeypatch):
    reads = []
    read = shared.read_file
    monkeypatch.setattr("quasiglobal.peers.gloo.read_file", lambda *of: (reads.append(of), read(*of)))
    message = message_in(MessageMemory(shared=True))
    for one in (message, message[1:].clone(), torch.ones(3)):               # shared, large but not shared, small
        assert sent(ends, one).equal(one)
    assert len(reads) == 1


def test_a_message_is_sent_where_memory_cannot_be_read(ends):
    ends[0]._is_read = False
    message = message_in(MessageMemory(shared=True))
    assert sent(ends, message).equal(message)


def test_the_sender_waits_until_its_message_is_read(ends):
    memory = MessageMemory(shared=True)
    sending = ends[0].send(message_in(memory))
    with pytest.raises(Lost):
        sending.wait(time.monotonic() + 0.05)


def test_no_other_file_is_read(tmp_path):
    file = os.open(tmp_path / "secret", os.O_CREAT | os.O_RDWR)
    os.write(file, bytes(64))
    with pytest.raises(OSError, match="not shared memory"):
        shared.read_file(os.getpid(), file, 0, torch.empty(64, dtype=torch.uint8))
    os.close(file)


def test_shared_memory_is_closed_when_nothing_refers_to_it():
    memory = MessageMemory(shared=True)
    message = message_in(memory)
    file, position = shared.file_of(message[2:])
    assert position == 8
    del message, memory
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
