import torch
from sklearn.datasets import load_breast_cancer

import quasiglobal as qg

torch.manual_seed(0)
data = qg.data.from_arrays(*load_breast_cancer(return_X_y=True), normalise=True)        # your data
net = torch.nn.Sequential(torch.nn.Linear(30, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))       # your model
task = qg.Task(net, torch.nn.functional.cross_entropy, data)                            # and your loss
run = qg.train(task, algorithm="qg-dsgdm-n", topology="ring:8", epochs=20, lr=0.1, alpha=0.1)
last = run.records[-1]
print(f"accuracy {last['accuracy']:.2f}, of the worst of 8 nodes {last['accuracy_worst']:.2f}")
torch.save(run.average().state_dict(), "model.pt")                                      # or run.model(3), of node 3
