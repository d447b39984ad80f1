"""Measure a training step beside DistributedDataParallel: time, CPU time, memory and bytes sent, in one run.

    python benchmarks/distributed.py                            # 4 processes, models of 270k, 5M and 25M parameters
    python benchmarks/distributed.py --nodes 8 --sizes 270k --rounds 15 --out distributed.json
    python benchmarks/distributed.py --before ../old/src        # a second checkout, in the same rounds
    pip install --target aside decent-dp==0.2.3 && python benchmarks/distributed.py --decent-dp aside

Every route has its own processes, one per node, with one thread each: the same MLP and one fixed batch of random data.
The routes are timed in turn, `--rounds` times, and ratios compare the timings of one round, so a busy machine slows all
alike. CPU time is that of a process with all its threads; memory is its peak resident set, which includes PyTorch's
own. Theoretical bytes are computed from the topology and the algorithm; for DDP, from a ring all-reduce of gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import PrefixStore, TCPStore

WIDTHS = {"270k": 256, "5M": 1112, "25M": 2494}
"""Width of the MLP's five hidden layers, by the rounded number of parameters."""

ROUTES = ("ddp", "decent-dp", "one-peer-exponential", "one-peer-exponential+overlap", "ring", "dsgd")
"""DDP, Decent-DP, and topologies of qg-dsgdm-n; `dsgd` is on the one-peer graph. `+overlap` sends while the gradient is
computed."""

SECONDS = 120.0
"""Timeout of every wait for another process."""

Step = Callable[[], None]


def network(size: str) -> nn.Module:
    """A model with little compute, so that communication dominates: 274,186, 5.0 million or 25.0 million parameters."""
    torch.manual_seed(0)
    width = WIDTHS[size]
    layers: list[nn.Module] = [nn.Linear(32, width), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def route_of(route: str, size: str, rank: int, n: int, store: TCPStore) -> tuple[Step, Callable[[], float]]:
    """Return a training step of the route, and a function that returns the bytes sent per step."""
    generator = torch.Generator().manual_seed(rank)
    x, y = torch.randn(32, 32, generator=generator), torch.randint(0, 10, (32,), generator=generator)
    model = network(size)
    if route in ("ddp", "decent-dp"):
        how = {"rank": rank, "world_size": n, "timeout": timedelta(seconds=SECONDS)}
        distributed.init_process_group("gloo", store=PrefixStore(route, store), **how)

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True)

    if route == "decent-dp":
        from decent_dp.ddp import DecentralizedDataParallel  # its hooks make the optimizer's step

        wrapped = DecentralizedDataParallel(
            model, lambda named: sgd([p for _, p in named]), topology="one-peer-exp", _local_world_size=1
        )
        return lambda: nn.functional.cross_entropy(wrapped(x), y).backward(), lambda: 0.0

    gossip = None
    if route == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
        optimizer = sgd(model.parameters())
    else:
        import quasiglobal as qg

        topology, _, overlap = route.removesuffix("@before").partition("+")
        algorithm, topology = ("dsgd", "one-peer-exponential") if topology == "dsgd" else ("qg-dsgdm-n", topology)
        gossip = qg.optim.GossipOptimizer(
            model.parameters(), algorithm, f"{topology}:{n}", lr=0.01, timeout=SECONDS, meeting=(store, rank, n),
            **{"overlap": True} if overlap else {},
        )
        optimizer = gossip

    def sent() -> float:
        return 0.0 if gossip is None else sum(one["sent"] for one in gossip.engine.accounts().values()) / gossip.steps

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step, sent


def work(route: str, size: str, rank: int, n: int, port: int) -> None:
    """One process of a route: for each number of steps on standard input, make them and print what they took."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=SECONDS))
    step, sent = route_of(route, size, rank, n, store)
    for line in sys.stdin:
        began = time.process_time()
        for _ in range(int(line)):
            step()
        high = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        took = {"cpu": time.process_time() - began, "memory": int(high[1]) * 1024 if high else 0, "bytes": sent()}
        print(json.dumps(took), flush=True)
    os._exit(0)                                             # no route waits for another's end


class Route:
    """The processes of one route."""

    def __init__(self, route: str, size: str, n: int, args: argparse.Namespace) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        paths = [args.before] if route.endswith("@before") else []
        paths += [args.decent_dp] if route == "decent-dp" else []
        paths += [str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
        self.workers = [
            subprocess.Popen(
                [sys.executable, __file__, "--work", route, size, str(rank), str(n), str(self.store.port)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(n)
        ]
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.memory = self.bytes = 0.0

    def run(self, steps: int) -> None:
        """Make some steps in all processes."""
        began = time.perf_counter()
        for worker in self.workers:
            assert worker.stdin
            worker.stdin.write(f"{steps}\n")
            worker.stdin.flush()
        lines = [worker.stdout.readline() for worker in self.workers if worker.stdout]
        if not all(lines):
            raise SystemExit("a process of the benchmark failed; its message is above")
        took = [json.loads(line) for line in lines]
        self.seconds.append((time.perf_counter() - began) / steps)
        self.cpu.append(statistics.mean(one["cpu"] for one in took) / steps)
        self.memory = max(one["memory"] for one in took)
        self.bytes = statistics.mean(one["bytes"] for one in took)

    def close(self) -> None:
        for worker in self.workers:
            with worker:                                    # waits, and closes the pipes
                worker.kill()


def compare(size: str, n: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    routes = {name: Route(name, size, n, args) for name in routes_of(args)}
    try:
        for route in routes.values():
            route.run(2)                                    # connections, memory, DDP's buckets; one at a time
            route.seconds, route.cpu = [], []
        for _ in range(args.rounds):
            for route in routes.values():
                route.run(args.steps)
    finally:
        for route in routes.values():
            route.close()
    d, ddp = sum(p.numel() for p in network(size).parameters()), routes["ddp"]
    rows = []
    for name, route in routes.items():
        ratios = [a / b for a, b in zip(route.seconds, ddp.seconds, strict=True)]
        cpu = statistics.median(a / b for a, b in zip(route.cpu, ddp.cpu, strict=True))
        rows.append({
            "nodes": n, "parameters": d, "route": name, "ms": 1000 * statistics.median(route.seconds),
            "ratio": statistics.median(ratios), "ratios": ratios, "cpu_ms": 1000 * statistics.median(route.cpu),
            "cpu_ratio": cpu, "memory": route.memory, "memory_ratio": route.memory / ddp.memory,
            "bytes_per_step": route.bytes, "theory": theory(name, d, n),
        })
        sent = f"{route.bytes:13,.0f}" if route.bytes else f"{'-':>13}"
        print(
            f"{n:3} {size:>5} {name:30} {rows[-1]['ms']:9.1f} {rows[-1]['ratio']:6.2f} "
            f"{f'({min(ratios):.2f} to {max(ratios):.2f})':>16} {rows[-1]['cpu_ms']:9.1f} {cpu:6.2f} "
            f"{route.memory / 1e6:7.0f} {rows[-1]['memory_ratio']:6.2f} {sent} {rows[-1]['theory']:13,.0f}", flush=True,
        )
    return rows


def theory(route: str, d: int, n: int) -> float:
    """Bytes that a node sends per step."""
    import quasiglobal as qg

    if route == "ddp":
        return 2 * (n - 1) / n * 4 * d
    topology = route.removesuffix("@before").partition("+")[0]
    graph = "one-peer-exponential" if topology in ("dsgd", "decent-dp") else topology
    return qg.topology.parse(f"{graph}:{n}").bytes_per_step(d)     # one model to each neighbour


def routes_of(args: argparse.Namespace) -> list[str]:
    """The routes to time; those of another checkout come after those here."""
    names = [name for name in args.routes if name != "ddp" and (name != "decent-dp" or args.decent_dp)]
    before = [f"{name}@before" for name in names if args.before and name != "decent-dp" and "+" not in name]
    return ["ddp", *names, *before]


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        route, size, *numbers = sys.argv[2:]
        work(route, size, *map(int, numbers))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4])
    parser.add_argument("--sizes", nargs="+", choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=ROUTES[:3])
    parser.add_argument("--steps", type=int, default=10, help="steps per route and round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--before", help="`src` of another checkout, timed beside this one")
    parser.add_argument("--decent-dp", default=os.environ.get("DECENT_DP"),
                        help="folder with decent-dp and loguru; skipped without (default: the variable DECENT_DP)")
    parser.add_argument("--out", help="write the results as JSON")
    parser.add_argument("--tiny", action="store_true", help="seconds on a CPU, to test the script")
    args = parser.parse_args()
    if args.tiny:
        args.nodes, args.sizes, args.routes, args.steps, args.rounds = [2], ["270k"], ROUTES[2:3], 1, 1
    print(f"{'n':>3} {'size':>5} {'route':30} {'ms/step':>9} {'/ DDP':>6} {'of the rounds':>16} {'CPU ms':>9} "
          f"{'/ DDP':>6} {'MB':>7} {'/ DDP':>6} {'bytes sent':>13} {'theory':>13}")
    results = []
    for n in args.nodes:
        for size in args.sizes:
            results += compare(size, n, args)
            if args.out:
                Path(args.out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
