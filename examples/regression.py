"""Predict the progress of a disease, a number, from ten measurements, at six clinics with patients of different age."""

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import nn

import quasiglobal as qg

measured, progress = load_diabetes(return_X_y=True)         # 442 patients; column 0 is the age
x = torch.tensor(20 * measured, dtype=torch.float32)
y = torch.tensor(progress[:, None] / 100, dtype=torch.float32)                            # [442, 1], like the output
by_age = np.argsort(measured[:, 0], kind="stable")          # the same on every processor; many have the same age
clinics = [(x[part], y[part]) for part in np.array_split(by_age, 6)]                      # the youngest … the oldest


def within_half(output, target):
    """Share of patients with a prediction error below 0.5: your own metric."""
    return ((output - target).abs() < 0.5).float().flatten()


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
task = qg.Task(net, nn.HuberLoss(), clinics, metrics={"mae": qg.metrics.mae, "within_half": within_half})
run = qg.train(task, algorithm="qg-dsgdm-n", topology="ring:6", epochs=40, lr=0.01, batch=16, schedule="cosine")

last = run.records[-1]
print(f"mean absolute error {last['mae']:.2f}, of the worst clinic's model {last['mae_worst']:.2f}")
print(f"always the mean: {(y - y.mean()).abs().mean().item():.2f}")
print(f"off by less than 0.5: {100 * last['within_half']:.0f} % of the test patients")
patient, model = x[:1], run.average()
print(f"patient 0: predicted {model(patient).item():.2f}, true {y[0].item():.2f}")
