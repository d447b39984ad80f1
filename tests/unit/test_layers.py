"""Structure of the package: allowed imports, file lengths and public names."""

import ast
import subprocess
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import quasiglobal as qg

ROOT = Path(qg.__file__).parent

LAYERS = [
    ["__main__"],
    ["cli"],
    ["leaderboard"],
    ["paper"],
    ["api"],
    ["report"],
    ["callbacks"],
    ["runs"],
    ["training"],
    ["checks", "optim"],
    ["minimize"],
    ["engines"],
    ["gradients"],
    ["models"],
    ["data"],
    ["federation"],
    ["algorithms", "metrics", "topology"],
    ["common"],
    ["errors"],
]
"""Layers from top to bottom. A module may import from lower layers and from its own package."""

RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

MOST_AT_THE_TOP = 10
MOST_LINES = 400
MOST_IMPORTS = 12


def dotted(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports(path):
    """Yield the full names of modules and objects that a file imports, also under `if TYPE_CHECKING`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(path):
    """The modules of this package that a file imports."""
    found = set()
    for name in imports(path):
        parent = name.rpartition(".")[0]
        if name in MODULES:
            found.add(name)
        elif parent in MODULES:
            found.add(parent)
    return found - {dotted(path)}


def part(module):
    """The layer that a module belongs to."""
    return module.split(".")[1] if "." in module else "quasiglobal"


def test_every_module_has_a_layer():
    assert {part(name) for name in MODULES} == {"quasiglobal", *RANK}


def test_imports_point_downwards():
    wrong = [
        f"{name} imports {target}"
        for name, path in MODULES.items()
        if name != "quasiglobal"
        for target in ours(path)
        if target != "quasiglobal" and part(target) != part(name) and RANK[part(target)] <= RANK[part(name)]
    ]
    assert wrong == []


def test_there_are_no_cycles():
    graph = {name: ours(path) - {"quasiglobal"} for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a cycle: {' → '.join(error.args[1])}")


def test_the_whole_package_is_imported_by_the_command_line_alone():
    assert {name for name, path in MODULES.items() if "quasiglobal" in imports(path)} == {"quasiglobal.cli"}


@pytest.mark.parametrize("package", ["tyro", "rich"])
def test_only_the_command_line_knows_of_the_terminal(package):
    importers = {part(name) for name, path in MODULES.items() if package in {i.split(".")[0] for i in imports(path)}}
    assert importers <= {"cli", "api"}


def test_cryptography_is_loaded_only_when_needed():
    first = [path for path in MODULES.values() for node in ast.parse(path.read_text()).body
             if isinstance(node, ast.Import | ast.ImportFrom) and "cryptography" in ast.unparse(node)]
    assert first == []


def test_the_top_level_holds_what_users_import():
    top = [path for path in MODULES.values() if path.parent == ROOT]
    assert len(top) <= MOST_AT_THE_TOP, [path.name for path in top]


def test_files_are_short():
    lines = {name: len(path.read_text().splitlines()) for name, path in MODULES.items() if "kernels" not in name}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_a_module_imports_few_others():
    fan_out = {
        name: len(ours(path)) for name, path in MODULES.items() if path.name not in ("__init__.py", "__main__.py")
    }
    assert {name: count for name, count in fan_out.items() if count > MOST_IMPORTS} == {}


def test_the_public_names_are_all_that_dir_shows():
    assert dir(qg) == sorted(qg.__all__)
    assert all(hasattr(qg, name) for name in qg.__all__)


def public_classes(path):
    """Yield the public classes and type aliases of a file."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name[0].isupper() and not name.isupper() and not name.startswith("_"):
                yield name


def test_no_two_public_classes_have_one_name():
    counts = Counter(name for path in MODULES.values() for name in public_classes(path))
    assert {name: count for name, count in counts.items() if count > 1} == {}


LIGHT = """
import sys
sys.argv = ["qg", *{words!r}]
from quasiglobal.cli import main
try:
    main()
finally:
    heavy = sorted(name for name in ("torch", "numpy", "tyro", "rich", "networkx") if name in sys.modules)
    print("imported", heavy, file=sys.stderr)
"""


@pytest.mark.parametrize(("words", "status"), [(["--version"], 0), (["--help"], 0), (["trian"], 2)], ids=str)
def test_what_needs_no_pytorch_imports_none(words, status):
    done = subprocess.run([sys.executable, "-c", LIGHT.format(words=words)], capture_output=True, text=True)
    assert done.returncode == status
    assert done.stderr.endswith("imported []\n")
    if status:
        assert done.stderr.startswith("qg: unknown command 'trian'; did you mean 'train'?\n")


def updates(path):
    """Yield place and body of all functions in a file with the parameters of `Algorithm.step`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and [a.arg for a in node.args.args] == STEP:
            yield f"{path.name}:{node.lineno}", ast.dump(ast.Module(node.body, []))


STEP = ["self", "x", "g", "state", "node"]


def test_each_update_is_written_once_and_in_algorithms():
    places = {}
    for name, path in MODULES.items():
        for place, body in updates(path):
            assert part(name) == "algorithms", f"{place} defines an algorithm outside algorithms/"
            places.setdefault(body, []).append(place)
    assert len(places) >= 11
    assert [same for same in places.values() if len(same) > 1] == []
