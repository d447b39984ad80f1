"""Training loops that the optimizer tests run in processes."""

import math

import torch
from torch import nn

import quasiglobal as qg
from quasiglobal.stacked import step_blocks


def model(seed=0, width=6):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2)).double()


def batches(rank, steps=30):
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(steps, 8, 4, dtype=torch.float64, generator=generator) + rank


def loss_of(net, batch):
    return (net(batch) - batch[:, :2].sin()).square().mean()


def optimizer_for(net, rank, store, size, algorithm="qg-dsgdm-n", groups=False, **options):
    params = list(net.parameters())
    chosen = [{"params": params[:2], "lr": 0.02, "weight_decay": 0.1}, {"params": params[2:]}] if groups else params
    return qg.optim.GossipOptimizer(
        chosen, algorithm, f"complete:{size}" if size < 3 else f"ring:{size}", lr=0.05, weight_decay=0.01,
        meeting=(store, rank, size), **{"timeout": 30.0} | options,
    )


def adamw(params, lr=0.05):
    """Groups in another order than the parameters, one with an lr of its own."""
    groups = [{"params": params[2:], "lr": lr / 2}, {"params": params[:2]}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.8, 0.9), weight_decay=0.1)


def sgdm(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)


def lbfgs(params):
    return torch.optim.LBFGS(params, lr=0.01, max_iter=2, history_size=2)


def optimizer_with(base, params, rank, store, topology, algorithm="dsgd"):
    size = qg.topology.parse(topology).n
    return qg.optim.GossipOptimizer(
        params, algorithm, topology, base=base, meeting=(store, rank, size), timeout=30.0
    )


def row(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def train(rank, store, size, algorithm, groups, overlap=False, block=None):
    step_blocks.BLOCK = block or step_blocks.BLOCK
    net = model(seed=rank)                                  # the optimizer starts all nodes from node 0's model
    optimizer = optimizer_for(net, rank, store, size, algorithm, groups, overlap=overlap)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[20])
    for batch in batches(rank):
        optimizer.zero_grad(set_to_none=True)
        loss_of(net, batch).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return row(net)


def train_with_base(rank, store, make, topology, algorithm, scheduled):
    """Train 20 steps with a base optimizer; the schedule is of the base or of the GossipOptimizer."""
    net = model(seed=rank)
    params = list(net.parameters())
    base = make(params)
    optimizer = optimizer_with(base, params, rank, store, topology, algorithm)
    schedule = torch.optim.lr_scheduler.MultiStepLR({"base": base, "gossip": optimizer}[scheduled], milestones=[10])
    for batch in batches(rank, 20):
        def closure(batch=batch):
            optimizer.zero_grad()
            loss = loss_of(net, batch)
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0
        schedule.step()
    return row(net)


def scaled_with_base(rank, store, size):
    """Train with momentum and a gradient scaler, unscaled by the user at odd steps; step 2 overflows on node 0."""
    net = model()
    params = list(net.parameters())
    optimizer = optimizer_with(sgdm(params), params, rank, store, f"ring:{size}")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, batch in enumerate(batches(rank, 6)):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, batch) * (math.inf if step == 2 and rank == 0 else 1.0)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return row(net)


def interrupted(rank, store, size, make=None):
    """Save after ten steps, resume in a new optimizer."""
    from torch.distributed import PrefixStore

    def go(net, optimizer, steps):
        for batch in steps:
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()

    def new(net, store):
        params = list(net.parameters())
        if make is None:
            return optimizer_for(net, rank, store, size)
        return optimizer_with(make(params), params, rank, store, f"complete:{size}", "slowmo:base=dsgd,tau=7")

    data = batches(rank, 20)
    net = model()
    optimizer = new(net, PrefixStore("first", store))
    go(net, optimizer, data[:10])
    saved, weights = optimizer.state_dict(), {k: v.clone() for k, v in net.state_dict().items()}
    go(net, optimizer, data[10:])
    again = model()
    resumed = new(again, PrefixStore("second", store))
    again.load_state_dict(weights)
    resumed.load_state_dict(saved)
    go(again, resumed, data[10:])
    return row(net), row(again)


def scaled(rank, store, size):
    """Train with a gradient scaler whose third step overflows on node 0."""
    net = model()
    net[0].weight.requires_grad_(False)
    frozen = net[0].weight.clone()
    optimizer = optimizer_for(net, rank, store, size)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    states = []
    for step, batch in enumerate(batches(rank, 6)):
        optimizer.zero_grad()
        loss = loss_of(net, batch) * (math.inf if step == 2 and rank == 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        states.append(optimizer.state_dict()["gossip"]["state"]["m_hat"].clone())
    kept = states[2].equal(states[1])
    return kept, net[0].weight.equal(frozen), bool(row(net).isfinite().all()), optimizer.steps


def different(rank, store, size):
    try:
        optimizer_for(model(width=6 + rank), rank, store, size)
    except qg.InputError as error:
        return str(error)


def uneven(rank, store, size):
    """Train with fewer batches on node 0 than on the others."""
    net = model()
    optimizer = optimizer_for(net, rank, store, size, timeout=1.0)
    for batch in batches(rank, 3 if rank == 0 else 6):
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()
    if rank == 0:
        import time
        time.sleep(3)
    return dict(optimizer.engine.lost), bool(row(net).isfinite().all())


def averaged(rank, store, size, overlap=False):
    net = model()
    optimizer = optimizer_for(net, rank, store, size, algorithm="dsgd", overlap=overlap)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(rank)
    optimizer.average(rounds=60)
    gossiped = row(net)
    optimizer.average()
    return gossiped, row(net), row(model()) + (size - 1) / 2


def averaged_between_steps(rank, store, size):
    """Average the models after two steps, and make a third with gradient 0: all models stay at the mean."""
    net = model()
    optimizer = optimizer_for(net, rank, store, size, algorithm="dsgd", overlap=True)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    for batch in batches(rank, 2):
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()
    optimizer.average()
    first = row(net)
    optimizer.zero_grad()
    optimizer.step()
    return first, row(net)


def in_other_memory(rank, store, size):
    """Train twice, the second time with weights whose memory is transposed, in blocks of 9 parameters."""
    from torch.distributed import PrefixStore

    step_blocks.BLOCK = 9
    rows = []
    for name in ("plain", "transposed"):
        net = model()
        if name == "transposed":
            for layer in (net[0], net[2]):
                layer.weight.data = layer.weight.data.T.contiguous().T
        optimizer = optimizer_for(net, rank, PrefixStore(name, store), size)
        for batch in batches(rank, 5):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()
        rows.append(row(net))
    return rows


def with_own_weights(rank, store, size):
    """Return the error of a node whose topology has the same name as the others', but another W."""
    W = [[[0.5, 0.5], [0.5, 0.5]], [[0.9, 0.1], [0.1, 0.9]]][rank]
    try:
        qg.optim.GossipOptimizer(
            model().parameters(), "dsgd", qg.topology.from_matrices([W]), meeting=(store, rank, size), timeout=10.0
        )
    except qg.InputError as error:
        return str(error)
    return "they met"


def rates_of_groups(rank, store, size):
    """Return whether the row of learning rates is kept while unchanged, whether it is replaced, and its last values."""
    one, other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1))
    seen = []

    class Watching(qg.Algorithm):
        def step(self, x, g, state, node):
            seen.append(node.lr)
            return x, state

    optimizer = qg.optim.GossipOptimizer(
        [{"params": [one], "lr": 1.0}, {"params": [other], "lr": 0.5}], Watching(), "complete:1",
        meeting=(store, rank, size),
    )
    for factor in (1.0, 1.0, 0.5):
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = factor, 0.5 * factor
        optimizer.step()
    first, second, third = seen
    return first is second, third is not second, third[0].tolist()


def other_bases(rank, store, size):
    """Return the errors of nodes whose bases differ in class, in lr, or in being there."""
    from torch.distributed import PrefixStore

    said = []
    for k, makers in enumerate([(adamw, sgdm), (adamw, lambda params: adamw(params, lr=0.01)), (adamw, None)]):
        params, make = list(model().parameters()), makers[rank]
        try:
            optimizer_with(make and make(params), params, rank, PrefixStore(str(k), store), f"complete:{size}")
        except qg.InputError as error:
            said.append(str(error))
    return said


def with_later_changes(rank, store, size):
    """Return whether the groups are shared after loads, and the errors of foreign states and of later parameters."""
    net = model()
    net[0].weight.requires_grad_(False)
    params = list(net.parameters())
    base = adamw(params)
    optimizer = optimizer_with(base, params, rank, store, "complete:1")
    shared, said = [], []

    def refused(function, *arguments):
        try:
            function(*arguments)
        except qg.InputError as error:
            said.append(str(error))

    for loads in (lambda: None, lambda: optimizer.load_state_dict(optimizer.state_dict()),
                  lambda: base.load_state_dict(base.state_dict())):
        loads()
        shared.append(optimizer.param_groups is base.param_groups and optimizer.state is base.state)
    refused(optimizer.load_state_dict, base.state_dict())
    refused(optimizer.load_state_dict, optimizer.state_dict() | {"gossip": {"steps": 1, "state": {}, "base": "SGD"}})
    net[0].weight.requires_grad_(True)
    refused(optimizer.step)
    net[0].weight.requires_grad_(False)
    base.add_param_group({"params": [nn.Parameter(torch.zeros(1).double())]})
    refused(optimizer.step)
    return shared, said
