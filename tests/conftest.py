import importlib.util
import os
import shutil

# Must precede any import of Triton. With Triton but no GPU, the kernels are tested in Triton's interpreter.
if importlib.util.find_spec("triton") and shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"

os.environ["HF_HUB_OFFLINE"] = "1"                      # no test downloads; a hub that cannot be reached takes minutes

import torch

# The suite runs one process per core; more threads would only compete for the cores.
torch.set_num_threads(1)
