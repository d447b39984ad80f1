"""Write an algorithm, check it, and compare it with the built-in ones."""

from dataclasses import dataclass

import torch
from torch import nn

import quasiglobal as qg


@dataclass(frozen=True, kw_only=True)
class GossipLion(qg.Algorithm):
    """Lion (Chen et al. 2023) at every node, followed by the average with the neighbours.

        x_i ← Σ_j w_ij (x_j − η sign(β m_j + (1 − β) g_j))
        m_i ← γ m_i + (1 − γ) g_i

    Differs from `dsgdm` in its direction: every parameter moves by exactly η.
    """

    beta: float = 0.9
    gamma: float = 0.99

    def init(self, x):                                      # x is [nodes, parameters]
        return {"m": torch.zeros_like(x)}

    def step(self, x, g, state, node):
        direction = (self.beta * state["m"] + (1 - self.beta) * g).sign()
        return node.mix(x - node.lr * direction), {"m": self.gamma * state["m"] + (1 - self.gamma) * g}


print("passed:", ", ".join(qg.check_algorithm(GossipLion())))

for algorithm, lr in ((GossipLion(), 0.002), ("dsgdm-n", 0.05), ("qg-dsgdm-n", 0.05)):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    task = qg.Task(net, nn.functional.cross_entropy, qg.data.load("digits"))
    last = qg.train(task, algorithm, "ring:8", epochs=20, lr=lr, alpha=0.1).records[-1]
    name = algorithm if isinstance(algorithm, str) else type(algorithm).__name__
    print(f"{name:<10} lr {lr:<5}  accuracy {last['accuracy']:.2f}, of the worst node {last['accuracy_worst']:.2f}")
