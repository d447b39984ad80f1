"""Structure of the package: public names, one definition of each update, and rooms that work by themselves.

The layers and the independence of packages are contracts in pyproject.toml (`make lint`).
"""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import quasiglobal as qg

ROOT = Path(qg.__file__).parent


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


def part(module):
    """The layer that a module belongs to."""
    return module.split(".")[1] if "." in module else "quasiglobal"


def test_the_whole_package_is_imported_by_the_command_line_alone():
    assert {name for name, path in MODULES.items() if "quasiglobal" in imports(path)} == {"quasiglobal.cli"}


def test_cryptography_is_loaded_only_when_needed():
    first = [path for path in MODULES.values() for node in ast.parse(path.read_text()).body
             if isinstance(node, ast.Import | ast.ImportFrom) and "cryptography" in ast.unparse(node)]
    assert first == []


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


ALONE = """
import runpy, sys
from importlib.abc import MetaPathFinder

class Closed(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        room = name.split(".")[1] if name.startswith("quasiglobal.") else ""
        if room not in ("", "errors", "common", {room!r}):
            raise ImportError(f"{{name}} is closed")

sys.meta_path.insert(0, Closed())
"""


def test_stacked_trains_an_ensemble_with_the_rest_of_the_package_closed(tmp_path):
    script = ALONE.format(room="stacked") + f"runpy.run_path({str(ROOT.parents[1] / 'examples' / 'ensemble.py')!r})"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the ensemble in" in done.stdout
