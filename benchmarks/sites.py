"""Time `qg node` at four sites, each in a network namespace of its own: steps per second, and CPU time per step.

    python benchmarks/sites.py                                  # as root; without, all sites are at 127.0.0.1
    python benchmarks/sites.py --before ../old/src --rounds 3   # a second checkout, in turn

Four nodes on a ring train an MLP of 26,122 numbers in float64 over mutual TLS, one thread each. Start and end are not
measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
NODES, STEPS = 4, 5
"""Sites, and steps per epoch."""


def measure(source: Path, epochs: int) -> tuple[float, float]:
    """Train with the checkout at `source`; return the steps per second, and the CPU milliseconds of a node's step."""
    sys.path[:0] = [str(ROOT / "tests" / "distributed")]
    import hosts
    from commands import wait_for
    from federations import Sites
    from owners import Owners

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        net = None if hosts.why_not() else stack.enter_context(hosts.on_a_bridge(NODES))
        sites = Sites(folder, "ring:4", NODES, addresses=net and [f"{net.address(k)}:7443" for k in range(NODES)])
        four = Owners(folder, epochs)
        stack.callback(four.close)
        os.environ["PYTHONPATH"] = str(source)
        nodes = [
            psutil.Process(four.join(k, sites.folders[k], before=net.inside(k) if net else ()).pid)
            for k in range(NODES)
        ]

        def done() -> int:
            files = folder.glob("runs0/*/parts/0/metrics.jsonl")
            return max((len(path.read_text().splitlines()) for path in files), default=0)

        def reading() -> tuple[float, float, float]:
            cpu = [sum(node.cpu_times()[:2]) for node in nodes]
            return STEPS * done(), time.perf_counter(), statistics.mean(cpu)

        def at(epoch: int) -> tuple[float, float, float]:
            wait_for(lambda: done() >= epoch)
            return reading()

        first, last = at(epochs // 10), at(9 * epochs // 10)
    steps, seconds, cpu = (b - a for a, b in zip(first, last, strict=True))
    return steps / seconds, 1000 * cpu / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="`src` of another checkout, timed in turn with this one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--tiny", action="store_true", help="one short round, to test the script")
    args = parser.parse_args()
    if args.tiny:
        args.rounds, args.epochs = 1, 40
    sources = {"after": ROOT / "src"} | ({"before": args.before.resolve()} if args.before else {})
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sources}
    for _ in range(args.rounds):
        for name, source in sources.items():
            found[name].append(measure(source, args.epochs))
            print(f"{name:>6}: {found[name][-1][0]:8.1f} steps/s {found[name][-1][1]:8.2f} CPU ms/step", flush=True)
    if args.before:
        rate, cpu = (
            statistics.median(a[k] / b[k] for a, b in zip(found["after"], found["before"], strict=True))
            for k in range(2)
        )
        print(f"after / before, median of the rounds: {rate:.2f} × the steps/s, {cpu:.2f} × the CPU time")


if __name__ == "__main__":
    main()
