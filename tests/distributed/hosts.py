"""Several hosts on one machine: network namespaces, connected by a bridge or by a switch with delay and loss."""

import fcntl
import heapq
import itertools
import math
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager

TAP, NO_HEADER, SET_INTERFACE = 0x0002, 0x1000, 0x400454CA

QUEUE = 0.3
"""Seconds that a frame waits at most where the rate is limited; further ones are lost, as in a real router."""

LETTERS = itertools.cycle("abcdefghijklmnopqrstuvwxyz")
"""Suffixes for unique names: the kernel takes a while to release a name."""


def why_not():
    """Return the reason why hosts cannot be created here; None if they can."""
    if os.geteuid():
        return "only root may create network namespaces"
    if not shutil.which("ip"):
        return "the command ip (iproute2) is not installed"
    return None


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """`inside(k)` is the prefix that runs a command on host k; `address(k)` is the IP address of host k."""

    def __init__(self, count):
        self.mark, self.count = f"qg{os.getpid() % 100_000}{next(LETTERS)}", count

    def name(self, k):
        return f"{self.mark}-{k}"

    def outer(self, k):
        return f"{self.mark}o{k}"

    def address(self, k):
        return f"10.77.0.{k + 1}"

    def inside(self, k):
        return ["ip", "netns", "exec", self.name(k)]

    def take_in(self, interface, k):
        """Move the interface to host k and assign its address."""
        ip("link", "set", "dev", interface, "netns", self.name(k))
        ip("-n", self.name(k), "addr", "add", f"{self.address(k)}/24", "dev", interface)
        for device in (interface, "lo"):
            ip("-n", self.name(k), "link", "set", "dev", device, "up")


@contextmanager
def on_a_bridge(count):
    """Connect hosts to one bridge by veth pairs; `outer(k)` is the bridge's end of host k's pair."""
    hosts = Hosts(count)
    bridge = f"{hosts.mark}b"
    with ExitStack() as undo:
        ip("link", "add", "name", bridge, "type", "bridge")
        undo.callback(ip, "link", "del", "dev", bridge)
        ip("link", "set", "dev", bridge, "up")
        for k in range(count):
            ip("netns", "add", hosts.name(k))
            undo.callback(ip, "netns", "del", hosts.name(k))
            inner = f"{hosts.mark}i{k}"
            ip("link", "add", "name", hosts.outer(k), "type", "veth", "peer", "name", inner)
            ip("link", "set", "dev", hosts.outer(k), "master", bridge)
            ip("link", "set", "dev", hosts.outer(k), "up")
            hosts.take_in(inner, k)
        yield hosts


@contextmanager
def in_bad_weather(count, delay, loss, rate=math.inf):
    """Connect hosts to a user-space switch that delays frames by `delay` seconds and drops a share `loss` of them.

    `rate` is the number of bytes per second that it forwards from each host.

    Replaces `tc netem` on kernels without it.
    """
    hosts = Hosts(count)
    with ExitStack() as undo:
        ports = []
        for k in range(count):
            ip("netns", "add", hosts.name(k))
            undo.callback(ip, "netns", "del", hosts.name(k))
            port = os.open("/dev/net/tun", os.O_RDWR)
            undo.callback(os.close, port)
            interface = f"{hosts.mark}t{k}"
            fcntl.ioctl(port, SET_INTERFACE, struct.pack("16sH", interface.encode(), TAP | NO_HEADER))
            os.set_blocking(port, False)
            hosts.take_in(interface, k)
            ports.append(port)
        switch = Switch(ports, delay, loss, rate)
        switch.start()
        undo.callback(switch.stop)
        hosts.switch = switch
        yield hosts


class Switch(threading.Thread):
    """Thread that forwards frames from each port to all others, with delay, loss and a rate."""

    def __init__(self, ports, delay, loss, rate):
        super().__init__(daemon=True)
        self.ports, self.delay, self.loss, self.rate = ports, delay, loss, rate
        self.free = dict.fromkeys(ports, 0.0)
        self.passed = self.lost = 0
        self._stopping = threading.Event()

    def run(self):
        draw, held, count = random.Random(0), [], itertools.count()
        while not self._stopping.is_set():
            wait = max(held[0][0] - time.monotonic(), 0) if held else 0.1
            for port in select.select(self.ports, [], [], min(wait, 0.1))[0]:
                frame = os.read(port, 65536)
                if draw.random() < self.loss or self.free[port] > time.monotonic() + QUEUE:
                    self.lost += 1
                else:
                    self.free[port] = max(time.monotonic(), self.free[port]) + len(frame) / self.rate
                    heapq.heappush(held, (self.free[port] + self.delay, next(count), port, frame))
            while held and held[0][0] <= time.monotonic():
                _, _, source, frame = heapq.heappop(held)
                self.passed += 1
                for port in self.ports:
                    if port != source:
                        os.write(port, frame)

    def stop(self):
        self._stopping.set()
        self.join()
