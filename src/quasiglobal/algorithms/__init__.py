"""Every algorithm by name. One file a family; this one is the register and its spelling."""

from __future__ import annotations

import math
import typing
from dataclasses import fields, replace
from importlib import import_module
from types import NoneType

from quasiglobal.algorithms.adam import DAdam, QGDAdam
from quasiglobal.algorithms.base import Algorithm, Needs, Node, State, Wrapper
from quasiglobal.algorithms.centralized import Centralized
from quasiglobal.algorithms.d2 import D2
from quasiglobal.algorithms.dmsgd import DMSGD
from quasiglobal.algorithms.gossip import Gossip
from quasiglobal.algorithms.gradient_tracking import GradientTracking
from quasiglobal.algorithms.mimelite import MimeLite
from quasiglobal.algorithms.quasi_global import QHM, QGDSGDm
from quasiglobal.algorithms.sgd import DSGD, DSGDm
from quasiglobal.algorithms.slowmo import SlowMo
from quasiglobal.errors import InputError, unknown

__all__ = ["ALGORITHMS", "Algorithm", "Needs", "Node", "State", "Wrapper", "algorithm"]

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
}


def algorithm(text: str | Algorithm) -> Algorithm:
    """The algorithm that a text names: a name, and after a colon its options.

    >>> algorithm("qg-dsgdm-n:mu=0.5,tau=2")
    QGDSGDm(beta=0.9, mu=0.5, nesterov=True, tau=2, released=False)

    An option that is an algorithm takes a bare name. What a wrapper lacks is set on its base; `base.` in
    front of an option means the base's where both have it.

    >>> algorithm("slowmo:base=dsgdm,tau=5,base.beta=0.8").base
    DSGDm(beta=0.8, nesterov=False, sync='none', over='graph')

    `package.module:Name` is a class of your own, with options after a second colon.
    """
    if isinstance(text, Algorithm):
        return text
    name, _, options = text.partition(":")
    if name in ALGORITHMS:
        chosen = ALGORITHMS[name]
    elif "." in name:
        attribute, _, options = options.partition(":")
        chosen = _imported(name, attribute)
    else:
        raise unknown("algorithm", name, ALGORITHMS)
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if not equals:
            raise InputError(f"option {option!r} of {name} needs a value: {option}=…")
        chosen = _with_option(chosen, name, key.strip(), value.strip())
    return chosen


def _with_option(instance: Algorithm, name: str, key: str, text: str) -> Algorithm:
    options = {field.name for field in fields(instance) if field.init}
    head, dot, rest = key.partition(".")
    if dot and isinstance(inner := getattr(instance, head, None), Algorithm):
        return replace(instance, **{head: _with_option(inner, f"{name}'s {head}", rest, text)})
    if key in options:
        hint = typing.get_type_hints(type(instance))[key]
        return replace(instance, **{key: _value(hint, text, f"{key} of {name}")})
    if isinstance(instance, Wrapper):
        options -= {"base"}
        inner_options = {field.name for field in fields(instance.base)}
        if key in inner_options:
            return replace(instance, base=_with_option(instance.base, name, key, text))
        options |= inner_options
    raise unknown(f"option of {name}", key, sorted(options))


def _value(hint: typing.Any, text: str, what: str) -> object:
    """`text` read as the type of the option."""
    choices = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        for choice in choices:
            if text == str(choice):
                return choice
        raise unknown(what, text, map(str, choices))
    if NoneType in choices:
        return None if text.lower() == "none" else _value(choices[0], text, what)
    if hint is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise InputError(f"{what} must be true or false, got {text!r}")
    if isinstance(hint, type) and issubclass(hint, Algorithm):
        return algorithm(text)
    try:
        value = hint(text)
    except (TypeError, ValueError):
        kind = {int: "a whole number", float: "a number"}.get(hint, str(hint))
        raise InputError(f"{what} must be {kind}, got {text!r}") from None
    if value in (math.inf, -math.inf):
        raise InputError(f"{what} must be finite, got {text!r}")
    return value


def _imported(module: str, name: str) -> Algorithm:
    """An algorithm class or instance of the user's."""
    try:
        found = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise InputError(f"cannot import {module} for algorithm {module}:{name}: {error}") from None
    except AttributeError:
        raise InputError(f"module {module} has no {name!r}; name a class as {module}:ClassName") from None
    if isinstance(found, type) and issubclass(found, Algorithm):
        found = found()
    if not isinstance(found, Algorithm):
        raise InputError(f"{module}:{name} is not an Algorithm; derive it from quasiglobal.Algorithm")
    return found
