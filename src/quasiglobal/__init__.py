"""Decentralized deep learning on heterogeneous data: quasi-global momentum and all it is compared with.

>>> import quasiglobal as qg
>>> qg.algorithm("qg-dsgdm-n").citation
'Lin et al. 2021'
>>> qg.topology.ring(16)
<Topology ring:16: n = 16, period 1>
"""

from quasiglobal import optim, topology
from quasiglobal.algorithms import ALGORITHMS, Algorithm, Node, State, algorithm
from quasiglobal.checks import CheckFailed, check_algorithm
from quasiglobal.errors import InputError
from quasiglobal.minimize import Diverged, Result, minimize
from quasiglobal.runs.local import train_task as train
from quasiglobal.topology import Topology
from quasiglobal.training.program import Task

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "CheckFailed",
    "Diverged",
    "InputError",
    "Node",
    "Result",
    "State",
    "Task",
    "Topology",
    "algorithm",
    "check_algorithm",
    "minimize",
    "optim",
    "topology",
    "train",
]

__version__ = "0.1.0"
