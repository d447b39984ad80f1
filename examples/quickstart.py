import torch

import quasiglobal as qg

n, d = 16, 10
data = torch.Generator().manual_seed(0)
A = torch.randn(n, 40, d, generator=data)                # every node has its own data,
b = A @ torch.randn(n, d, 1, generator=data)             # and they disagree about the best model


def gradient(x, t):                                      # row i: node i's gradient at its own model
    return (A.mT @ (A @ x[..., None] - b))[..., 0] / 40


best = torch.linalg.lstsq(A.flatten(0, 1), b.flatten(0, 1)).solution[:, 0]
for name in ("dsgd", "dsgdm-n", "qg-dsgdm-n", "dsgd-gt"):
    result = qg.minimize(gradient, torch.zeros(d), algorithm=name, topology="ring:16", lr=0.05, steps=500)
    print(f"{name:<11} ends {(result.x - best).norm(dim=1).mean():.3f} from the optimum")
