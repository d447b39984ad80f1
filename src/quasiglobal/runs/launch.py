"""Start the processes of a distributed run on this machine, and restart killed processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from quasiglobal.peers.rendezvous import serve
from quasiglobal.runs.attempts import needs_all
from quasiglobal.training.experiment import Experiment

RESTARTS = 3
"""Maximum number of restarts, over all processes."""


def launch(words: Sequence[str], experiment: Experiment, processes: int, all_print: bool = False) -> int:
    """Run `qg` with the arguments `words` in local processes; return the exit status of the first failure, or 0.

    Process 0 alone writes to standard output, or all do if `all_print`.
    """
    server = serve("127.0.0.1", 0)
    shared = {
        "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }

    running: dict[int, subprocess.Popen[bytes]] = {}
    restarts, failed, stopped = 0 if needs_all(experiment) else RESTARTS, 0, False

    def start(rank: int) -> None:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        running[rank] = subprocess.Popen(
            [sys.executable, "-m", "quasiglobal", *words], env=os.environ | shared | own,
            stdout=None if rank == 0 or all_print else subprocess.DEVNULL,
            process_group=0,                                # signals come from here alone
        )
        if stopped:                                         # meanwhile
            running[rank].terminate()

    def stop(number: int, frame: object) -> None:
        """Pass Ctrl-C, SIGTERM and SIGHUP on as SIGTERM: the first lets the epoch end, the second stops at once.

        Unlike Ctrl-C, SIGTERM also stops a process that still imports its modules, or was started in the background.
        """
        nonlocal stopped
        stopped = True
        for process in list(running.values()):
            process.terminate()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        for rank in range(processes):
            start(rank)
        while running:
            for rank, process in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                if code < 0 and restarts and len(running) > 1 and not stopped:  # the others continue, and it rejoins
                    restarts -= 1
                    print(f"qg: process {rank} was killed (signal {-code}); starting it again", file=sys.stderr)
                    start(rank)
                    continue
                del running[rank]
                failed = code if code > 0 or not failed else failed     # an error says more than a signal
            time.sleep(0.05)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if stopped and failed == -signal.SIGTERM:               # before there was anything to save
        raise KeyboardInterrupt
    return failed
