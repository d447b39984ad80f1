"""A training starts within seconds: its first step imports no compiler but Triton."""

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from quasiglobal.stacked import compiling

pytest.importorskip("triton")


def output_of(script):
    """What a new process prints."""
    where = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="in Triton's interpreter")
def test_a_first_step_by_the_kernels_imports_no_compiler():
    """Each of these packages takes seconds to import.

    In fp32: Triton's interpreter multiplies matrices in bf16 as the integers that hold their bits, and a wrong first
    gradient leads to the compiler.
    """
    assert output_of(FIRST_STEP) == ["Kernels", "StepKernel"]


FIRST_STEP = """
import sys, torch
from torch import nn
from quasiglobal.algorithms import algorithm
from quasiglobal.training.bands import Band
from quasiglobal.engines.simulator import Simulator
from quasiglobal.stacked import step_kernel
from quasiglobal.stacked.kernels.network import Kernels
from quasiglobal.stacked.layout import Layout
from quasiglobal.stacked.stack import Stack
from quasiglobal.metrics import accuracy
from quasiglobal.models.norms import EvoNormS0
from quasiglobal.topology import parse

torch.set_num_threads(1)

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.batch, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.MaxPool2d(2)
        self.wide, self.group = nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.GroupNorm(4, 16)
        self.evonorm = EvoNormS0(16)
        self.layer, self.head = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x):
        x = self.pool(torch.relu(self.batch(self.stem(x))))
        x = self.evonorm(self.group(self.wide(x)))
        return self.head(self.layer(x.mean((2, 3))))


module, n = Network(), 3
layout = Layout.of(module)
x = layout.row(dict(module.named_parameters())).repeat(n, 1)
buffers = {name: torch.stack([value] * n) for name, value in Layout.buffers(module).items()}
model = Stack(module, nn.functional.cross_entropy, layout, "fp32", right=accuracy, counts_hits=True, route=Kernels)
g = model.gradients(x, buffers, torch.randn(n, 2, 3, 4, 4), torch.zeros(n, 2, dtype=torch.int64)).g
assert g.isfinite().all()

step_kernel.available = lambda x: True
band = Band(algorithm("qg-dsgdm-n"), Simulator(parse(f"ring:{n}")), 0, 1e-4)
band.begin_at(x)
kernel = band.kernel(1, x, g, torch.tensor(1.0), torch.tensor(0.1))
print(type(model.route).__name__, type(kernel).__name__)
print(*{"sympy", "torch._dynamo", "torch._inductor"} & sys.modules.keys())
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")               # from torch.compile's own imports
def test_a_process_does_not_wait_for_the_workers_of_the_compiler(monkeypatch):
    """PyTorch waits about ten seconds for them, if they are still starting."""
    from torch._inductor import async_compile

    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(compiling.atexit, "register", registered.append)
    compiling._leave_workers_at_exit.cache_clear()
    compiling.by_inductor(torch.sin)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as worker:
        monkeypatch.setattr(async_compile, "_pool_set", [SimpleNamespace(process=worker)])
        registered[-1]()
        assert worker.wait(300) == 0, "which is what PyTorch calls"
        worker.returncode = None
        worker.kill()
