import torch

# The suite runs on one process a core: threads of theirs would only wait for each other.
torch.set_num_threads(1)
