"""Registry of algorithms by name, and the parser of names with options. Each family has its own file."""

from __future__ import annotations

import typing
from dataclasses import fields, replace
from types import NoneType

from torch import Tensor

from quasiglobal.algorithms.adam import DAdam, DAdamW, QGDAdam
from quasiglobal.algorithms.adaptive_consensus import DSGDAC
from quasiglobal.algorithms.base import Algorithm, Edges, Node, State, Wrapper, checked, option_types
from quasiglobal.algorithms.beer import BEER
from quasiglobal.algorithms.centralized import Centralized
from quasiglobal.algorithms.choco import AdaGossip, Choco
from quasiglobal.algorithms.d2 import D2
from quasiglobal.algorithms.decentlam import DecentLaM
from quasiglobal.algorithms.dfedavgm import DFedAvgM, DFedSAM
from quasiglobal.algorithms.diloco import DiLoCo
from quasiglobal.algorithms.dmsgd import DMSGD
from quasiglobal.algorithms.exact_diffusion import ExactDiffusion
from quasiglobal.algorithms.gossip import Gossip
from quasiglobal.algorithms.gossip_pga import GossipPGA
from quasiglobal.algorithms.gradient_tracking import GradientTracking
from quasiglobal.algorithms.gut import GUT
from quasiglobal.algorithms.heavy_tails import ClippedDSGD, GTNSGDm
from quasiglobal.algorithms.local_correction import KGT, LED, ProxSkip
from quasiglobal.algorithms.lt_admm import LTADMM
from quasiglobal.algorithms.mimelite import MimeLite
from quasiglobal.algorithms.momentum_tracking import MomentumTracking
from quasiglobal.algorithms.needs import Needs
from quasiglobal.algorithms.noloco import NoLoCo
from quasiglobal.algorithms.overlap import Overlap
from quasiglobal.algorithms.push_sum import AB, QGSGP, SGP, PushDIGing
from quasiglobal.algorithms.quasi_global import QHM, QGDSGDm
from quasiglobal.algorithms.relay import RelaySGD
from quasiglobal.algorithms.sgd import DSGD, DSGDm
from quasiglobal.algorithms.slowmo import SlowMo
from quasiglobal.common.fingerprint import fingerprint
from quasiglobal.common.objects import imported, is_here, is_own, is_path, named_text, recall
from quasiglobal.errors import InputError, unknown

__all__ = [
    "ALGORITHMS", "Algorithm", "Edges", "Needs", "Node", "Overlap", "State", "Wrapper", "algorithm", "name_of",
    "numeric_options", "text_of", "with_option",
]

ALGORITHMS: dict[str, Algorithm] = {
    "sgd": Centralized(base=DSGD()),
    "sgdm": Centralized(base=DSGDm()),
    "sgdm-n": Centralized(base=DSGDm(nesterov=True)),
    "adam": Centralized(base=DAdam()),
    "dsgd": DSGD(),
    "dsgdm": DSGDm(),
    "dsgdm-n": DSGDm(nesterov=True),
    "dadam": DAdam(),
    "qg-dsgdm": QGDSGDm(),
    "qg-dsgdm-n": QGDSGDm(nesterov=True),
    "qg-dadam": QGDAdam(),
    "d2": D2(),
    "d2+": D2(plus=True),
    "dsgd-gt": GradientTracking(),
    "dsgdm-gt": GradientTracking(beta=0.9),
    "dsgdm-n-gt": GradientTracking(beta=0.9, nesterov=True),
    "slowmo": SlowMo(base=DSGDm(nesterov=True)),
    "dmsgd": DMSGD(),
    "dmsgd-2": DMSGD(option=2),
    "mimelite": MimeLite(),
    "gossip": Gossip(base=DSGD()),
    "qg-gossip": Gossip(base=QGDSGDm()),
    "qg-sgdm": Centralized(base=QGDSGDm()),
    "qg-sgdm-n": Centralized(base=QGDSGDm(nesterov=True)),
    "qhm": Centralized(base=QHM()),
    "relaysgd": RelaySGD(base=DSGDm(beta=0.0)),
    "lt-admm": LTADMM(),
    "sgp": SGP(base=DSGDm(beta=0.0)),
    "qg-sgp": QGSGP(nesterov=True),
    "push-diging": PushDIGing(),
    "ab": AB(),
    "choco": Choco(base=DSGDm(beta=0.0)),
    "adagossip": AdaGossip(base=DSGDm(beta=0.0)),
    "beer": BEER(),
    "motef": BEER(lam=0.1),
    "momentum-tracking": MomentumTracking(),
    "ed": ExactDiffusion(),
    "edm": ExactDiffusion(beta=0.9),
    "decentlam": DecentLaM(),
    "gossip-pga": GossipPGA(),
    "gut": GUT(),
    "qg-gut": GUT(mu=0.06, beta=0.9),
    "k-gt": KGT(),
    "led": LED(),
    "proxskip": ProxSkip(),
    "gt-nsgdm": GTNSGDm(),
    "dsgd-clip": ClippedDSGD(),
    "dadamw": DAdamW(),
    "dsgd-ac": DSGDAC(),
    "dfedavgm": DFedAvgM(),
    "dfedsam": DFedSAM(),
    "diloco": DiLoCo(base=DAdamW()),
    "noloco": NoLoCo(base=DAdam()),
}
"""The built-in algorithms by name. `qg.algorithm` looks names up here and sets their options."""


def algorithm(text: str | Algorithm | type[Algorithm]) -> Algorithm:
    """Parse an algorithm: a name, and options after a colon.

    >>> algorithm("qg-dsgdm-n:mu=0.5,tau=2")
    QGDSGDm(beta=0.9, mu=0.5, nesterov=True, tau=2, released=False)

    The value of an option that is an algorithm is a bare name. An option that a wrapper lacks is set on its
    base. If both have it, the prefix `base.` selects the base's.

    >>> algorithm("slowmo:base=dsgdm,tau=5,base.beta=0.8").base
    DSGDm(beta=0.8, nesterov=False, sync='none', over='graph')

    `package.module:Name` is a user-defined class, with options after a second colon.
    """
    if isinstance(text, Algorithm):
        return text
    if isinstance(text, type) and issubclass(text, Algorithm):
        return _with_options(text, text.__name__, {})
    if not isinstance(text, str):
        raise InputError(f"an algorithm is a name or an Algorithm, got {text!r}; `qg algorithms` lists the names")
    if is_own(text):
        return recall(text, "algorithm") if is_here(text) else Recorded()
    name, _, options = text.partition(":")
    if name in ALGORITHMS:
        return _with_options(ALGORITHMS[name], name, _options(options, name))
    attribute, _, options = options.partition(":")
    if is_path(path := f"{name}:{attribute}"):
        found = imported(path, "algorithm")
        if isinstance(found, Algorithm) or (isinstance(found, type) and issubclass(found, Algorithm)):
            return _with_options(found, path, _options(options, path))
        raise InputError(f"{path} is not an Algorithm; derive it from quasiglobal.Algorithm")
    raise unknown("algorithm", name, ALGORITHMS)


class Recorded(Algorithm):
    """Placeholder for the algorithm of a stored run that a Python script defined."""

    def init(self, x: Tensor) -> State:
        raise InputError("the algorithm of this run is defined in a Python script; run that script again")


def text_of(chosen: str | Algorithm | type[Algorithm]) -> str:
    """The string that `algorithm` parses to an equal algorithm.

    >>> text_of(QGDSGDm(nesterov=True, mu=0.5)), text_of(DSGD())
    ('qg-dsgdm-n:mu=0.5', 'dsgd')
    """
    if isinstance(chosen, str):
        return chosen
    chosen = algorithm(chosen)
    texts = []
    for name, known in ALGORITHMS.items():
        if type(known) is type(chosen):
            values = {field.name: getattr(chosen, field.name) for field in fields(chosen)}
            changed = {key: value for key, value in values.items() if value != getattr(known, key)}
            other = [f"{key.removesuffix('_')}={value}" for key, value in changed.items()]
            texts.append(f"{name}:{','.join(other)}" if other else name)
    for text in sorted(texts, key=len):
        try:
            if algorithm(text) == chosen:
                return text
        except InputError:
            continue
    return named_text(type(chosen).__name__, fingerprint(chosen), chosen, options=repr(chosen))


def name_of(text: str) -> str:
    """The name of an algorithm without its options.

    >>> name_of("qg-dsgdm-n:mu=0.5"), name_of("mine.methods:Mine:beta=0.5")
    ('qg-dsgdm-n', 'mine.methods:Mine')
    """
    return _split(text)[0]


def with_option(text: str, name: str, value: float) -> str:
    """Set a numeric option of an algorithm given as text; omit the option if the value is the default.

    >>> with_option("dmsgd", "mu", 0.25), with_option("dsgdm-n:sync=gradient,beta=0.5", "beta", 0.8)
    ('dmsgd:mu=0.25', 'dsgdm-n:sync=gradient,beta=0.8')
    >>> with_option("dsgdm-n:beta=0.5", "beta", 0.9)
    'dsgdm-n'
    """
    named, given_options = _split(text)
    options = _options(given_options, text)
    options.pop(name, None)
    without, given = (
        ":".join(filter(None, (named, ",".join(f"{key}={entry}" for key, entry in chosen.items()))))
        for chosen in (options, options | {name: f"{value:.12g}"})
    )
    return without if algorithm(without) == algorithm(given) else given


def numeric_options(chosen: Algorithm) -> dict[str, type[int] | type[float]]:
    """Types of the numeric options by name; includes the base's options that a wrapper does not have itself.

    >>> numeric_options(algorithm("sgdm-n"))
    {'beta': <class 'float'>}
    """
    inner = numeric_options(chosen.base) if isinstance(chosen, Wrapper) else {}
    own = {name: typing.get_args(hint)[:1] or (hint,) for name, hint in option_types(type(chosen)).items()}
    return inner | {name: kind for name, (kind,) in own.items() if kind in (int, float)}


def _split(text: str) -> tuple[str, str]:
    """Split a string into the name, or the path of a user-defined class, and its options."""
    colons = 1 if text.partition(":")[0] in ALGORITHMS else 2
    parts = text.split(":", colons)
    return ":".join(parts[:colons]), "".join(parts[colons:])


def _options(text: str, name: str) -> dict[str, str]:
    """Parse `key=value,…` into a dict."""
    options = {}
    for option in filter(None, text.split(",")):
        key, equals, value = option.partition("=")
        if not equals:
            raise InputError(f"option {option!r} of {name} needs a value: {option}=…")
        options[key.strip()] = value.strip()
    return options


def _with_options(chosen: Algorithm | type[Algorithm], name: str, options: dict[str, str]) -> Algorithm:
    """Set options on an algorithm; the base gets those that the algorithm lacks."""
    kind = chosen if isinstance(chosen, type) else type(chosen)
    types = option_types(kind)
    options = {f"{key}_" if f"{key}_" in types else key: text for key, text in options.items()}     # init_, for init
    own = {
        key: _value(types[key], text, f"{key.removesuffix('_')} of {name}")
        for key, text in options.items() if key in types
    }
    rest = {key.removeprefix("base."): text for key, text in options.items() if key not in types}
    base = own.get("base", getattr(chosen, "base", None))
    if rest and isinstance(base, Algorithm):
        known = set(types) - {"base"} | _all_options(base)
        for key in rest:
            if not {key, f"{key}_"} & known and not key.startswith("base."):
                raise unknown(f"option of {name}", key, sorted(known))
        own["base"] = _with_options(base, f"{name}'s base", rest)
    elif rest:
        raise unknown(f"option of {name}", next(iter(rest)), sorted(types))
    if isinstance(chosen, Algorithm):
        return replace(chosen, **own)
    try:
        return chosen(**own)
    except TypeError as error:
        raise InputError(f"cannot make {name}: {error}") from None


def _all_options(instance: Algorithm) -> set[str]:
    inner = _all_options(instance.base) if isinstance(instance, Wrapper) else set()
    return set(option_types(type(instance))) | inner


def _value(hint: typing.Any, text: str, what: str) -> typing.Any:
    """Parse `text` as the option's type."""
    choices = typing.get_args(hint)
    if NoneType in choices:
        return None if text.lower() == "none" else _value(choices[0], text, what)
    if typing.get_origin(hint) is typing.Literal:
        return checked(hint, next((choice for choice in choices if str(choice) == text), text), what)
    if hint is Algorithm:
        return algorithm(text)
    if hint is bool:
        return checked(bool, {"true": True, "false": False}.get(text.lower(), text), what)
    if hint in (int, float):
        try:
            number = hint(text)
        except ValueError:
            number = text
        return checked(hint, number, what)
    return text
