"""A rehearsal compiles what the first step needs: the kernels for a GPU, also on a machine without one."""

import os
import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from test_stacked import NETWORKS, example

from quasiglobal.stacked.kernels.network import kernel_network, rehearse, sum_of

pytest.importorskip("triton")


def forget(package: ModuleType) -> None:
    """Remove the compiled kernels of all modules from memory."""
    from triton.runtime.jit import JITFunction

    for name, module in list(sys.modules.items()):
        if name.startswith(package.__name__):
            for kernel in vars(module).values():
                if isinstance(kernel, JITFunction):
                    kernel.device_caches.clear()


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NETWORKS)
def test_after_a_rehearsal_a_step_compiles_no_kernel(name, monkeypatch):
    import triton

    import quasiglobal.stacked.kernels

    module, layout, x, buffers, inputs, _ = example(name, torch.float32, "cuda")
    forget(quasiglobal.stacked.kernels)
    kernels: list[str] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **found: kernels.append(found["src"].name))
    program, state = kernel_network(module, layout, x, buffers, inputs), torch.cuda.get_rng_state()
    with torch.autocast("cuda", torch.bfloat16):
        rehearse(program, name, x, buffers, inputs, sum_of)
        rehearsed = len(kernels)
        outputs, _, gradient = program(x, buffers, inputs)
    gradient(outputs.float().sum())
    assert rehearsed > 4
    assert kernels[rehearsed:] == []
    assert torch.cuda.get_rng_state().equal(state), "a rehearsal draws no random numbers"


@pytest.mark.slow
def test_after_a_rehearsal_a_step_compiles_no_segment(monkeypatch):
    """Here traced instead of compiled, and with the kernels in Triton's interpreter."""
    if "TRITON_INTERPRET" not in os.environ:
        pytest.skip("the kernels are compiled here")
    compiled: list[object] = []
    monkeypatch.setattr("quasiglobal.stacked.kernels.network._compiler_runs", lambda x: True)
    monkeypatch.setattr("quasiglobal.stacked.kernels.network.by_inductor", lambda part: compiled.append(part) or part)
    module, layout, x, buffers, inputs, _ = example("signals")
    program = kernel_network(module, layout, x, buffers, inputs)
    rehearse(program, "signals", x, buffers, inputs, sum_of)
    rehearsed = len(compiled)
    outputs, _, gradient = program(x, buffers, inputs)
    gradient(outputs.sum())
    assert rehearsed == len(compiled) == len({segment.key for segment in program.segments.values()}) > 0


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_rehearsal_compiles_each_kernel_once(tmp_path):
    """In another process: here, Triton's interpreter runs the kernels."""
    where = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", WITHOUT_A_GPU]
    where |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=where, check=True, capture_output=True, text=True)
    others, first, again, second, said = done.stdout.splitlines()
    assert others == again == "False []", "other threads launch their kernels meanwhile, into memory as it is"
    assert int(first) > 8
    assert second == first, "nothing is compiled again"
    assert said.endswith("True"), "the loss is compiled"
    assert re.match(r"\['compiling resnet8 for 2 models: kernels for \d+ operations, 0 groups of other", said)


WITHOUT_A_GPU = """
import logging, torch, triton
from threading import Thread
from quasiglobal.stacked.kernels import network
from quasiglobal.stacked.kernels.cross_entropy import CrossEntropy, _cross_entropy
from quasiglobal.stacked.kernels.network import kernel_network
from test_stacked import example
from torch.overrides import _get_current_function_mode_stack
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class Driver:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0


class Said(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())


triton.runtime.driver.set_active(Driver())
said, kernels = [], []
logging.getLogger("quasiglobal").addHandler(Said())
logging.getLogger("quasiglobal").setLevel(logging.DEBUG)
triton.knobs.compilation.listener = lambda **found: kernels.append(found["src"].name)
network.QUICK = 0
module, layout, x, buffers, inputs, targets = example("evonorm", torch.float32)
program = kernel_network(module, layout, x, buffers, inputs, by_kernels=True)
def elsewhere():
    run, JITFunction.run = JITFunction.run, lambda kernel, grid, warmup: warmup
    print(_cross_entropy[1,](), _get_current_function_mode_stack())
    JITFunction.run = run


def loss(outputs):
    other = Thread(target=elsewhere)
    other.start()
    other.join()
    return CrossEntropy.apply(outputs.float(), targets)[0].sum()


for _ in range(2):
    with torch.autocast("cpu", torch.bfloat16):
        network.rehearse(program, "resnet8", x, buffers, inputs, loss)
    print(len(kernels))
print(said, "_cross_entropy" in kernels)
"""
