"""A plain PyTorch training loop, made decentralized by five lines (marked ←).

There is no server, and each process keeps its own digits.

    torchrun --standalone --nproc-per-node 4 examples/torchrun_digits.py
"""

import os

import torch
from torch import nn

import quasiglobal as qg  # ← 1

node, nodes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])                      # ← 2
data = qg.data.load("digits")
mine = qg.data.split(data.train.y, nodes, alpha=0.1)[node]                                # ← 3: only a few classes
x, y = data.train.x[mine].flatten(1) / 16, data.train.y[mine]

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = qg.optim.GossipOptimizer(model.parameters(), "qg-dsgdm-n", f"ring:{nodes}", lr=0.2)  # ← 4
schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[40, 50])

for _epoch in range(60):
    for batch in torch.randperm(len(y)).split(32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    schedule.step()

optimizer.average()                                                                       # ← 5: the same model for all
right = (model(data.test.x.flatten(1) / 16).argmax(dim=1) == data.test.y).double().mean()
print(f"node {node} trained on digits {sorted(set(y.tolist()))} and reads {100 * right:.1f}% of all ten", flush=True)
