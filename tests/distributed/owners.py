"""Four data owners, each with its own file of digits, and the command that starts their nodes."""

import os
import subprocess
import sys

import numpy as np
from commands import PATIENCE
from sklearn.datasets import load_digits

EXPERIMENT = """
model = "mlp"
topology = "ring:4"
precision = "fp64"
epochs = {epochs}
steps = 5
eval_every = 50
lr = 0.05
classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
shape = [1, 8, 8]
mean = [0.3]
std = [0.4]
"""


def write_data(folder):
    """Write one file per owner, of different sizes and with different digits missing, and one file with all data."""
    x, y = load_digits(return_X_y=True)
    x = (x.reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    test, train = slice(0, 200), slice(200, None)
    owner = np.array([min(digit // 2, 3) for digit in y[train]])
    order = np.argsort(owner, kind="stable")
    pooled = {"x": x[train][order], "y": y[train][order], "owner": owner[order]}
    for k in range(4):
        mine = pooled["owner"] == k
        seen = np.isin(y[test], np.unique(pooled["y"][mine]))
        tests = {"x_test": x[test][seen], "y_test": y[test][seen]}
        np.savez(folder / f"{k}.npz", x=pooled["x"][mine], y=pooled["y"][mine], **tests)
    np.savez(folder / "all.npz", **pooled, x_test=x[test], y_test=y[test], owner_test=np.zeros(200))


class Owners:
    """Nodes that are started one by one in a folder; `close` kills those still running."""

    def __init__(self, folder, epochs):
        self.folder, self.started = folder, []
        write_data(folder)
        (folder / "experiment.toml").write_text(EXPERIMENT.format(epochs=epochs))

    data = "{number}.npz"

    def start(self, number, rendezvous, *words, before=(), **options):
        """Start `qg node` at a rendezvous."""
        return self.launch(number, "--node", str(number), "--rendezvous", rendezvous, *words, before=before, **options)

    def join(self, number, site, *words, before=(), **options):
        """Start `qg node` in a federation."""
        return self.launch(number, "--site", str(site.path), *words, before=before, **options)

    def launch(self, number, *words, before=(), program=("-m", "quasiglobal")):
        """Start `qg node`; its output goes to files, since a pipe would fill up."""
        command = [*before, sys.executable, *program, "node", "experiment.toml"]
        command += ["--data", self.data.format(number=number), "--runs", f"runs{number}", *words]
        with open(self.log(number), "a") as said, open(self.printed(number), "a") as printed:
            one_core = os.environ | {"OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, cwd=self.folder, env=one_core, stdout=printed, stderr=said)
        self.started.append(process)
        return process

    def log(self, number):
        return self.folder / f"{number}.log"

    def printed(self, number):
        return self.folder / f"{number}.out"

    def said(self, process, number, status=0):
        """Wait for a node to exit; return its stderr."""
        assert process.wait(timeout=PATIENCE) == status, self.log(number).read_text()
        return self.log(number).read_text()

    def close(self):
        for process in self.started:
            process.kill()
            process.wait()
