"""Fingerprints follow the content of a user's objects, and nothing else."""

import collections
import dataclasses
import datetime
import enum
import functools
import importlib.util
import itertools
import logging
import math
import operator
import os
import random
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from quasiglobal.common import fingerprint as module
from quasiglobal.common.fingerprint import fingerprint

NUMBERS = itertools.count()


@pytest.fixture
def load(tmp_path):
    """Import source text as a user's module, with another name and file each time."""

    def loaded(source, **names):
        number = next(NUMBERS)
        path = tmp_path / f"of_user_{number}.py"
        path.write_text(textwrap.dedent(source))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        found = importlib.util.module_from_spec(spec)
        vars(found).update(names)
        spec.loader.exec_module(found)
        return found

    return loaded


def executed(source, **names):
    names = dict(names)
    exec(textwrap.dedent(source), names)
    return names


def different(*things):
    return len({fingerprint(thing) for thing in things}) == len(things)


def same(*things):
    return len({fingerprint(thing) for thing in things}) == 1


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


class Words(list):
    def __iter__(self):
        raise RuntimeError("user code")


class Pair(collections.namedtuple("Pair", "a b")):
    pass


def test_a_fingerprint_is_16_hexadecimal_digits():
    assert len(fingerprint()) == 16
    assert int(fingerprint(1), 16) >= 0
    assert different((), (1,), (1, 2), (2, 1), ((1, 2),), [1, 2])


VALUES = [
    None, True, False, 1, 0, 1.0, 0.0, -0.0, math.inf, 1 + 0j, "1", b"1", "", b"", "None", 10**5000, 10**5000 + 1,
    "\ud800", range(3), range(4), slice(1, 2), slice(1, 3), ..., NotImplemented, torch.float32, torch.float64,
    torch.device("cpu"), torch.device("cuda", 1), torch.strided, np.dtype("f4"), Colour.RED, Colour.BLUE, Level.LOW,
    Path("a"), Path("b"), "a", datetime.datetime(2020, 1, 1), datetime.date(2020, 1, 1), datetime.timedelta(1),
    datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC), np.float32(1), np.float64(1), np.int64(1), np.str_("1"),
    bytearray(b"1"), memoryview(b"1"), collections.deque([1]), collections.deque([2]), operator.itemgetter(1),
    operator.itemgetter(2), torch.Size([1]), (1,), Pair(1, 2), (1, 2), Words([1, 2]), [1, 2], {1, 2}, frozenset({1, 2}),
    {1: 2}, collections.OrderedDict({1: 2}), collections.defaultdict(list, {1: 2}), collections.defaultdict(int),
]  # fmt: skip


def test_values_count_with_their_type():
    assert different(*VALUES)
    assert same(math.nan, float("nan"))


@pytest.mark.parametrize("base", [int, float, complex, str, bytes, list, tuple, set, frozenset, dict])
def test_instances_of_subclasses_of_plain_types_count_by_value(base):
    class Own(base):
        def refuse(self, *_):
            raise RuntimeError("user code")

        __iter__ = __str__ = __repr__ = __hash__ = __eq__ = __getitem__ = __len__ = items = keys = copy = refuse

    one, two = {bytes: (b"1", b"2"), dict: ([(1, 1)], [(1, 2)])}.get(base, ("1", "2"))
    assert same(Own(one), Own(one))
    assert different(Own(one), Own(two), base(one), base(two))


def test_neither_dictionaries_nor_sets_have_an_order():
    assert same({"a": 1, "b": [2]}, {"b": [2], "a": 1})
    assert same({1: "x", "1": "y", None: "z"}, {None: "z", "1": "y", 1: "x"})
    assert same({"b", "a", (1, 2)}, {(1, 2), "a", "b"})
    assert different({"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": 1, "b": 2, "c": 3})


def test_equal_objects_need_not_be_the_same():
    shared = [1]
    assert same([shared, shared], [[1], [1]])


def linked(*values):
    nodes = [{"value": value} for value in values]
    for node, following in zip(nodes, nodes[1:] + nodes[:1], strict=True):
        node["next"], following["previous"] = following, node
    return nodes


def test_cycles_end_and_their_content_counts():
    first, second = [1], [2]
    first.append(first)
    second.append(second)
    assert different(first, second)
    assert same(linked(1, 2, 3)[0], linked(1, 2, 3)[0])
    assert different(linked(1, 2, 3)[0], linked(1, 2, 4)[0], linked(1, 3, 2)[0], linked(1, 2, 3)[1])


def test_nesting_may_exceed_pythons_stack():
    def nested(innermost, depth):
        for _ in range(depth):
            innermost = [innermost]
        return innermost

    assert different(nested(1, 5000), nested(2, 5000), nested(1, 5001))
    assert fingerprint(nested(1, 3 * module.DEPTH))


X = torch.arange(6.0).reshape(2, 3)


def test_tensors_count_by_dtype_shape_and_content():
    assert different(X, X + 1, X.T, X.reshape(-1), X.double(), X.bfloat16(), X.half(), X.to(torch.complex64), X.numpy())
    assert different(X.bool(), X.to(torch.uint8), X.to(torch.float8_e4m3fn), torch.empty(0, 2), torch.empty(0, 3))
    assert same(X, X.clone(), X.T.contiguous().T, torch.stack([X, X], 2)[..., 0], X.clone().requires_grad_())
    assert same(torch.tensor([1 - 1j]), torch.tensor([1 + 1j]).conj())
    assert different(torch.tensor(1.0), torch.tensor(2.0), torch.tensor([1.0]), 1.0)


def test_sparse_and_meta_tensors_have_fingerprints():
    assert different(X.to_sparse(), X, (X + 1).to_sparse(), X.to_sparse() * 2)
    with warnings.catch_warnings(action="ignore"):          # PyTorch calls the format a beta version
        assert different(X.to_sparse_csr(), (X * 2).to_sparse_csr())
    assert different(X.to("meta"), X.T.to("meta"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_device_of_a_tensor_does_not_count():
    assert same(X, X.cuda(), X.T.contiguous().cuda().T)


def test_arrays_count_by_dtype_shape_and_content():
    a = np.arange(6.0).reshape(2, 3)
    assert different(a, a + 1, a.T, a.ravel(), a.astype("f4"), a.tolist(), np.float64(0), np.array(0.0))
    assert same(a, a.copy(), np.asfortranarray(a), np.repeat(a, 2, axis=0)[::2])
    assert different(np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[1, 0]))
    structured = np.zeros(2, dtype=[("a", "i4"), ("b", "f8")])
    assert different(structured, np.ones_like(structured))


def test_arrays_of_objects_count_by_the_objects():
    def array(value):
        return np.array([{"a": [value]}, "b", None], dtype=object)

    assert same(array(1), array(1))
    assert different(array(1), array(2))


@pytest.mark.parametrize("make", [torch.tensor, np.array], ids=["tensor", "array"])
def test_large_arrays_are_sampled(make, monkeypatch):
    monkeypatch.setattr(module, "LARGE", 8 * 5000)
    values = list(range(5001))
    large = make(values)
    changed = make(values)
    changed[1] = -1                                         # rows 0, 4 or 5, ..., 5000 are in the sample
    assert same(large, changed)
    changed[-1] = -1
    assert different(large, changed, make(values[1:]))
    assert different(make(values[1:]), make([*values[1:3], -1, *values[4:]]))


def test_a_large_array_in_a_dataset_is_sampled(monkeypatch):
    class Own(Dataset):
        def __init__(self, data, labels):
            self.data, self.labels = data, labels

    monkeypatch.setattr(module, "LARGE", 8 * 5000)
    data, labels = torch.zeros(5001, 2), torch.zeros(5001)
    changed = data.clone()
    changed[1] = 1
    assert same(Own(data, labels), Own(changed, labels))
    assert different(Own(data, labels), Own(data + 1, labels), Own(data, labels + 1), TensorDataset(data, labels))


LOSS = """
    SCALE = 2.0

    def helper(x):
        return x * SCALE

    def loss(output, target, weight=1.0, *, power=2):
        return weight * (helper(output) - target).abs() ** power
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x * SCALE", "x + SCALE"),
        ("SCALE = 2.0", "SCALE = 3.0"),
        ("SCALE = 2.0", "SCALE = 2"),
        ("weight=1.0", "weight=1.5"),
        ("power=2", "power=3"),
        ("abs()", "exp()"),
        ("- target", "- 1 - target"),
        ("output, target", "target, output"),
    ],
)
def test_a_change_of_a_function_or_of_what_it_uses_counts(load, old, new):
    changed = LOSS.replace(old, new)
    assert changed != LOSS
    assert different(load(LOSS).loss, load(changed).loss)
    assert different(executed(LOSS)["loss"], executed(changed)["loss"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SCALE = 2.0", "# a comment\n\n    SCALE = 2.0    # another"),
        ("return weight", "# a comment\n        return weight"),
        ("return weight", '"""A docstring."""\n        return weight'),
        ("(helper(output) - target)", "(\n            helper( output )\n            -target\n        )"),
        ("def helper", "def unused():\n        return SCALE\n\n    def helper"),
        ("SCALE = 2.0", "unused = 3; SCALE = 2.0"),
    ],
)
def test_comments_docstrings_formatting_and_other_definitions_do_not_count(load, old, new):
    changed = LOSS.replace(old, new)
    assert changed != LOSS
    assert same(load(LOSS).loss, load(LOSS).loss, load(changed).loss)
    assert same(executed(LOSS)["loss"], executed(changed)["loss"])


def test_the_order_of_definitions_does_not_count(load):
    first, second = "def f(n):\n    return n and g(n - 1)\n", "def g(n):\n    return n or f(n - 1)\n"
    one, other = load(first + second), load(second + first)
    assert same(one.f, other.f)
    assert same({one.f, one.g}, {other.f, other.g})
    assert different(one.f, one.g)


def test_source_is_used_where_there_is_some(load):
    source = 'def f(x):\n    """Doc."""\n    return  x  # same\n\n\ng = [(lambda x: x+1), (lambda  x:  x + 2)]\n'
    user = load(source)
    assert module._source(user.f.__code__, {}) == "def f(x):\n    return x"
    assert [module._source(g.__code__, {}) for g in user.g] == ["lambda x: x + 1", "lambda x: x + 2"]
    assert module._source(executed(source)["f"].__code__, {}) is None


def test_calls_do_not_count():
    f = executed("def f(x):\n    return [x + i for i in range(3)]")["f"]
    before = fingerprint(f)
    for _ in range(1000):                                   # Python specializes the bytecode
        f(1)
    assert fingerprint(f) == before


def test_the_code_that_runs_counts_rather_than_the_file(load):
    old, new = "def f():\n    return 1\n", "def f():\n    return 2\n"
    user, other = load(old), load(new)
    before, path = fingerprint(user.f), Path(user.__file__)
    path.write_text("# a comment\n\n" + old)
    assert fingerprint(user.f) == before
    path.write_text(new + "# another length, since linecache compares sizes and times\n")
    assert different(user.f, other.f)
    user.__loader__.exec_module(user)                       # as importlib.reload does
    assert same(user.f, other.f)


def test_attributes_of_the_users_modules_count(load):
    def user(scale):
        helpers = load(f"SCALE = {scale}\ndef helper(x): return x * SCALE\ndef other(): return SCALE")
        helpers.__name__ = "helpers"
        return load("def f(x): return helpers.helper(x)\ndef g(x): return x.helper, helpers", helpers=helpers)

    assert same(user(1).f, user(1).f)
    assert different(user(1).f, user(2).f)
    assert same(user(1).g, user(2).g)


def test_the_place_of_a_module_does_not_count(load):
    source = "def f(): return __file__, __name__"
    assert same(load(source).f, load(source).f)


def test_closures_count():
    def scaled(factor):
        def f(x):
            return factor * x

        return f

    assert same(scaled(2), scaled(2))
    assert different(scaled(2), scaled(3), scaled(torch.ones(2)), scaled(torch.zeros(2)))


def test_attributes_of_functions_count(load):
    one, other = load(LOSS), load(LOSS)
    other.loss.name = "mine"
    assert different(one.loss, other.loss)


def test_lambdas_on_one_line_differ(load):
    pair = [lambda x: x + 1, lambda x: x + 2]
    assert different(*pair)
    source = "f, g, h = lambda x: x + 1, lambda x: x * 2, lambda x: (lambda y: x + y)"
    one = load(source)
    other = load("# a comment\nf = (lambda\n    x: x+1)\ng = [lambda x: (x * 2)][0]\nh = lambda x: lambda y: x + y")
    assert different(one.f, one.g, one.h, one.h(1), one.h(2))
    assert same(one.f, other.f)
    assert same(one.g, other.g)
    assert same(one.h, other.h)
    assert same(one.h(1), other.h(1))
    assert same(executed(source)["g"], executed("\n\ng = lambda x: (x * 2)  # twice")["g"])


def test_globals_of_nested_code_count(load):
    source = "A = {}\ndef f(xs):\n    return [(lambda: x + A)() for x in xs]"
    assert different(load(source.format(1)).f, load(source.format(2)).f)
    assert different(executed(source.format(1))["f"], executed(source.format(2))["f"])


def test_partials_methods_and_wrapped_functions_count_by_what_they_hold(load):
    source = """
        import functools
        import torch

        def f(x, y=1):
            return x + y + {0}

        class Scaled:
            def __init__(self, factor):
                self.factor = factor

            def apply(self, x):
                return self.factor * x + {0}

            @classmethod
            def of(cls, x):
                return x + {0}

            @staticmethod
            def plain(x):
                return x + {0}

        def decorated(f):
            @functools.wraps(f)
            def wrapper(*arguments):
                return f(*arguments)
            return wrapper

        cached = functools.lru_cache(maxsize=3)(f)
        smaller = functools.lru_cache(maxsize=2)(f)
        wrapped = decorated(f)
        without_grad = torch.no_grad()(f)
        vectorized = torch.func.vmap(f)
        transposed = torch.func.vmap(f, in_dims=1)
        one, two = functools.partial(f, y=1), functools.partial(f, y=2)
        bound, other, of, plain = Scaled(1).apply, Scaled(2).apply, Scaled.of, Scaled.plain
    """
    names = ["f", "cached", "smaller", "wrapped", "without_grad", "vectorized", "transposed", "one", "two"]
    names += ["bound", "other", "of", "plain", "Scaled"]
    zero, again, one = (load(source.format(number)) for number in (0, 0, 1))
    assert different(*(getattr(zero, name) for name in names))
    for name in names:
        assert same(getattr(zero, name), getattr(again, name)), name
        assert different(getattr(zero, name), getattr(one, name)), name


def test_library_things_count_by_name():
    def parts(thing):
        return module._parts(thing)

    assert parts(functional.cross_entropy) == ("function torch.nn.functional.cross_entropy", [])
    assert parts(nn.Linear) == ("class torch.nn.modules.linear.Linear", [])
    assert parts(textwrap.dedent) == ("function textwrap.dedent", [])
    assert parts(int) == ("class builtins.int", [])
    assert parts(fingerprint) == ("function quasiglobal.common.fingerprint.fingerprint", [])
    assert different(functional.relu, functional.gelu, functional.max_pool1d, functional.max_pool2d, torch, np)
    assert different(torch.relu, torch.exp, np.exp, np.sin, math.exp, math.sin, len, sorted, str.upper, str.lower)
    assert different(torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)


CLASS = """
    class Base:
        def offset(self):
            return 1

    class Metric(Base):
        threshold = 0.5

        def __init__(self):
            super().__init__()

        def __call__(self, x):
            return x > self.threshold + self.offset()

        @property
        def name(self):
            return "metric"

        @staticmethod
        def version():
            return 3
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return 1", "return 2"),
        ("0.5", "0.6"),
        ("x > self", "x < self"),
        ('"metric"', '"other"'),
        ("return 3", "return 4"),
        ("Metric(Base)", "Metric"),
        ("(Base)", "(Base, dict)"),
    ],
)
def test_the_code_and_the_attributes_of_classes_count(load, old, new):
    changed = CLASS.replace(old, new)
    assert changed != CLASS
    assert different(load(CLASS).Metric, load(changed).Metric)
    assert different(load(CLASS).Metric(), load(changed).Metric())
    assert different(executed(CLASS)["Metric"], executed(changed)["Metric"])


def test_comments_and_docstrings_of_classes_do_not_count(load):
    edited = CLASS.replace("threshold =", '"""A docstring."""\n\n        # a comment\n        threshold =')
    assert edited != CLASS
    assert same(load(CLASS).Metric, load(edited).Metric)
    assert same(load(CLASS).Metric(), load(edited).Metric())
    assert same(executed(CLASS)["Metric"], executed(edited)["Metric"])


def test_classes_local_to_a_function_count_by_their_code():
    def local(bonus):
        class Local:
            def f(self):
                return bonus

        return Local

    def other():
        class Local:
            def f(self):
                return 1 + 1

        return Local

    assert same(local(1), local(1))
    assert same(local(1)(), local(1)())
    assert different(local(1), local(2), other())


@dataclasses.dataclass
class Point:
    x: object = 0
    tags: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: int = 0


class Plain:
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __getstate__(self):
        raise RuntimeError("user code")

    def __repr__(self):
        raise RuntimeError("user code")

    __hash__ = __eq__ = __len__ = __reduce_ex__ = __repr__

    @functools.cached_property
    def twice(self):
        return 2


def test_instances_count_by_class_and_attributes():
    assert same(Point(1), Point(1))
    assert same(Slotted(1), Slotted(1))
    assert same(Plain(a=1, b=2), Plain(b=2, a=1))
    assert different(Point(1), Point(2), Point(1, [3]), Slotted(1), Slotted(2), Plain(x=1), Plain(x=Plain(x=1)))


def test_a_cached_property_does_not_count():
    plain = Plain()
    before = fingerprint(plain)
    assert plain.twice == 2
    assert fingerprint(plain) == before


def test_a_parent_in_an_instance_ends():
    child = Plain(name="child")
    child.parent = Plain(children=[child])
    assert fingerprint(child) != fingerprint(child.parent)


class Net(nn.Module):
    def __init__(self, eps=1e-5, activation=functional.relu):
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3, eps=eps)
        self.second = nn.Linear(2, 3)
        self.activation = activation
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.5)

    def forward(self, x):
        return self.activation(self.norm(self.first(x)))


def test_models_count_by_structure_and_weights():
    assert same(Net(), Net(), Net().eval())
    changed, frozen, buffer, tied, hooked = Net(), Net(), Net(), Net(), Net()
    with torch.no_grad():
        changed.first.weight[0, 0] += 1
    frozen.first.weight.requires_grad_(False)
    buffer.norm.running_mean += 1
    tied.second.weight = tied.first.weight
    hooked.register_forward_hook(lambda *_: None)
    activations = [Net(activation=f) for f in (functional.gelu, lambda x: x, lambda x: x + 1)]
    assert different(Net(), changed, frozen, buffer, tied, hooked, Net(eps=1e-3), *activations)
    assert different(nn.MaxPool2d(2), nn.MaxPool2d(3), nn.AvgPool2d(2), nn.Dropout(0.1), nn.Dropout(0.2))


def test_submodules_have_an_order():
    layers = [("a", nn.ReLU()), ("b", nn.Tanh())]
    assert different(*(nn.Sequential(collections.OrderedDict(order)) for order in (layers, layers[::-1])))


def test_compiled_models_and_functions_count_by_their_content():
    assert same(torch.compile(Net(), backend="eager"), torch.compile(Net(), backend="eager"))
    assert different(torch.compile(Net(), backend="eager"), torch.compile(Net(eps=1e-3), backend="eager"))
    assert different(*(torch.compile(f, backend="eager") for f in (linked, same)))


def test_random_state_counts_by_class():
    used = random.Random(1)
    used.random()
    assert same(random.Random(1), random.Random(2), used)
    assert same(torch.Generator().manual_seed(1), torch.Generator().manual_seed(2))
    assert same(np.random.default_rng(1), np.random.default_rng(2))
    assert different(random.Random(1), torch.Generator(), np.random.default_rng(1))


class Raising(type):
    def __eq__(cls, other):
        raise RuntimeError("user code")                     # also makes the class unhashable


class Strange(metaclass=Raising):
    @property
    def __dict__(self):
        raise RuntimeError("out of reach")


def test_strange_objects_never_raise(tmp_path):
    with open(tmp_path / "a", "w") as one, open(tmp_path / "b", "w") as other:
        assert same(one, other)
    assert same(threading.Lock(), threading.Lock())
    assert same((i for i in range(3)), (i for i in range(3)))
    assert same(Strange(), Strange())
    empty = (lambda: later) if True else (later := 1)
    half = nn.Module.__new__(nn.Module)
    for thing in (Strange, empty, half, sys, sys._getframe(), os.environ, logging.getLogger("a"), object(), iter([])):
        assert fingerprint(thing) == fingerprint(thing)


PROGRAM = LOSS + CLASS + """
    import logging
    import sys
    import torch
    import numpy as np
    from quasiglobal.common.fingerprint import fingerprint

    log = logging.getLogger("mine")

    def f(x):
        log.info(x)
        return {"a", "b", "c", "d", "e"} & {x for x in ("a", "b")}

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)
            torch.nn.init.ones_(self.layer.weight)
            torch.nn.init.ones_(self.layer.bias)

        def forward(self, x):
            return f(self.layer(x))

    code = {}
    exec("def g(x): return x in {'a', 'b', 'c', 'd', 'e'}", code)
    things = [loss, Metric(), Net(), f, code["g"], lambda x: x + 1, {"a", "b", "c", 1, None}, {"x": 1, "y": {2, 3}}]
    things += [{Metric: 1, Net: 2, loss: 3, f: 4}, np.array(["a", None], dtype=object), object(), open(sys.argv[0])]
    print(*(fingerprint(thing) for thing in [*things, things]))
"""


def test_processes_agree(tmp_path):
    def run(folder, seed):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / f"program_{seed}.py"
        path.write_text(textwrap.dedent(PROGRAM))
        environment = os.environ | {"PYTHONHASHSEED": seed}
        return subprocess.Popen([sys.executable, path], env=environment, stdout=subprocess.PIPE, text=True)

    outputs = [process.communicate(timeout=60)[0].split() for process in (run("a", "1"), run("b", "2"))]
    assert len(set(outputs[0])) == 13
    assert outputs[0] == outputs[1]
