"""Measure how long many processes on few cores take from their imports to their first step.

    python benchmarks/start.py                                  # ring:200 in 20 processes
    python benchmarks/start.py --nodes 400 --processes 40

Prints the seconds after the start of the first process at which the last process has imported PyTorch, has begun its
first step, and has ended it. Importing takes most of the time, and its share is the machine's. The CPU time between
import and first step, a mean over the processes, does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from quasiglobal.peers.rendezvous import serve

WORDS = ["train", "--model", "mlp", "--lr", "0.05", "--alpha", "1", "--device", "cpu", "--epochs", "1", "--steps", "3"]
WORDS += ["--engine", "distributed"]


def participate(words: list[str]) -> None:
    """Run `qg` in this process; print when its imports, and its first step, began and ended."""
    from quasiglobal import cli
    from quasiglobal.training.program import Program

    times, step, before = {"imported": time.time()}, Program.advance, time.process_time()

    def advance(self: Program, *arguments: Any) -> None:
        times.setdefault("began", time.time())
        step(self, *arguments)
        times.setdefault("stepped", time.time())
        times.setdefault("cpu", time.process_time() - before)

    Program.advance = advance                               # type: ignore[method-assign]
    sys.argv = ["qg", *words]
    cli.main()
    print(json.dumps(times))


def measure(nodes: int, processes: int) -> dict[str, float]:
    """Return the seconds at which the last process had imported PyTorch, began its first step, and ended it; and the
    mean CPU time of a process from import to first step."""
    server = serve("127.0.0.1", 0)
    shared = os.environ | {
        "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as runs:
        words = [sys.executable, __file__, "--run", *WORDS, "--topology", f"ring:{nodes}", "--runs", runs]
        first = time.time()
        started = [
            subprocess.Popen(words, env=shared | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
            for rank in range(processes)
        ]
        said = [process.communicate()[0] for process in started]
    times = [json.loads(text.splitlines()[-1]) for text in said]
    last = {name: max(of[name] for of in times) - first for name in ("imported", "began", "stepped")}
    return last | {"cpu": statistics.mean(of["cpu"] for of in times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="seconds on a CPU, to test the script")
    args = parser.parse_args()
    if args.tiny:
        args.nodes, args.processes = 4, 2
    found = measure(args.nodes, args.processes)
    print(f"ring:{args.nodes} in {args.processes} processes on {os.cpu_count()} cores")
    cpu = found.pop("cpu")
    print("  ".join(f"{name} {seconds:.1f} s" for name, seconds in found.items()))
    after = found["stepped"] - found["imported"]
    print(f"first step {after:.1f} s after the last import; {cpu:.2f} s of CPU time per process")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        participate(sys.argv[2:])
    else:
        main()
