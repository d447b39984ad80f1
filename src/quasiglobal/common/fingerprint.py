"""Fingerprints of a user's functions, classes, models and data, by content."""

from __future__ import annotations

import ast
import dis
import io
import linecache
import os
import random
import sys
import sysconfig
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LARGE = 64 * 2**20
"""Size in bytes above which a tensor or array counts by dtype, shape and `ROWS` rows: changes elsewhere are missed."""

ROWS = 1024
"""Number of evenly spaced rows along the first axis that represent a large tensor or array."""

DEPTH = 10_000
"""Nesting depth beyond which an object counts by its class only."""

ROUNDS = 50
"""Limit on the rounds of refinement for objects in reference cycles."""

Parts = tuple[str, Iterable[object]]               # a label, and the objects that an object consists of


def fingerprint(*things: object) -> str:
    """Hash the content of objects: the first 16 hexadecimal digits of a SHA-256.

    Equal in every process, on every device, and after edits of comments, docstrings or formatting. Values count with
    their type, instances with class and attributes, functions with code, defaults, closure and the globals that they
    use. Functions, classes and modules of libraries and of this package count by name, random generators and open
    files by class. Dictionaries and sets have no order. Large arrays are sampled (`LARGE`).

    Not included: modules that a function imports when called, and files that it reads.

    >>> fingerprint(1, "a") == fingerprint(1, "a"), fingerprint(1) == fingerprint(1.0)
    (True, False)
    """
    with warnings.catch_warnings(action="ignore"):          # filters that raise must not change what is reached
        return _digest(things).hex()[:16]


class _Node:
    """An object of the graph, with the digests and nodes of the objects that it consists of."""

    __slots__ = ("closed", "digest", "label", "ordered", "pending", "thing", "tokens")

    def __init__(self, thing: object) -> None:
        self.thing = thing                      # kept alive, so that its id stays unique
        self.tokens: list[bytes | _Node] = []
        self.closed, self.digest = False, b""
        try:
            self.label, parts = _parts(thing)
        except Exception:                       # every object has a fingerprint
            self.label, parts = "unreachable", [type(thing)]
        self.ordered = self.label not in ("dict", "set", "frozenset")
        self.pending: Iterator[object] = iter(parts)

    def hashed(self) -> bytes:
        tokens = [token if isinstance(token, bytes) else token.digest for token in self.tokens]
        return _hash(self.label, tokens if self.ordered else sorted(tokens))


def _hash(label: str, tokens: Iterable[bytes]) -> bytes:
    hashed = sha256()
    for token in (ascii(label).encode(), *tokens):
        hashed.update(len(token).to_bytes(8, "big") + token)
    return hashed.digest()


def _digest(root: object) -> bytes:
    """Hash an object graph: trees bottom-up, cycles and what leads to them by Weisfeiler-Leman refinement.

    The result does not depend on the order of traversal, nor on whether equal objects are one and the same.
    """
    first = _Node(root)
    nodes, stack, circular = {id(root): first}, [first], []
    while stack:                                # no recursion: object graphs are deeper than Python's stack
        node = stack[-1]
        for part in node.pending:
            kind = type(part)
            if write := _PLAIN.get(id(kind)):   # by id: a metaclass may make its classes unhashable
                node.tokens.append(f"{kind.__name__} {write(part)}".encode())
                continue
            thing = part if len(stack) < DEPTH else kind
            known = nodes.get(id(thing))
            node.tokens.append(known or (fresh := _Node(thing)))
            if known is None:
                nodes[id(thing)] = fresh
                stack.append(fresh)
                break
        else:
            stack.pop()
            if all(isinstance(token, bytes) or token.closed for token in node.tokens):
                node.digest, node.closed, node.tokens = node.hashed(), True, []
            else:
                circular.append(node)
    colours: set[bytes] = set()
    for _ in range(ROUNDS):
        hashes = [node.hashed() for node in circular]
        for node, digest in zip(circular, hashes, strict=True):
            node.digest = digest
        before, colours = len(colours), set(hashes)
        if len(colours) == before:              # further rounds tell no more objects apart
            break
    return _hash("graph", [first.digest, *sorted(colours)])


_PLAIN: dict[int, Callable[[Any], str]] = {
    **{id(kind): repr for kind in (types.NoneType, bool, float, complex, bytes)},
    id(str): ascii,                             # accepts surrogates
    id(int): hex,                               # accepts more than 4300 digits
}

# The plain value of an instance of a subclass, without a call to the subclass's methods.
_EXACT: dict[type, Callable[[Any], object]] = {
    int: int.__pos__, float: float.__pos__, complex: complex.__pos__, str: "".__add__, bytes: b"".__add__,
    bytearray: b"".__add__, memoryview: memoryview.tobytes, list: list.copy, tuple: lambda x: _values(x),
    types.MappingProxyType: types.MappingProxyType.copy, set: set().union, frozenset: frozenset().union,
    dict: lambda x: dict(dict.items(x)),        # dict.copy calls keys
}  # fmt: skip

# Their state changes as a program runs, or differs between machines.
_BY_CLASS = (
    random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator,
    threading.Thread, threading.local, type(os.environ), torch._ops.OpOverload, torch._ops.OpOverloadPacket, io.FileIO,
    weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet,
)  # fmt: skip

_INCIDENTAL = {
    "__doc__", "__module__", "__qualname__", "__annotations__", "__annotate__", "__annotate_func__", "__slotnames__",
    "__annotations_cache__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__",
    "_torchdynamo_wrapper_id", "_original_object_hash",                 # of torch.compile and transformers
}  # fmt: skip

_BOOKKEEPING = {*vars(nn.Module()), "dynamo_ctx"}

_LIBRARIES = tuple(
    str(path) + os.sep
    for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), Path(__file__).parents[1])
)


_FORMER = {
    "quasiglobal.api.train.Trained": "quasiglobal.api.trained.Trained",
    "quasiglobal.api.train.TrainedRun": "quasiglobal.api.trained.TrainedRun",
    "quasiglobal.algorithms.base.Edges": "quasiglobal.algorithms.edges.Edges",
    "quasiglobal.algorithms.centralized.CompleteWindow": "quasiglobal.algorithms.complete_window.CompleteWindow",
    "quasiglobal.data.shards.ExampleShards": "quasiglobal.data.records.ExampleShards",
    "quasiglobal.data.shards.Form": "quasiglobal.data.records.Form",
    "quasiglobal.data.shards.Place": "quasiglobal.data.records.Place",
    "quasiglobal.models.language": "quasiglobal.models.language.loading",
    "quasiglobal.runs.callbacks.TensorBoard": "quasiglobal.callbacks.TensorBoard",
    "quasiglobal.stacked.layout.Stacking": "quasiglobal.models.stacking.Stacking",
    "quasiglobal.stacked.layout.stacking_of": "quasiglobal.models.stacking.stacking_of",
}
"""Modules, classes and functions of this package that have moved, and the names under which runs have hashed them."""


def _named(name: str) -> str:
    """The name under which a module, or a class or function with its module's name, is hashed."""
    moved = next((new for new in _FORMER if name == new or name.startswith(f"{new}.")), None)
    return name if moved is None else _FORMER[moved] + name.removeprefix(moved)


_FIRST = {"quasiglobal.algorithms.needs.Needs": 11}
"""Named tuples of this package that have got fields, and the number of those that always count: later ones, if set."""


def _values(x: Any) -> tuple[object, ...]:
    cls = type(x)
    first = _FIRST.get(f"{cls.__module__}.{cls.__qualname__}")
    if first is None:
        return ().__add__(x)
    later = zip(x._fields[first:], x[first:], strict=True)
    return (*x[:first], *((name, value) for name, value in later if value != x._field_defaults[name]))


def _parts(x: Any) -> Parts:
    cls = type(x)
    if any(cls is kind for kind in (list, tuple, dict, set, frozenset)):
        return cls.__name__, list(x.items() if cls is dict else x)
    return next((parts(x) for kinds, parts in _KINDS if issubclass(cls, kinds)), None) or _instance(x)


def _tensor(x: Tensor) -> Parts:
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        label = f"tensor {x.dtype} {[*x.shape]} {x.requires_grad if isinstance(x, nn.Parameter) else ''}"
        if x.layout is not torch.strided:
            sparse = x.to_sparse().coalesce()
            return label, [sparse.indices(), sparse.values()]
        if x.is_meta:
            return label, []
        if x.nbytes > LARGE and len(x) > ROWS:
            x = x[torch.tensor(_sample(len(x)), device=x.device)]
        x = (x.dequantize() if x.is_quantized else x).detach().cpu().resolve_conj().resolve_neg()
        return label, [sha256(x.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()]


def _array(x: object) -> Parts:
    array, masks = np.asarray(x), [np.ma.getmaskarray(x)] if isinstance(x, np.ma.MaskedArray) else []
    label = f"{'array' if isinstance(x, np.ndarray) else 'scalar'} {array.dtype} {array.shape}"
    if array.nbytes > LARGE and len(array) > ROWS:
        array = array[_sample(len(array))]
    return label, [array.ravel().tolist() if array.dtype.hasobject else sha256(array.tobytes()).hexdigest(), *masks]


def _sample(length: int) -> list[int]:
    return [i * (length - 1) // (ROWS - 1) for i in range(ROWS)]


def _is_library(name: object, file: object = None) -> bool:
    """Whether a module, given by name and file, belongs to the standard library, an installed package or this one."""
    if not isinstance(name, str) or name == "__main__":
        return False
    top = name.partition(".")[0]
    for module in (name, top):                  # parts of extensions, such as torch._C._nn, have no file
        file = file or getattr(sys.modules.get(module), "__file__", None)
    if not isinstance(file, str):
        return top in sys.stdlib_module_names
    return file.startswith(_LIBRARIES) or any(f"{os.sep}{kind}-packages{os.sep}" in file for kind in ("site", "dist"))


def _is_library_class(cls: type) -> bool:
    # With all bases: torch derives classes from the user's. Classes that exec makes without a __name__ belong to
    # the module builtins, but are heap types (flag 9), unlike Python's own.
    return all(
        _is_library(base.__module__) and not (base.__module__ == "builtins" and base.__flags__ & 1 << 9)
        for base in cls.__mro__
    )


def _class(x: type) -> Parts:
    if _is_library_class(x):
        return f"class {_named(f'{x.__module__}.{x.__qualname__}')}", []
    return f"class {x.__name__}", [type(x), x.__bases__, _lasting(vars(x), type(x))]


def _lasting(attributes: Mapping[str, object], cls: type) -> dict[str, object]:
    """Drop docstrings, names of modules, and cached properties, which appear with their first use."""
    cached = {name for base in cls.__mro__ for name, x in vars(base).items() if isinstance(x, cached_property)}
    return {name: x for name, x in attributes.items() if name not in _INCIDENTAL and name not in cached}


def _state(x: object) -> dict[str, object]:
    state: dict[str, object] = {}
    for name, member in (item for base in type(x).__mro__ for item in vars(base).items()):
        if isinstance(member, types.MemberDescriptorType):              # from __slots__
            with suppress(AttributeError):
                state[name] = member.__get__(x)
    own = getattr(x, "__dict__", None)
    return _lasting(state | own if isinstance(own, dict) else state, type(x))


def _instance(x: object) -> Parts:
    cls, reducers = type(x), {"__reduce__", "__reduce_ex__", "__getstate__"}
    name = getattr(x, "__name__", "") if _is_library_class(cls) else ""
    definer = next((base for base in cls.__mro__[:-1] if not reducers.isdisjoint(vars(base))), None)
    if definer is None or not _is_library_class(definer):
        return f"instance {name}", [cls, _state(x)]
    # Pickle's protocol reaches what attributes do not: datetime, Path, Enum, partial, deque, DataFrame.
    reduced = x.__reduce_ex__(4)
    if isinstance(reduced, str):                # a global name; a cached function of the user has one, too
        module = getattr(x, "__module__", None)
        return f"instance {module if _is_library(module) else ''} {reduced}", [cls, _state(x)]
    parts = [_lasting(part, cls) if isinstance(part, dict) else part for part in reduced[:3]]
    return f"instance {name}", [cls, *parts, *(list(items or ()) for items in reduced[3:5])]


def _module(x: nn.Module) -> Parts:
    own = {name: value for name, value in vars(x).items() if name not in _BOOKKEEPING}
    hooks = [*x._forward_pre_hooks.values(), *x._forward_hooks.values()]
    names = [name for name, _ in nn.Module.named_parameters(x)]         # tied parameters appear once
    submodules = list(x._modules.items())                               # Sequential calls them in this order
    code = x.code if isinstance(x, torch.jit.ScriptModule) else None
    tensors = dict(x._parameters.items()), dict(x._buffers.items())
    return "module", [type(x), _lasting(own, type(x)), *tensors, submodules, hooks, names, code]


def _function(f: types.FunctionType) -> Parts:
    code, module = f.__code__, f.__globals__.get("__name__")
    bound = [f.__defaults__, f.__kwdefaults__, f.__closure__, _lasting(vars(f), type(f))]
    if not _is_library(module, f.__globals__.get("__file__")):
        content = _source(code, f.__globals__) or _bytecode(code, f.__doc__)
        return "function", [content, *bound, _references(code, f.__globals__)]
    found: object = sys.modules.get(f.__module__ or "")
    for name in f.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is f and _is_library(f.__module__):
        bound = []                              # otherwise it may wrap a function of the user, as torch.no_grad() does
    elif str(module).startswith("torch._dynamo"):
        bound = [vars(f).get("__wrapped__")]    # its closures hold the compiler's state
    return f"function {_named(f'{module}.{code.co_qualname}')}", bound


def _bytecode(code: types.CodeType, docstring: str | None = None) -> tuple[object, ...]:
    documented = docstring is not None and code.co_consts[:1] == (docstring,)
    return (
        code.co_code, code.co_exceptiontable, (None, *code.co_consts[1:]) if documented else code.co_consts,
        code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_argcount,
        code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & 0x3FF,     # without __future__
    )  # fmt: skip


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _references(code: types.CodeType, namespace: dict[str, object]) -> dict[str, object]:
    """Resolve the globals that code uses: `name`, and `module.name` for the user's own modules."""
    found: dict[str, object] = {}
    value = missing = object()
    for instruction in (instruction for part in _nested(code) for instruction in dis.get_instructions(part)):
        name, operation = instruction.argval, instruction.opname
        if operation in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            path, value = name, namespace.get(name, missing)
        elif operation in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, types.ModuleType):
            path, value = f"{path}.{name}", missing if _is_library(value.__name__) else vars(value).get(name, missing)
        elif operation != "EXTENDED_ARG":
            value = missing
        if value is not missing and not (path.startswith("__") and path.endswith("__")):        # such as __file__
            found[path] = value
    return found


def _source(code: types.CodeType, namespace: dict[str, object]) -> str | None:
    """Return the normalized source, if it compiles to this code: the file may have changed since its import."""
    linecache.checkcache(code.co_filename)
    try:
        tree, codes = _parsed("".join(linecache.getlines(code.co_filename, namespace)))
    except (SyntaxError, ValueError, RecursionError):
        return None
    wanted = _digest(_bytecode(code))
    same = [other for other in codes if other.co_qualname == code.co_qualname and _digest(_bytecode(other)) == wanted]
    same.sort(key=lambda other: other.co_firstlineno != code.co_firstlineno)
    node = _definition(tree, same[0]) if same else None
    return ast.unparse(node) if node else None


@lru_cache(maxsize=8)
def _parsed(text: str) -> tuple[ast.Module, list[types.CodeType]]:
    tree, codes = ast.parse(text), list(_nested(compile(text, "<fingerprint>", "exec", dont_inherit=True)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node, False):
            node.body = node.body[1:] or [ast.Pass()]
    return tree, codes


def _definition(tree: ast.Module, code: types.CodeType) -> ast.AST | None:
    """Find the `def` or `lambda` that was compiled to this code; lambdas by their columns."""
    found = None
    places: list[Any] = [p for p in code.co_positions() if None not in p and p[0::2] != p[1::2]]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            if min(part.lineno for part in (node, *node.decorator_list)) == code.co_firstlineno:
                return node
        elif isinstance(node, ast.Lambda) and code.co_name == "<lambda>" and node.lineno == code.co_firstlineno:
            body = node.body
            start, end = (body.lineno, body.col_offset), (body.end_lineno or 0, body.end_col_offset or 0)
            if places and all(start <= p[0::2] and p[1::2] <= end for p in places):
                found = node                    # the innermost comes last
    return found


_KINDS: list[tuple[type | tuple[type, ...], Callable[[Any], Parts]]] = [
    (Tensor, _tensor),
    ((np.ndarray, np.generic), _array),
    (type, _class),
    (nn.Module, _module),
    (types.FunctionType, _function),
    (types.MethodType, lambda x: ("method", [x.__func__, x.__self__])),
    (types.CodeType, lambda x: ("code", _bytecode(x))),
    (types.CellType, lambda x: ("cell", [x.cell_contents])),
    (types.ModuleType, lambda x: (f"module {_named(x.__name__)}", [])),
    (_BY_CLASS, lambda x: (f"instance {getattr(x, '__name__', '')}", [type(x)])),
    *((base, lambda x, exact=exact: ("instance", [type(x), exact(x), _state(x)])) for base, exact in _EXACT.items()),
]
