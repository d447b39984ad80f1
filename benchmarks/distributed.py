"""Measure the time of a training step against DistributedDataParallel, and the bytes sent per node, in one run.

    python benchmarks/distributed.py                            # 4 and 8 processes, one thread each, on this machine
    python benchmarks/distributed.py --nodes 8 --rounds 15 --out distributed.json

Every process holds one node: the same model, of a ResNet-20's size, and one fixed batch of random data. The routes are
timed in turn, from barrier to barrier, and ratios compare consecutive timings, so a busy machine slows all alike.
Theoretical bytes are computed from the topology and the algorithm; for DDP, from a ring all-reduce of the gradients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor, distributed, nn
from torch.distributed import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

import quasiglobal as qg
from quasiglobal.engines.costs import traffic

ALGORITHM = "qg-dsgdm-n"
TOPOLOGIES = ("one-peer-exponential", "ring")

SECONDS = 60.0
"""Timeout of every wait for another process."""

Step = Callable[[], None]


def network() -> nn.Module:
    """A model of 274,186 parameters (a ResNet-20 has 272,474) with little compute, so that communication dominates."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(32, 256), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Step:
    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def node(rank: int, size: int, port: int, args: argparse.Namespace, results: Any) -> None:
    """Time all routes in turn in one process; rank 0 reports."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=SECONDS))
    distributed.init_process_group(
        "gloo", store=PrefixStore("ddp", store), rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS)
    )
    generator = torch.Generator().manual_seed(rank)
    x, y = torch.randn(32, 32, generator=generator), torch.randint(0, 10, (32,), generator=generator)

    replica = DistributedDataParallel(network())
    sgd = torch.optim.SGD(replica.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    routes = {"ddp": step_of(replica, sgd, x, y)}
    optimizers = {}
    for name in TOPOLOGIES:
        model = network()
        optimizers[name] = qg.optim.GossipOptimizer(
            model.parameters(), ALGORITHM, f"{name}:{size}", lr=0.01, timeout=SECONDS,
            meeting=(PrefixStore(name, store), rank, size),
        )
        routes[name] = step_of(model, optimizers[name], x, y)

    def timed(step: Step) -> float:
        """Seconds per step of the slowest process."""
        distributed.barrier()
        began = time.perf_counter()
        for _ in range(args.steps):
            step()
        distributed.barrier()
        return (time.perf_counter() - began) / args.steps

    for step in routes.values():
        timed(step)                                 # warm up connections, memory and DDP's buckets
    times: dict[str, list[float]] = {route: [] for route in routes}
    for _ in range(args.rounds):
        for route, step in routes.items():
            times[route].append(timed(step))

    sent = [
        sum(account["sent"] for account in optimizer.engine.accounts().values()) / optimizer.steps
        for optimizer in optimizers.values()
    ]
    everybody = [torch.zeros(len(sent), dtype=torch.float64) for _ in range(size)]
    distributed.all_gather(everybody, torch.tensor(sent, dtype=torch.float64))
    if rank == 0:
        results.put((times, dict(zip(TOPOLOGIES, torch.stack(everybody).T.tolist(), strict=True))))
    distributed.barrier()
    for optimizer in optimizers.values():
        optimizer.engine.close()
    distributed.destroy_process_group()


def together(size: int, args: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Run the processes; return seconds per step by route and round, and bytes per step by topology and node."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SECONDS))
    results = torch.multiprocessing.get_context("spawn").Queue()
    started = torch.multiprocessing.spawn(node, (size, store.port, args, results), nprocs=size, join=False)
    deadline = time.monotonic() + args.patience
    try:
        while not started.join(timeout=1.0):        # raises if a process failed
            if time.monotonic() > deadline:
                raise SystemExit(f"{size} processes did not finish within {args.patience:g} s; raise --patience")
        return results.get(timeout=SECONDS)
    finally:
        for process in started.processes:
            process.kill()


def compare(size: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    times, sent = together(size, args)
    d = sum(p.numel() for p in network().parameters())
    rows = []
    for route, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, times["ddp"], strict=True)]
        if route == "ddp":
            bytes_sent, theory = None, 2 * (size - 1) / size * 4 * d
        else:
            bytes_sent = statistics.mean(sent[route])
            theory = traffic(qg.algorithm(ALGORITHM)).bytes(qg.topology.parse(f"{route}:{size}"), d)
        rows.append({
            "nodes": size, "route": route, "ms": 1000 * statistics.median(seconds), "ratio": statistics.median(ratios),
            "ratios": ratios, "bytes_per_step": bytes_sent, "each_node": sent.get(route), "theory": theory,
        })
        measured = "-" if bytes_sent is None else f"{bytes_sent:,.0f}"
        print(
            f"{size:3} {route:22} {rows[-1]['ms']:8.2f} {rows[-1]['ratio']:6.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) {measured:>12} {theory:12,.0f}", flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--steps", type=int, default=50, help="steps per route and round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--patience", type=float, default=300.0, help="timeout in seconds for each number of nodes")
    parser.add_argument("--out", help="write the results as JSON")
    args = parser.parse_args()
    print(f"{'n':>3} {'route':22} {'ms/step':>8} {'/ DDP':>6} {'(of the rounds)':14} {'bytes sent':>12} {'theory':>12}")
    results = []
    for size in args.nodes:
        results += compare(size, args)
        if args.out:
            with open(args.out, "w") as file:
                json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
