"""Real processes for the tests: each runs a function of (rank, store) and returns its result."""

import io
import multiprocessing
import queue
import traceback
from datetime import timedelta

import torch
from torch.distributed import TCPStore

SECONDS = 300
"""Timeout of every wait here."""


def together(count, function, *arguments, patience=SECONDS):
    """Run function(rank, store, *arguments) in `count` processes; return the results; fail if a process fails."""
    context = multiprocessing.get_context("forkserver")        # imports PyTorch once for all
    context.set_forkserver_preload(["quasiglobal.optim", "quasiglobal.training.program", "transformers"])
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SECONDS))
    results = context.Queue()
    started = [
        context.Process(target=_run, args=(function, rank, server.port, arguments, results), daemon=True)
        for rank in range(count)
    ]
    for process in started:
        process.start()
    answers = {}
    try:
        while len(answers) < count:
            rank, value, trouble = results.get(timeout=patience)
            assert trouble is None, f"process {rank}: {trouble}"
            answers[rank] = torch.load(io.BytesIO(value), weights_only=False)
    except queue.Empty:
        raise AssertionError(f"processes {sorted(set(range(count)) - set(answers))} hang") from None
    finally:
        for process in started:
            process.kill()
            process.join()
    return [answers[rank] for rank in range(count)]


def _run(function, rank, port, arguments, results):
    torch.set_num_threads(1)
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=SECONDS))
        answer = io.BytesIO()                           # tensors by value: the process may exit before they are read
        torch.save(function(rank, store, *arguments), answer)
        results.put((rank, answer.getvalue(), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
