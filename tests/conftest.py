import importlib.util
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

# Must precede any import of Triton. With Triton but no GPU, the kernels are tested in Triton's interpreter.
if importlib.util.find_spec("triton") and shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"

os.environ["HF_HUB_OFFLINE"] = "1"                      # no test downloads; a hub that cannot be reached takes minutes

os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp()      # the user's own must not learn the names that tests use

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch

from later_methods import CHANNELS, LATER

# The suite runs one process per core; more threads would only compete for the cores.
torch.set_num_threads(1)

FAST = {
    "test_checks.py": {"edm", "proxskip", "k-gt", "relaysgd", "lt-admm", "push-diging", "choco"},
    "test_faults.py": {"edm", "proxskip"},
    "test_properties.py": {"edm", "proxskip"},
    "test_step_kernel.py": {"edm", "proxskip"},
}
"""The later methods that run the tests of these files, long ones for each algorithm, in the fast suite."""


def pytest_addoption(parser):
    parser.addoption("--shard", default="1/1", metavar="K/N", help="run the K-th of N parts of the tests")


def pytest_configure(config):
    shard = config.getoption("shard")
    k, n = map(int, shard.split("/")) if re.fullmatch(r"\d{1,9}/\d{1,9}", shard) else (0, 0)
    if not 1 <= k <= n:
        raise pytest.UsageError(f"a shard is K/N with whole numbers 1 <= K <= N, such as 3/8, got {shard!r}")
    config.stash[SHARD] = k, n


def pytest_unconfigure(config):
    shutil.rmtree(os.environ["XDG_CONFIG_HOME"], ignore_errors=True)


SHARD = pytest.StashKey[tuple[int, int]]()


def together(item):
    """The name of what a shard takes as a whole: the tests of a file that share a fixture, which takes long to make."""
    shares = any(made[-1].scope == "module" for made in item._fixtureinfo.name2fixturedefs.values())
    return item.nodeid.partition("::")[0] if shares else item.nodeid


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark the long tests of the other later methods as slow; then, of the tests that are left, keep the shard's."""
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        later = {value for value in values if isinstance(value, str)} & {*LATER, *CHANNELS}
        if later - FAST.get(item.path.name, later):
            item.add_marker(pytest.mark.slow)
    result = yield                                          # `-m slow` leaves out the others
    k, n = config.stash[SHARD]
    units = sorted({together(item) for item in items})      # neighbours take about as long: deal them out in turn
    mine = set(units[k - 1 :: n])
    config.hook.pytest_deselected(items=[item for item in items if together(item) not in mine])
    items[:] = [item for item in items if together(item) in mine]
    return result
