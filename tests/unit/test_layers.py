"""A module imports downwards only, and nothing else knows of the terminal."""

import ast
from pathlib import Path

import quasiglobal

ROOT = Path(quasiglobal.__file__).parent

LAYERS = [
    ["__main__"],
    ["cli"],
    ["paper"],
    ["report"],
    ["runs"],
    ["training"],
    ["checks", "optim"],
    ["minimize"],
    ["engines"],
    ["gradients"],
    ["models"],
    ["data"],
    ["algorithms", "topology"],
    ["common"],
    ["errors"],
]
"""From the top down; a module may import from layers below its own, and a package from itself."""

RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part(module):
    """The part of the package that a dotted name belongs to."""
    names = module.split(".")
    return names[1] if names[0] == "quasiglobal" and len(names) > 1 and names[1] in RANK else None


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if name != "__init__":
            yield path, name


def test_every_module_has_a_layer():
    assert {name for _, name in modules()} == set(RANK)


def test_imports_point_downwards():
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path, name in modules()
        for module in imports(path)
        if (target := part(module)) and target != name and RANK[target] <= RANK[name]
    ]
    assert wrong == []


def importers(package):
    return [name for path, name in modules() if package in {name.split(".")[0] for name in imports(path)}]


def test_only_the_command_line_knows_of_tyro_and_of_the_whole_package():
    assert importers("tyro") == importers("rich") == ["cli"]
    assert [name for path, name in modules() if "quasiglobal" in imports(path)] == ["cli"]


def updates(path):
    """The bodies of all functions in a file that have the shape of `Algorithm.step`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and [a.arg for a in node.args.args] == STEP:
            yield f"{path.name}:{node.lineno}", ast.dump(ast.Module(node.body, []))


STEP = ["self", "x", "g", "state", "node"]


def test_each_update_is_written_once_and_in_algorithms():
    places = {}
    for path, name in modules():
        for place, body in updates(path):
            assert name == "algorithms", f"{place} writes an algorithm outside of algorithms/"
            places.setdefault(body, []).append(place)
    assert len(places) >= 11
    assert [same for same in places.values() if len(same) > 1] == []
