import importlib.util
import os
import shutil

# Before anything imports Triton: where it is and a GPU is not, its kernels are tested in its interpreter.
if importlib.util.find_spec("triton") and shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"

import torch

# The suite runs on one process a core: threads of theirs would only wait for each other.
torch.set_num_threads(1)
