"""The training loop with `GossipOptimizer` that version 2 saved half-way; it runs in each of two processes."""

import copy

import loops
import torch

import quasiglobal as qg

CASES = {
    "groups": ("qg-dsgdm-n", None, {"weight_decay": 0.01}),
    "overlap": ("dadam", None, {"overlap": True}),
    "edges": ("relaysgd", loops.sgdm, {}),
    "outer-momentum": ("slowmo:base=dsgd,tau=7", loops.adamw, {}),
}
"""An algorithm, the base optimizer and further options of each case."""

HALF, WHOLE = 10, 20


def trained(rank, store, case, file=None):
    """Train from the beginning, or from the state that a file holds after half of the steps.

    Return what was saved then, and the parameters at the end.
    """
    algorithm, base, options = CASES[case]
    net = loops.model()
    params = list(net.parameters())
    if base is None:
        given, options = [{"params": params[:2], "lr": 0.02}, {"params": params[2:]}], options | {"lr": 0.05}
    else:
        given, options = params, options | {"base": base(params)}
    optimizer = qg.optim.GossipOptimizer(
        given, algorithm, "complete:2", meeting=(store, rank, 2), timeout=30.0, **options
    )
    data = loops.batches(rank, WHOLE)

    def go(batches):
        for batch in batches:
            optimizer.zero_grad()
            loops.loss_of(net, batch).backward()
            optimizer.step()

    if file:
        saved = torch.load(file, weights_only=True)
        torch.nn.utils.vector_to_parameters(saved["parameters"][rank], params)
        optimizer.load_state_dict(saved["optimizer"][rank])
    else:
        go(data[:HALF])
        saved = copy.deepcopy({"parameters": loops.row(net), "optimizer": optimizer.state_dict()})
    go(data[HALF:])
    return saved, loops.row(net)
