import importlib.util
import os
import shutil
import sys
from pathlib import Path

# Must precede any import of Triton. With Triton but no GPU, the kernels are tested in Triton's interpreter.
if importlib.util.find_spec("triton") and shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"

os.environ["HF_HUB_OFFLINE"] = "1"                      # no test downloads; a hub that cannot be reached takes minutes

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the long tests of the other later methods as slow."""
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        later = {value for value in values if isinstance(value, str)} & {*LATER, *CHANNELS}
        if later - FAST.get(item.path.name, later):
            item.add_marker(pytest.mark.slow)
