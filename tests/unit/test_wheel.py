"""The wheel: it holds the package and its data files, and works where nothing else of the repository is."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the sources: the build leaves files behind. Needs hatchling, or a network to get it."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    built = subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(source)], capture_output=True, text=True
    )
    if "hatchling" in built.stderr and "No matching distribution" in built.stderr:
        pytest.skip("hatchling cannot be downloaded")
    assert built.returncode == 0, built.stderr
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    source = ROOT / "src"
    files = {
        path.relative_to(source).as_posix() for path in (source / "quasiglobal").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"quasiglobal/py.typed", "quasiglobal/reproduction/paper/published.toml"} <= files
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in packed if ".dist-info/" not in name} == files


@pytest.mark.slow
def test_an_installed_wheel_works_in_an_empty_folder(wheel, tmp_path):
    """The environment is new; packages it depends on are linked from this one, which takes no download."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--no-deps", str(wheel)], check=True)
    here = Path(sysconfig.get_paths()["purelib"])
    for entry in here.iterdir():                # not of ours, whose editable install is a .pth file
        if "quasiglobal" not in entry.name and entry.suffix != ".pth" and not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)
    folder = tmp_path / "empty"
    folder.mkdir()

    def qg(*words):
        alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
        ran = subprocess.run(
            [python.parent / "qg", *words], cwd=folder, env=alone, capture_output=True, text=True, timeout=1800
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    where = subprocess.run(
        [python, "-I", "-c", "import quasiglobal; print(quasiglobal.__file__)"], capture_output=True, text=True
    )
    assert where.stdout.startswith(str(packages))
    assert qg("--version").startswith("qg ")
    qg("demo", "--out", "out")
    assert {"demo.png", "demo.svg", "demo.csv"} <= {path.name for path in (folder / "out").iterdir()}
    qg("reproduce", "adam", "--scale", "smoke")
    qg("report", "--runs", "runs", "--out", "report")
    assert (folder / "report" / "index.html").stat().st_size > 100_000
