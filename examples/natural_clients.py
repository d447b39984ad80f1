"""Eight post offices learn to read digits. Each has its own scanner and its own letters, which stay there."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import quasiglobal as qg

pixels, digits = load_digits(return_X_y=True)
x, y = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(digits)


def scanned(office):
    """The letters of one office: its scanner has its own contrast and brightness, and every second one inverts."""
    letters = torch.arange(len(y)) % 36
    mine = (letters >= office * (office + 1) // 2) & (letters < (office + 1) * (office + 2) // 2)     # 50 to 400 digits
    images = x[mine] * (0.4 + 0.1 * office) + 0.05 * office
    return (1 - images if office % 2 else images), y[mine]


offices = [scanned(office) for office in range(8)]          # a list: one data set per node; a fifth of each is the test
print("digits per office:", [len(labels) for _, labels in offices])

for name, topology in (("alone", "every:1000/ring:8"), ("together", "ring:8")):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    task = qg.Task(net, nn.functional.cross_entropy, offices)
    last = qg.train(task, algorithm="qg-dsgdm-n", topology=topology, epochs=60, lr=0.1).records[-1]
    own = ", ".join(f"{share:.2f}" for share in last["accuracy_own_nodes"])
    print(f"{name:<8}  on all offices' digits {last['accuracy']:.2f}, on its own {last['accuracy_own']:.2f}: {own}")
