"""The methods after 2021 from the view of one node, in NumPy, from the papers' equations: see `numpy_nodes.py`.

A `Worker` keeps the papers' quantities as they are printed, such as the last models and the last learning rate, where
the library keeps quotients of them. Importing this module adds its workers to `NAMES`.
"""

from dataclasses import dataclass

import numpy as np
from numpy_nodes import EPS, NAMES, Mean, Mix, Worker, alone, norm, splitmix64, worker


@dataclass(kw_only=True)
class MomentumTracking(Worker):
    """u ← βu + g;  x⁺ = Wx − η(u − c);  c⁺ = W(c − u) + u."""

    beta: float = 0.9
    init: str = "zero"

    def step(self, x, g, t, lr):
        memory = self.memory
        if t == 1 and self.init == "mean":
            memory["u"] = memory["c"] = (g - (yield Mean(g))) / (1 - self.beta)
        u, c = self.beta * memory["u"] + g, memory["c"]
        memory["u"] = u
        memory["c"] = (yield Mix(c - u)) + u
        return (yield Mix(x)) - lr * (u - c)


@dataclass(kw_only=True)
class ExactDiffusion(Worker):
    """x⁺ = W̃(x − η((x₋ − x)/η₋ + m − m₋)), m ← βm + (1 − β)g; W̃ is made lazy if λ_min ≤ −1/3."""

    beta: float = 0.0

    def step(self, x, g, t, lr):
        memory = self.memory
        m = self.beta * memory["m"] + (1 - self.beta) * g
        direction = m if t == 1 else (memory["x"] - x) / memory["lr"] + m - memory["m"]
        memory.update(x=x, m=m, lr=lr)
        return (yield from lazily(self.place, x - lr * direction))


@dataclass(kw_only=True)
class DecentLaM(Worker):
    """g̃ = (x − W(x − ηg))/η;  m ← βm + g̃;  x⁺ = x − ηm."""

    beta: float = 0.9

    def step(self, x, g, t, lr):
        mixed = yield Mix(x - lr * g)
        self.memory["m"] = self.beta * self.memory["m"] + (x - mixed) / lr
        return x - lr * self.memory["m"]


@dataclass(kw_only=True)
class GossipPGA(Worker):
    """x⁺ = (J if τ divides t else W)(x − ηu)."""

    beta: float = 0.0
    nesterov: bool = False
    tau: int = 16

    def step(self, x, g, t, lr):
        m = self.memory["m"] = self.beta * self.memory["m"] + g
        half = x - lr * (g + self.beta * m if self.nesterov else m)
        return (yield Mean(half) if t % self.tau == 0 else Mix(half))


@dataclass(kw_only=True)
class GUT(Worker):
    """Literal: u = WX − X, δ = g − u/η₋, y = δ − (μ/η₋)(W(X − X₋) + b(WX₋ − X₋)) − μδ₋; x is WX."""

    mu: float = 0.9
    beta: float = 0.0
    nesterov: bool = False

    def step(self, x, g, t, lr):
        memory, mu, beta = self.memory, self.mu, self.beta
        if t == 1:
            memory.update(X=x, X_old=x, WX_old=x, delta=0.0, lr=lr)
        b = 1 + beta + (beta**2 if self.nesterov else 0)
        delta = g - (x - memory["X"]) / memory["lr"]
        movement = x - memory["WX_old"] + b * (memory["WX_old"] - memory["X_old"])
        y = delta - mu / memory["lr"] * movement - mu * memory["delta"]
        m = beta * memory["m"] + y
        X_next = memory["X"] - lr * (y + beta * m if self.nesterov else m)
        memory.update(m=m, X_old=memory["X"], WX_old=x, X=X_next, delta=delta, lr=lr)
        return (yield Mix(X_next))


@dataclass(kw_only=True)
class KGT(Worker):
    """K times z ← z − η(g + c); then (x − z)/(Kη) corrects c, and the models are averaged."""

    tau: int = 5
    server_lr: float = 1.0

    def step(self, x, g, t, lr):
        memory = self.memory
        if (t - 1) % self.tau == 0:
            memory["x"] = x
        x = x - lr * (g + memory["c"])
        if t % self.tau:
            return x
        z = (memory["x"] - x) / (self.tau * lr)
        memory["c"] = memory["c"] - z + (yield Mix(z))
        return (yield Mix(memory["x"] - self.tau * lr * self.server_lr * z))


@dataclass(kw_only=True)
class LED(Worker):
    """τ times z ← z − ηg − y/τ;  x⁺ = W̃z;  y⁺ = y + z − x⁺."""

    tau: int = 5

    def step(self, x, g, t, lr):
        z = x - lr * g - self.memory["y"] / self.tau
        if t % self.tau:
            return z
        x = yield from lazily(self.place, z)
        self.memory["y"] = self.memory["y"] + z - x
        return x


@dataclass(kw_only=True)
class ProxSkip(Worker):
    """z = x − ηg − y;  with probability p x⁺ = (I + W)z/2 and y⁺ = y + p(z − x⁺), else x⁺ = z."""

    p: float = 0.2

    def step(self, x, g, t, lr):
        z = x - lr * g - self.memory["y"]
        if not coin(self.place.seed, t, self.p):
            return z
        x = (z + (yield Mix(z))) / 2
        self.memory["y"] = self.memory["y"] + self.p * (z - x)
        return x


@dataclass(kw_only=True)
class GTNSGDm(Worker):
    """v ← βv + (1 − β)g;  y ← W(y + v − v₋);  x⁺ = W(x − ηy/‖y‖)."""

    beta: float = 0.9

    def step(self, x, g, t, lr):
        memory = self.memory
        v = self.beta * memory["v"] + (1 - self.beta) * g
        y = memory["y"] = yield Mix(memory["y"] + v - memory["v"])
        memory["v"] = v
        return (yield Mix(x - lr * y / norm(y)))


@dataclass(kw_only=True)
class ClippedDSGD(Worker):
    clip: float = 1.0

    def step(self, x, g, t, lr):
        return (yield Mix(x - lr * min(1.0, self.clip / norm(g)) * g))


@dataclass(kw_only=True)
class DAdamW(Worker):
    """AdamW (Loshchilov and Hutter 2019, Algorithm 2) at every node, then gossip."""

    beta1: float = 0.9
    beta2: float = 0.99
    lam: float | None = None

    @property
    def decoupled(self):
        return self.lam is None

    def step(self, x, g, t, lr):
        memory, b1, b2 = self.memory, self.beta1, self.beta2
        memory["m"] = b1 * memory["m"] + (1 - b1) * g
        memory["v"] = b2 * memory["v"] + (1 - b2) * g * g
        m, v = memory["m"] / (1 - b1**t), memory["v"] / (1 - b2**t)
        decay = self.place.weight_decay if self.lam is None else self.lam
        return (yield Mix(x - lr * (m / (np.sqrt(v) + EPS) + decay * x)))


@dataclass(kw_only=True)
class DSGDAC(Worker):
    """x⁺ = (1 − γ)x + γWx − ηu, γ = (η/η_max)^p."""

    p: float = 3.0
    beta: float = 0.0
    nesterov: bool = False

    def step(self, x, g, t, lr):
        memory = self.memory
        memory["lr"] = max(memory["lr"], lr)
        gamma = (lr / memory["lr"]) ** self.p
        m = memory["m"] = self.beta * memory["m"] + g
        u = g + self.beta * m if self.nesterov else m
        return (1 - gamma) * x + gamma * (yield Mix(x)) - lr * u


@dataclass(kw_only=True)
class DFedAvgM(Worker):
    """K heavy-ball steps from momentum 0, then gossip."""

    beta: float = 0.9
    tau: int = 5

    def step(self, x, g, t, lr):
        m = g if (t - 1) % self.tau == 0 else self.beta * self.memory["m"] + g
        self.memory["m"] = m
        x = x - lr * m
        return x if t % self.tau else (yield Mix(x))


@dataclass(kw_only=True)
class DFedSAM(Worker):
    """K steps by the gradient at z + ρg/‖g‖, heavy-ball if β > 0, then Q gossips, Algorithm 1 of Shi et al. 2023."""

    beta: float = 0.0
    rho: float = 0.01
    tau: int = 5
    gossips: int = 1

    def step(self, x, g, t, lr):
        g = self.place.gradient(x + self.rho * g / norm(g), t)
        m = self.memory["m"] = g if (t - 1) % self.tau == 0 else self.beta * self.memory["m"] + g
        x = x - lr * m
        for _ in range(0 if t % self.tau else self.gossips):
            x = yield Mix(x)
        return x


@dataclass(kw_only=True)
class NoLoCo(Worker):
    """H inner steps θ; then m ← αm + η W(θ − φ) + η(Wφ − φ), φ ← φ + m, as in the authors' outer step."""

    base: str = "dadam"
    server_lr: float = 0.7
    beta: float = 0.5
    tau: int = 50

    def __post_init__(self):
        self.inner = worker(self.base, self.place)

    def step(self, x, g, t, lr):
        memory = self.memory
        phi = memory["phi"] if t > 1 else x
        theta = alone(self.inner.step(x, g, t, lr))
        if t % self.tau == 0:
            moved, mean = (yield Mix(theta - phi)), (yield Mix(phi))
            memory["m"] = self.beta * memory["m"] + self.server_lr * moved + self.server_lr * (mean - phi)
            theta = phi = phi + memory["m"]
        memory["phi"] = phi
        return theta


@dataclass(kw_only=True)
class DiLoCo(Worker):
    """H inner steps alone; then PyTorch's Nesterov SGD on the mean movement, Algorithm 1 of Douillard et al. 2023."""

    base: str = "dadamw"
    server_lr: float = 0.7
    beta: float = 0.9
    nesterov: bool = True
    tau: int = 500

    def __post_init__(self):
        self.inner = worker(self.base, self.place)

    @property
    def decoupled(self):
        return getattr(self.inner, "decoupled", False)

    def step(self, x, g, t, lr):
        memory = self.memory
        if t == 1:
            memory["x"] = x
        x = alone(self.inner.step(x, g, t, lr))
        if t % self.tau:
            return x
        gradient = memory["x"] - (yield Mean(x))
        m = memory["m"] = self.beta * memory["m"] + gradient
        memory["x"] = memory["x"] - self.server_lr * (gradient + self.beta * m if self.nesterov else m)
        return memory["x"]


LATER = {
    "momentum-tracking": (MomentumTracking, {}),
    "ed": (ExactDiffusion, {}),
    "edm": (ExactDiffusion, {"beta": 0.9}),
    "decentlam": (DecentLaM, {}),
    "gossip-pga": (GossipPGA, {}),
    "gut": (GUT, {}),
    "qg-gut": (GUT, {"mu": 0.06, "beta": 0.9}),
    "k-gt": (KGT, {}),
    "led": (LED, {}),
    "proxskip": (ProxSkip, {}),
    "gt-nsgdm": (GTNSGDm, {}),
    "dsgd-clip": (ClippedDSGD, {}),
    "dadamw": (DAdamW, {}),
    "dsgd-ac": (DSGDAC, {}),
    "dfedavgm": (DFedAvgM, {}),
    "dfedsam": (DFedSAM, {}),
    "diloco": (DiLoCo, {}),
    "noloco": (NoLoCo, {}),
}
NAMES |= LATER


def lazily(place, value):
    """Ask for W̃ v: W v, or (v + W v)/2 where W is fixed and symmetric with λ_min ≤ −1/3."""
    mixed = yield Mix(value)
    return (value + mixed) / 2 if place.lambda_min is not None and place.lambda_min < -1 / 3 + 1e-9 else mixed


def coin(seed: int, t: int, p: float) -> bool:
    """Whether the first 53 bits of the hash of (seed, 3, t), read as a fraction, are below p."""
    bits = splitmix64(splitmix64(splitmix64(seed) + 3) + t)
    return bits >> 11 < round(p * 2**53)
