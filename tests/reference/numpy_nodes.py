"""Every algorithm from the view of one node: a second implementation to check the library against.

Written in NumPy from the pseudocode of *Quasi-Global Momentum: Accelerating Decentralized Deep Learning on
Heterogeneous Data* (Lin et al. 2021), sharing nothing with the library. A `Worker` is the paper's
`procedure worker-i`. It holds only its own vectors. To communicate, it yields a `Mix`, a `Mean`, a `Push` or an
`Exchange` and receives the result. Line numbers are the paper's; `released` follows the authors' code where it differs.
"""

from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import numpy as np

Vector = np.ndarray
EPS = 1e-8


@dataclass
class Mix:
    """Request of node i for the sum over j of w_ij v_j, the weighted sum of its neighbours' values."""

    value: Vector


@dataclass
class Mean:
    """Request for the exact mean over all nodes, or over the nodes in `among`."""

    value: Vector
    among: list[int] | None = None


@dataclass
class Push:
    """Request of node i for the sum over j of p_ij v_j, where each node j divides v_j into shares that sum to 1."""

    value: Vector


@dataclass
class Exchange:
    """A message for each neighbour, by its number; the answer has the messages that came, by the sender's number.

    The links are those of step `at`, by default of the current step.
    """

    messages: dict[int, Vector]
    at: int | None = None


Message = Mix | Mean | Push | Exchange
Step = Generator[Message, Vector | dict[int, Vector], Vector]
"""Generator that yields messages, receives the answers and returns the node's next x."""


def reference(
    text: str,
    gradient: Callable[[int, Vector, int], Vector],
    x0: np.ndarray,
    weights: Callable[[int], np.ndarray],
    lr: Callable[[int], float],
    steps: int,
    weight_decay: float = 0.0,
    full_gradient: Callable[[int, Vector], Vector] | None = None,
    seed: int = 0,
    period: int = 1,
    lost: Callable[[int, int, int], bool] = lambda t, i, j: False,
    wire: str = "full",
) -> np.ndarray:
    """The trajectory [steps + 1, n, d] of the algorithm `text`, such as "qg-dsgdm-n:mu=0.5,tau=2".

    gradient(i, x_i, t) is node i's gradient at step t = 1, 2, …; full_gradient(i, x_i) is over all its data.
    W repeats after `period` steps; lost(t, i, j) says whether the message j → i of step t is lost.
    """
    n = len(x0)
    trees = [weights(t) != 0 for t in range(1, period + 1)]

    def full_gradient_of(i: int) -> Callable[[Vector], Vector]:
        return lambda x: full_gradient(i, x) + weight_decay * x

    def gradient_of(i: int) -> Callable[[Vector, int], Vector]:
        return lambda x, t: gradient(i, x, t) + weight_decay * x

    shared = {"weight_decay": weight_decay, "lambda_min": lambda_min(weights), "links": trees, "wire": wire}
    workers = [worker(text, Place(i, n, seed, gradient_of(i), full_gradient_of(i), **shared)) for i in range(n)]
    x = [np.array(row) for row in x0]
    history = [np.array(x)]
    for t in range(1, steps + 1):
        procedures = []
        for i in range(n):
            decay = 0.0 if workers[i].decoupled else weight_decay
            g = gradient(i, x[i], t) + decay * x[i]
            procedures.append(workers[i].step(x[i], g, t, lr(t)))
        x = together(procedures, weights, t, lost)
        history.append(np.array(x))
    return np.array(history)


def lambda_min(weights: Callable[[int], np.ndarray]) -> float | None:
    """The smallest eigenvalue of W; None unless W is fixed and symmetric."""
    W = weights(1)
    fixed = all((weights(t) == W).all() for t in range(2, 9))
    return float(np.linalg.eigvalsh(W)[0]) if fixed and np.allclose(W, W.T) else None


def together(procedures: list[Step], weights, t: int, lost) -> list[Vector]:
    """Run one step of all nodes, message by message."""
    answers = [None] * len(procedures)
    while True:
        sent, returned = [], []
        for procedure, answer in zip(procedures, answers, strict=True):
            try:
                sent.append(procedure.send(answer))
            except StopIteration as end:
                returned.append(end.value)
        if not sent:
            return returned
        assert not returned, "all nodes must send the same number of messages in a step"
        answers = [delivered(i, sent, weights, t, lost) for i in range(len(sent))]


def delivered(i: int, sent: list[Message], weights, t: int, lost) -> Vector | dict[int, Vector]:
    """The answer to node i's message, given the messages of all nodes."""
    own, W = sent[i], weights(t)
    if isinstance(own, Mean):
        among = range(len(sent)) if own.among is None else own.among
        return sum(sent[j].value for j in among) / len(among)
    if isinstance(own, Exchange):
        W = W if own.at is None else weights(own.at)
        return {j: sent[j].messages[i] for j in senders(W, i) if not lost(t, i, j)}
    if isinstance(own, Push):
        P = shares(W)
        return P[i, i] * own.value + sum(P[i, j] * sent[j].value for j in senders(W, i) if not lost(t, i, j))
    total = W[i, i] * own.value
    for j in senders(W, i):
        total = total + W[i, j] * (own.value if lost(t, i, j) else sent[j].value)
    return total


def senders(W: np.ndarray, i: int) -> list[int]:
    return [j for j in range(len(W)) if W[i, j] != 0 and j != i]


def shares(W: np.ndarray) -> np.ndarray:
    """W if its columns sum to 1; else each node divides what it has equally among itself and its receivers."""
    if all(abs(sum(W[:, j]) - 1) < 1e-9 for j in range(len(W))):
        return W
    P = np.zeros_like(W)
    for j in range(len(W)):
        to = [i for i in range(len(W)) if W[i, j] != 0 or i == j]
        P[to, j] = 1 / len(to)
    return P


def alone(procedure: Step) -> Vector:
    """Run a procedure without gossip: each request returns the node's own value."""
    answer = None
    while True:
        try:
            answer = procedure.send(answer).value
        except StopIteration as end:
            return end.value


@dataclass
class Place:
    """Node i of n, with its data."""

    i: int
    n: int
    seed: int
    gradient: Callable[[Vector, int], Vector]
    """The gradient of step t's batch at any point."""
    full_gradient: Callable[[Vector], Vector]
    weight_decay: float
    lambda_min: float | None
    links: list[np.ndarray]
    """For each step of a period: whether node i receives from node j."""
    wire: str = "full"

    def senders(self) -> list[int]:
        return senders(np.any(self.links, axis=0), self.i)

    def receivers(self) -> list[int]:
        return senders(np.any(self.links, axis=0).T, self.i)


@dataclass(kw_only=True)
class Worker:
    """A node's procedure. `memory` holds its buffers, all 0 at the start."""

    place: Place
    memory: dict[str, Vector] = field(default_factory=lambda: defaultdict(float))
    decoupled = False
    """Whether the worker applies the weight decay itself."""

    def step(self, x: Vector, g: Vector, t: int, lr: float) -> Step:
        raise NotImplementedError


# Decentralized SGD and Adam


@dataclass(kw_only=True)
class DSGD(Worker):
    def step(self, x, g, t, lr):
        return (yield Mix(x - lr * g))


@dataclass(kw_only=True)
class DSGDm(Worker):
    """Algorithm 1, green; with `sync`, the momentum or the gradient is synchronized as well."""

    beta: float = 0.9
    nesterov: bool = False
    sync: str = "none"
    over: str = "graph"

    def step(self, x, g, t, lr):
        memory, ask = self.memory, Mix if self.over == "graph" else Mean
        if self.sync == "gradient":
            g = yield ask(g)
        m = self.beta * memory["m"] + g  # line 4
        x_half = x - lr * (g + self.beta * m if self.nesterov else m)  # line 6
        x_next = yield Mix(x_half)  # line 7
        memory["m"] = (yield ask(m)) if self.sync == "momentum" else m
        return x_next


@dataclass(kw_only=True)
class DAdam(Worker):
    """Adam (Kingma and Ba 2015) at every node, then gossip."""

    beta1: float = 0.9
    beta2: float = 0.99

    def step(self, x, g, t, lr):
        memory, b1, b2 = self.memory, self.beta1, self.beta2
        memory["m"] = b1 * memory["m"] + (1 - b1) * g
        memory["v"] = b2 * memory["v"] + (1 - b2) * g * g
        m, v = memory["m"] / (1 - b1**t), memory["v"] / (1 - b2**t)
        return (yield Mix(x - lr * m / (np.sqrt(v) + EPS)))


# Quasi-global momentum


@dataclass(kw_only=True)
class QGDSGDm(Worker):
    """Algorithm 1, blue; with tau > 1, the appendix's multiple-step variant."""

    beta: float = 0.9
    mu: float | None = None
    nesterov: bool = False
    tau: int = 1
    released: bool = False

    def step(self, x, g, t, lr):
        memory, mu = self.memory, self.mu
        if mu is None:
            mu = 0.9 if self.released else self.beta
        m = self.beta * memory["m_hat"] + g  # line 5
        x_half = x - lr * (g + self.beta * m if self.nesterov else m)  # line 6
        x_next = yield Mix(x_half)  # line 7
        d = (x - x_next) / lr  # line 8
        if self.released:  # every step's difference counts
            memory["sum"] = memory["sum"] + d
            d = memory["sum"] / self.tau
        if due(t, self.tau, self.released):
            memory["m_hat"] = mu * memory["m_hat"] + (1 - mu) * d  # line 9
            memory["sum"] = 0.0
        return x_next


@dataclass(kw_only=True)
class QGDAdam(Worker):
    """The appendix's QG-DAdam, with ĝ read as g."""

    beta1: float = 0.9
    beta2: float = 0.99
    released: bool = False

    def step(self, x, g, t, lr):
        if self.released:
            return (yield from self.released_step(x, g, t, lr))
        memory, b1, b2 = self.memory, self.beta1, self.beta2
        m = b1 * memory["m_hat"] + (1 - b1) * g  # line 4
        v = b2 * memory["v_hat"] + (1 - b2) * g * g  # line 5
        x_next = yield Mix(x - lr * m / (np.sqrt(v) + EPS))  # lines 6 and 7
        d = x - x_next  # line 8
        d = d / max(norm(d), EPS)  # line 9
        memory["m_hat"] = b1 * memory["m_hat"] + (1 - b1) * d  # line 10
        memory["v_hat"] = b2 * memory["v_hat"] + (1 - b2) * d * d  # line 11
        return x_next

    def released_step(self, x, g, t, lr):
        """Only v is quasi-global, and both moments are bias-corrected."""
        memory, b1, b2 = self.memory, self.beta1, self.beta2
        memory["m"] = b1 * memory["m"] + (1 - b1) * g
        v = b2 * memory["v_hat"] + (1 - b2) * g * g
        direction = memory["m"] / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + EPS)
        x_next = yield Mix(x - lr * direction)
        d = x - x_next
        d = d / (norm(d) + EPS)
        memory["v_hat"] = b2 * memory["v_hat"] + (1 - b2) * d * d
        return x_next


# Without gradients: the section on average consensus


@dataclass(kw_only=True)
class Gossip(Worker):
    """X ← W X."""

    def step(self, x, g, t, lr):
        return (yield Mix(x))


@dataclass(kw_only=True)
class QGGossip(Worker):
    """The equation `update_without_stochastic_gradients`."""

    beta: float = 0.9
    mu: float | None = None

    def step(self, x, g, t, lr):
        memory, mu = self.memory, self.beta if self.mu is None else self.mu
        x_next = yield Mix(x - self.beta * memory["m"])
        memory["m"] = mu * memory["m"] + (1 - mu) * (x - x_next)
        return x_next


# Corrections for heterogeneous data: the footnotes on D² and D²₊, and gradient tracking


@dataclass(kw_only=True)
class D2(Worker):
    """W(x − η((x₋ − x)/η' + g − g₋)): D² has η' = η, D²₊ the η that made the difference."""

    plus: bool = False

    def step(self, x, g, t, lr):
        memory = self.memory
        if t == 1:
            direction = g
        else:
            lr_of_difference = memory["lr"] if self.plus else lr
            direction = (memory["x"] - x) / lr_of_difference + g - memory["g"]
        memory.update(x=x, g=g, lr=lr)
        return (yield Mix(x - lr * direction))


@dataclass(kw_only=True)
class GradientTracking(Worker):
    """x⁺ = W x − η u and y⁺ = W y + g(x⁺) − g(x) from y = g(x₀); u is y, or momentum on it."""

    beta: float = 0.0
    nesterov: bool = False

    def step(self, x, g, t, lr):
        memory = self.memory
        y = g if t == 1 else memory["Wy"] + g - memory["g"]
        memory["m"] = self.beta * memory["m"] + y
        u = y + self.beta * memory["m"] if self.nesterov else memory["m"]
        memory["g"] = g
        memory["Wy"] = yield Mix(y)
        return (yield Mix(x)) - lr * u


# Other momenta in the appendix


@dataclass(kw_only=True)
class DMSGD(Worker):
    """The original formulation of DMSGD (Balu et al. 2020), options I and II."""

    beta: float = 0.9
    mu: float = 0.5
    option: int = 1

    def step(self, x, g, t, lr):
        memory, mu = self.memory, self.mu
        v = yield Mix(x)  # line 3
        m_hat = 0.0 if t == 1 else mu * (x - memory["x"]) + (1 - mu) * (v - memory["v"])  # line 4
        memory.update(x=x, v=v)
        start = v if self.option == 1 else x
        return start - lr * g + self.beta * m_hat  # line 6 or 7


@dataclass(kw_only=True)
class SlowMo(Worker):
    """SlowMo (Wang et al. 2020) around a base optimizer; γ is the learning rate of the outer step."""

    base: str = "dsgdm-n"
    beta: float = 0.7
    alpha: float = 1.0
    tau: int = 12
    average: bool = True
    buffers: str = "maintain"
    released: bool = False

    def __post_init__(self):
        self.inner = worker(self.base, self.place)

    def step(self, x, g, t, lr):
        memory, inner = self.memory, self.inner.memory
        if t == 1:
            memory["x_0"] = x
        x = yield from self.inner.step(x, g, t, lr)  # line 5
        if not due(t, self.tau, self.released):
            return x
        if self.average:
            x = yield Mean(x)  # line 6
        memory["m"] = self.beta * memory["m"] + (memory["x_0"] - x) / lr  # line 7
        memory["x_0"] = memory["x_0"] - self.alpha * lr * memory["m"]  # line 8
        if self.buffers == "average":
            for name in inner:
                inner[name] = yield Mean(inner[name])  # line 3, of the next iteration
        return memory["x_0"]


@dataclass(kw_only=True)
class MimeLite(Worker):
    """MimeLite (Karimireddy et al. 2020) with SGDm as its base, in rounds of tau local steps."""

    beta: float = 0.9
    tau: int = 1
    participation: float = 1.0

    def step(self, y, g, t, lr):
        memory, beta, place = self.memory, self.beta, self.place
        finished_rounds, k = divmod(t - 1, self.tau)
        clients = sample(place.n, self.participation, place.seed, finished_rounds)  # line 3
        if k == 0:
            memory["x"] = y  # line 6
        if place.i in clients:
            y = y - lr * ((1 - beta) * g + beta * memory["s"])  # line 10
        if k < self.tau - 1:
            return y
        full = place.full_gradient(memory["x"])  # line 11
        memory["s"] = (1 - beta) * (yield Mean(full, clients)) + beta * memory["s"]  # line 13
        return (yield Mean(y, clients))  # line 14


# Messages per edge, and pushes


@dataclass(kw_only=True)
class WithLocalStep(Worker):
    """A local optimizer inside: SGD, with momentum if β > 0, or Adam."""

    base: str = "dsgdm"
    beta: float = 0.0
    nesterov: bool = False

    def __post_init__(self):
        self.inner = worker(self.base, self.place)
        if self.base == "dsgdm":
            self.inner.beta, self.inner.nesterov = self.beta, self.nesterov


@dataclass(kw_only=True)
class RelaySGD(WithLocalStep):
    """RelaySum/Model (Vogels et al. 2021), as printed; coordinates p, p + P, … travel on tree p of P."""

    fill: str = "own"

    def step(self, x, g, t, lr):
        memory, n = self.memory, self.place.n
        if t == 1:
            memory["x_ref"] = x
        x = np.array(alone(self.inner.step(x, g, t, lr)))
        for p, tree in enumerate(self.place.links):
            part = slice(p, None, len(self.place.links))
            old = memory[f"inbox {p}"] or {}
            messages = {}
            for j in senders(tree, self.place.i):
                others = [old[k] for k in old if k != j]
                m = x[part] + sum(m for m, _ in others)
                messages[j] = (m, 1 + sum(c for _, c in others))
            inbox = memory[f"inbox {p}"] = yield Exchange(messages, at=p + 1)
            s, c = sum(m for m, _ in inbox.values()), sum(c for _, c in inbox.values())
            if self.fill == "own":
                x[part] = ((n - c) * x[part] + s) / n
            else:
                x[part] = (x[part] + s + (n - 1 - c) * memory["x_ref"][part]) / n
        return x


@dataclass(kw_only=True)
class LTADMM(Worker):
    """LT-ADMM (Ren et al. 2025); `beta` replaces the gradient by its moving average."""

    tau: int = 5
    rho: float = 1.0
    alpha: float = 0.5
    beta_a: float = 0.01
    gamma: float | None = None
    beta: float = 0.0
    couple: bool = False

    def step(self, x, g, t, lr):
        memory, neighbours = self.memory, self.place.senders()
        gamma = lr if self.gamma is None else self.gamma
        if t == 1:
            memory["z"] = dict.fromkeys(neighbours, x)
        z = memory["z"]
        if (t - 1) % self.tau == 0:
            memory["r"] = self.rho * len(neighbours) * x - sum(z.values())
        memory["m"] = self.beta * memory["m"] + (1 - self.beta) * g
        x = x - gamma * memory["m"] - self.beta_a * (gamma if self.couple else 1) * memory["r"]
        if t % self.tau == 0:
            inbox = yield Exchange({j: z[j] - 2 * self.rho * x for j in neighbours})
            came = {j: (1 - self.alpha) * z[j] - self.alpha * q for j, q in inbox.items()}
            memory["z"] = z | came
        return x


@dataclass(kw_only=True)
class SGP(WithLocalStep):
    """Stochastic gradient push (Assran et al. 2019): the model is x̃/w."""

    def step(self, x, g, t, lr):
        memory = self.memory
        if t == 1:
            memory.update(x=x, w=1.0)
        memory["x"] = yield Push(alone(self.inner.step(memory["x"], g, t, lr)))
        memory["w"] = yield Push(memory["w"])
        return memory["x"] / memory["w"]


@dataclass(kw_only=True)
class QGSGP(Worker):
    """Quasi-global momentum (Lin et al. 2021, Algorithm 1) with a push in line 7, and the models x̃/w in line 8."""

    beta: float = 0.9
    mu: float | None = None
    nesterov: bool = False

    def step(self, x, g, t, lr):
        memory, mu = self.memory, self.beta if self.mu is None else self.mu
        if t == 1:
            memory.update(x=x, w=1.0)
        m = self.beta * memory["m_hat"] + g
        memory["x"] = yield Push(memory["x"] - lr * (g + self.beta * m if self.nesterov else m))
        memory["w"] = yield Push(memory["w"])
        new = memory["x"] / memory["w"]
        memory["m_hat"] = mu * memory["m_hat"] + (1 - mu) * (x - new) / lr
        return new


@dataclass(kw_only=True)
class PushDIGing(Worker):
    """Push-DIGing (Nedić et al. 2017); `sums` sends running sums (Hadjicostis et al. 2016)."""

    beta: float = 0.0
    sums: bool = False

    def step(self, x, g, t, lr):
        memory = self.memory
        if t == 1:
            memory.update(x=x, w=1.0)
        v = self.beta * memory["v"] + (1 - self.beta) * g
        y = memory["y"] + v - memory["v"]
        memory["v"] = v
        offered = [memory["x"] - lr * y, y, memory["w"]]
        if self.sums:
            new = yield from self.by_sums(offered)
        else:
            new = []
            for value in offered:
                new.append((yield Push(value)))
        memory["x"], memory["y"], memory["w"] = new
        return memory["x"] / memory["w"]

    def by_sums(self, offered):
        memory, receivers = self.memory, self.place.receivers()
        a = 1 / (1 + len(receivers))
        sigma = memory["sigma"] = [s + a * v for s, v in zip(memory["sigma"] or [0.0] * 3, offered, strict=True)]
        last = memory["rho"] = memory["rho"] or {}
        inbox = yield Exchange(dict.fromkeys(receivers, sigma))
        new = [a * v for v in offered]
        for j, heard in inbox.items():
            new = [v + h - r for v, h, r in zip(new, heard, last.get(j, [0.0] * 3), strict=True)]
            last[j] = heard
        return new


@dataclass(kw_only=True)
class AB(Worker):
    """AB, or Push-Pull (Xin and Khan 2018): rows of W for models, columns of P for trackers."""

    beta: float = 0.0

    def step(self, x, g, t, lr):
        memory = self.memory
        v = self.beta * memory["v"] + (1 - self.beta) * g
        y = memory["y"] + v - memory["v"]
        memory["v"] = v
        x = yield Mix(x - lr * y)
        memory["y"] = yield Push(y)
        return x


@dataclass(kw_only=True)
class Choco(WithLocalStep):
    """CHOCO-SGD (Koloskova et al. 2019), with the run's compression."""

    gamma: float = 0.1

    def step(self, x, g, t, lr):
        memory = self.memory
        x = alone(self.inner.step(x, g, t, lr))
        q = compressed(self.place.wire, x - memory["x_hat"], self.place, t)
        memory["x_hat"] = memory["x_hat"] + q
        memory["mixed"] = memory["mixed"] + (yield Mix(q))
        return x + self.strength(memory["mixed"] - memory["x_hat"], t) * (memory["mixed"] - memory["x_hat"])

    def strength(self, r, t):
        return self.gamma


@dataclass(kw_only=True)
class AdaGossip(Choco):
    """AdaGossip (Aketi et al. 2024): γ over the root of the mean square of r, with Adam's correction, at most 1."""

    gamma: float = 0.01
    rho: float = 0.999

    def strength(self, r, t):
        self.memory["v"] = self.rho * self.memory["v"] + (1 - self.rho) * r**2
        return np.minimum(1, self.gamma / (np.sqrt(self.memory["v"] / (1 - self.rho**t)) + EPS))


@dataclass(kw_only=True)
class BEER(Worker):
    """BEER (Zhao et al. 2022), Algorithm 1, in the order V, G, X, H; with λ < 1 MoTEF (Islamov et al. 2025).

    W G and W H are what came from the neighbours so far, as in `Choco`.
    """

    gamma: float = 0.1
    lam: float = 1.0

    def step(self, x, g, t, lr):
        memory, gamma = self.memory, self.gamma
        m = (1 - self.lam) * memory["M"] + self.lam * g
        memory["V"] = memory["V"] + gamma * (memory["WG"] - memory["G"]) + m - memory["M"]
        memory["M"] = m
        yield from self.add("G", memory["V"], t, draw=0)
        x = x + gamma * (memory["WH"] - memory["H"]) - lr * memory["V"]
        yield from self.add("H", x, t, draw=1)
        return x

    def add(self, name, value, t, draw):
        """Send what a hat lacks of a value, compressed, and add it to the hat."""
        q = compressed(self.place.wire, value - self.memory[name], self.place, t, draw)
        self.memory[name] = self.memory[name] + q
        self.memory[f"W{name}"] = self.memory[f"W{name}"] + (yield Mix(q))


def compressed(wire: str, v: Vector, place: Place, t: int, draw: int = 0) -> Vector:
    """Q(v): the largest numbers, random numbers, signs, or levels of the norm."""
    name, _, number = wire.partition(":")
    d, q = len(v), np.zeros_like(v)
    bits = [splitmix64(chain(place.seed, 4, draw, t, place.i) + c) for c in range(d)]
    if name == "full":
        return v
    if name in ("topk", "randk"):
        signed = [b - 2**64 if b >= 2**63 else b for b in bits]
        order = np.argsort(-np.abs(v)) if name == "topk" else np.argsort(signed)
        kept = order[: max(1, int(np.ceil(float(number) * d)))]
        q[kept] = v[kept]
        return q
    if name == "sign":
        return np.where(v >= 0, 1, -1) * np.abs(v).sum() / d
    levels, length = int(number), norm(v)
    for c in range(d):
        level = np.floor(levels * abs(v[c]) / length + (bits[c] >> 11) / 2**53)
        q[c] = np.sign(v[c]) * min(level, levels) * length / levels
    return q / (1 + min(d / levels**2, np.sqrt(d) / levels))


def chain(*numbers: int) -> int:
    """Hash a chain of numbers; the next number may be added to it."""
    key = 0
    for number in numbers:
        key = splitmix64((key + number) % 2**64)
    return key


# One worker: everything on the exact mean gradient


@dataclass(kw_only=True)
class Centralized(Worker):
    """A base optimizer on the mean gradient, without gossip."""

    base: str

    def __post_init__(self):
        self.inner = worker(self.base, self.place)

    def step(self, x, g, t, lr):
        g = yield Mean(g)
        return alone(self.inner.step(x, g, t, lr))


@dataclass(kw_only=True)
class QHM(Worker):
    """The section on the single worker case; its β̂ is `beta`, 0.99 = μ + (1 − μ)β at μ = β = 0.9."""

    beta: float = 0.99
    mu: float = 0.9

    def step(self, x, g, t, lr):
        g = yield Mean(g)
        m = self.memory["m"] = self.beta * self.memory["m"] + g
        share = self.mu / self.beta
        return x - lr * ((1 - share) * m + share * g)


NAMES = {
    "sgd": (Centralized, {"base": "dsgd"}),
    "sgdm": (Centralized, {"base": "dsgdm"}),
    "sgdm-n": (Centralized, {"base": "dsgdm-n"}),
    "adam": (Centralized, {"base": "dadam"}),
    "dsgd": (DSGD, {}),
    "dsgdm": (DSGDm, {}),
    "dsgdm-n": (DSGDm, {"nesterov": True}),
    "dadam": (DAdam, {}),
    "qg-dsgdm": (QGDSGDm, {}),
    "qg-dsgdm-n": (QGDSGDm, {"nesterov": True}),
    "qg-dadam": (QGDAdam, {}),
    "d2": (D2, {}),
    "d2+": (D2, {"plus": True}),
    "dsgd-gt": (GradientTracking, {}),
    "dsgdm-gt": (GradientTracking, {"beta": 0.9}),
    "dsgdm-n-gt": (GradientTracking, {"beta": 0.9, "nesterov": True}),
    "slowmo": (SlowMo, {}),
    "dmsgd": (DMSGD, {"option": 1}),
    "dmsgd-2": (DMSGD, {"option": 2}),
    "mimelite": (MimeLite, {}),
    "gossip": (Gossip, {}),
    "qg-gossip": (QGGossip, {}),
    "qg-sgdm": (Centralized, {"base": "qg-dsgdm"}),
    "qg-sgdm-n": (Centralized, {"base": "qg-dsgdm-n"}),
    "qhm": (QHM, {}),
    "relaysgd": (RelaySGD, {}),
    "lt-admm": (LTADMM, {}),
    "sgp": (SGP, {}),
    "qg-sgp": (QGSGP, {"nesterov": True}),
    "push-diging": (PushDIGing, {}),
    "ab": (AB, {}),
    "choco": (Choco, {}),
    "adagossip": (AdaGossip, {}),
    "beer": (BEER, {}),
    "motef": (BEER, {"lam": 0.1}),
}

CHANNELS = ("relaysgd", "lt-admm", "sgp", "qg-sgp", "push-diging", "ab", "choco", "adagossip", "beer", "motef")
"""Methods with messages per edge, pushes or compressed messages; see `test_channel_references.py`."""



def worker(text: str, place: Place) -> Worker:
    """The worker that "name:option=value,…" describes."""
    name, _, rest = text.partition(":")
    kind, defaults = NAMES[name]
    options = dict(option.split("=") for option in rest.split(",") if option)
    return kind(place=place, **defaults | {key: value_of(word) for key, word in options.items()})


def value_of(word: str) -> bool | int | float | str:
    """Parse true, 3, 0.5 or a word."""
    if word in ("true", "false"):
        return word == "true"
    for number in (int, float):
        try:
            return number(word)
        except ValueError:
            pass
    return word


def due(t: int, tau: int, released: bool) -> bool:
    """Whether step t ends a period: τ, 2τ, … in the paper; 1, 1 + τ, 1 + 2τ, … as released."""
    return (t - 1 if released else t) % tau == 0


def norm(v: Vector) -> float:
    return np.sqrt(sum(c * c for c in v))


def sample(n: int, participation: float, seed: int, finished_rounds: int) -> list[int]:
    """The clients of a round, chosen by the smallest hashes of (seed, round, client)."""
    count = max(1, round(participation * n))

    def key(i: int) -> int:
        bits = splitmix64(splitmix64(splitmix64(seed) + finished_rounds) + i)
        return bits - 2**64 if bits >= 2**63 else bits  # a signed 64-bit integer

    return sorted(sorted(range(n), key=key)[:count])


def splitmix64(z: int) -> int:
    """The mixing function of Steele, Lea and Flood 2014."""
    z = (z + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)
