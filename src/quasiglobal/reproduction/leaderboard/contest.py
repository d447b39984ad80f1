"""Run methods under the protocol, in several processes on a CPU, or together on a GPU."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from quasiglobal.common.objects import fault
from quasiglobal.errors import InputError
from quasiglobal.reproduction.leaderboard.competing import compete
from quasiglobal.reproduction.leaderboard.contenders import Contender
from quasiglobal.reproduction.leaderboard.protocol import Tier
from quasiglobal.reproduction.leaderboard.standings import Standing
from quasiglobal.runs.options import Options, choose_device
from quasiglobal.runs.store import Watcher, unwatched

log = logging.getLogger("quasiglobal")


def contest(
    chosen: Sequence[Contender], tier: Tier, options: Options, workers: int = 1, watch: Watcher = unwatched
) -> Iterator[Standing]:
    """Run methods under the protocol of a tier; yield the record of each as soon as it is done.

    Run folders are resumed, and finished ones are not repeated. On a GPU the trials of all methods fill one program.
    On a CPU each method has programs of its own, in `workers` processes of one thread each. There, a method that fails
    does not stop the others; finally raise InputError for all that failed.
    """
    if workers < 0:
        raise InputError(f"workers must be >= 0, got {workers}")
    if choose_device(options.device).type == "cuda":
        yield from compete(chosen, tier, options, watch)
        return
    failed: dict[str, Exception] = {}
    if workers > 1:
        yield from _in_processes(chosen, tier, options, workers, failed)
    else:
        for one in chosen:
            try:
                yield from compete([one], tier, options, watch)
            except Exception as error:
                failed[one.name] = error
    for name, why in failed.items():
        log.debug(f"{name} failed", exc_info=why)
    if failed:
        said = {name: why if isinstance(why, InputError) else fault(why) for name, why in failed.items()}
        raise InputError("; ".join(f"{name} failed: {why}" for name, why in said.items()))


def _in_processes(
    chosen: Sequence[Contender], tier: Tier, options: Options, workers: int, failed: dict[str, Exception]
) -> Iterator[Standing]:
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_prepare_process)
    try:
        names = {pool.submit(_compete_alone, one, tier, options): one.name for one in chosen}
        for done in as_completed(names):
            try:
                yield done.result()
            except Exception as error:
                failed[names[done]] = error
    finally:
        pool.shutdown(cancel_futures=True)


def _prepare_process() -> None:
    """Use one thread; leave Ctrl-C to the training, which saves before it stops; end when the first process ends."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process once its parent has ended, also if it was killed; the runs resume from their checkpoints."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _compete_alone(one: Contender, tier: Tier, options: Options) -> Standing:
    (standing,) = compete([one], tier, options)
    return standing
