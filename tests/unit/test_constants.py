"""Sites with different data agree on one normalisation before the run."""

import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from terminal import inside

from quasiglobal.data.dataset import deviations, moments, pooled, spread
from quasiglobal.peers.folders import OrganiserFolder, SiteFolder
from quasiglobal.runs.building import data_of
from quasiglobal.training.experiment import from_toml

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "how-to" / "federation.md").read_text()

NAMES = ("aachen", "basel", "cork")


def images(name, count, low, high, classes=3):
    """Write images of this many examples and shades; return the training examples."""
    rng = np.random.default_rng(count)
    x = rng.integers(low, high, (count, 3, 5, 6), dtype=np.uint8)
    np.savez(name, x=x, y=np.arange(count) % classes, x_test=x[:3], y_test=np.arange(3) % classes)
    return x


@pytest.fixture
def sites(tmp_path, monkeypatch, capsys):
    """Three sites with different images, and their organiser."""
    monkeypatch.chdir(tmp_path)
    organiser = OrganiserFolder(Path("organiser"))
    organiser.new("tumours", "complete:3", 30)
    folders = [SiteFolder(Path(name)) for name in NAMES]
    asked = [site.request("tumours", name, f"{name}.example:1")[1] for name, site in zip(NAMES, folders, strict=True)]
    organiser.approve(asked, 3, [])
    for site in folders:
        site.pin(organiser.file.read_bytes(), "it")
        site.accept(organiser.file.read_bytes())
    x = [images("aachen", 30, 0, 90), images("basel", 7, 60, 256, classes=2), images("cork", 101, 10, 11, classes=4)]
    Path("experiment.toml").write_text('topology = "complete:3"\nmodel = "mlp"')

    def told(name, *words):
        """What a site's command says, and its file."""
        status, out, err = inside(
            monkeypatch, capsys, "site", "constants", words[0] if words else f"{name}.npz", *words[1:], "--folder", name
        )
        assert (status, err) == (0, "")
        return out, Path(name, f"constants-{name}.json")

    def pool(*paths, experiment="experiment.toml"):
        words = ("--experiment", experiment, "--folder", "organiser")
        return inside(monkeypatch, capsys, "federation", "constants", *map(str, paths), *words)

    return SimpleNamespace(folders=folders, x=x, told=told, pool=pool)


def test_sites_normalise_alike_by_the_constants_of_all_their_data(sites):
    before = [data_of(from_toml(Path("experiment.toml")), None, f"folder:{name}.npz").mean for name in NAMES]
    assert len({*before}) == 3
    said, _ = sites.told("aachen")
    assert "It tells the organiser: 30 training examples, with the mean and variance of each channel;" in said
    paths = [sites.told(name)[1] for name in NAMES]
    status, _, err = sites.pool(*paths)
    assert (status, err) == (0, "")
    mean, std = moments(torch.from_numpy(np.concatenate(sites.x)), 255)
    agreed = from_toml(Path("experiment.toml"))
    assert agreed.mean == pytest.approx(mean, rel=1e-12, abs=0)
    assert agreed.std == pytest.approx(std, rel=1e-12, abs=0)
    assert (agreed.classes, agreed.shape, agreed.model) == (("0", "1", "2", "3"), (3, 5, 6), "mlp")
    after = [data_of(agreed, None, f"folder:{name}.npz") for name in NAMES]
    assert {(one.mean, one.std, one.classes, one.shape) for one in after} == {
        (agreed.mean, agreed.std, agreed.classes, agreed.shape)
    }
    first = Path("experiment.toml").read_bytes()
    assert sites.pool(*paths)[0] == 0                       # again: nothing changes
    assert Path("experiment.toml").read_bytes() == first
    assert not any(str(number) in first.decode() for number in (30, 101)), "the other sites learn no single site's"


def test_the_guide_shows_what_the_command_says(sites):
    runpy.run_path(str(ROOT / "examples" / "four_hospitals.py"), run_name="__main__")
    Path("aachen").rename("site")
    sites.folders[0] = SiteFolder(Path("site"))
    said, _ = sites.told("site", "hospital-0")
    (shown,) = re.findall(r"^\$ qg site constants ./images\n(.*?)```", GUIDE, re.MULTILINE | re.DOTALL)
    assert said.lstrip("\n") == shown                      # without the place of the progress bar


def test_features_with_a_large_mean_lose_no_digits():
    rng = np.random.default_rng(0)
    parts = [torch.from_numpy(rng.normal(1e3, 1 + k, (50 + 9 * k, 3))) for k in range(3)]
    mean, variance = pooled([(len(part), *spread(part, 1.0)) for part in parts])
    exact = moments(torch.cat(parts), 1.0)
    assert mean == pytest.approx(exact[0], rel=1e-14, abs=0)
    assert deviations(variance) == pytest.approx(exact[1], rel=1e-12, abs=0)
    assert deviations((0.0, 4.0)) == (1.0, 2.0)


def test_a_table_tells_its_columns_and_texts_tell_only_their_classes(sites):
    for name, columns in (("aachen", "age,size,kind"), ("basel", "size,age,kind")):
        Path(f"{name}.csv").write_text(columns + "\n" + "".join(f"{k},{3 * k},{'ab'[k % 2]}\n" for k in range(20)))
    said, _ = sites.told("aachen", "aachen.csv", "--label", "kind")
    assert "16 training examples, with the mean and variance of each channel; shape 2; columns age, size" in said
    paths = [sites.told(name, f"{name}.csv", "--label", "kind")[1] for name in NAMES[:2]]
    status, _, err = sites.pool(*paths)
    assert status == 2
    assert "the features at aachen is ['age', 'size'], but at basel ['size', 'age']; give all data one form" in err
    Path("notes.csv").write_text("label,text\n" + "".join(f"{'ab'[k % 2]},word {k}\n" for k in range(20)))
    said, path = sites.told("cork", "notes.csv")
    assert "It tells the organiser: classes a, b." in said
    status, out, _ = sites.pool(path)
    assert status == 0
    assert "Without aachen, basel, of which no file was named." in out
    assert Path("experiment.toml").read_text().endswith('model = "mlp"\nclasses = ["a", "b"]\n')


def test_what_does_not_fit_is_one_sentence_and_changes_nothing(sites):
    paths = [sites.told(name)[1] for name in NAMES]
    signed = json.loads(paths[0].read_bytes())

    def resigned(**changes):
        document = {key: value for key, value in signed.items() if key not in ("signature", "federation", "site")}
        return sites.folders[0].sign("constants", document | changes)

    before = Path("experiment.toml").read_bytes()
    for changes, why in (
        *((wrong, "impossible") for wrong in (
            {"examples": 0}, {"mean": [0.1]}, {"variance": [0.1, 0.1, -1.0]}, {"mean": [0.1, 0.1, float("nan")]},
            {"mean": [0.1, 0.1, 10**400]}, {"classes": "0"}, {"classes": [[]]}, {"shape": [3, -5, 6]}, {"more": 1},
            {"shape": []}, {"examples": 10**400}, {"examples": 10**13}, {"classes": ["9" * 5000]},
        )),
        ({"shape": [3, 5, 5]}, "the shape at aachen is [3, 5, 5], but at basel [3, 5, 6]"),
        ({"classes": ["benign"]}, "only one of aachen and basel has numbers for classes"),
    ):
        status, _, err = sites.pool(resigned(**changes), paths[1])
        assert (status, len(err.splitlines())) == (2, 1)
        assert why in err
    paths[0].write_bytes(paths[0].read_bytes().replace(b"30", b"31"))
    assert "was changed, or signed by another key" in sites.pool(*paths)[2]
    assert "is a second file of basel" in sites.pool(paths[1], paths[1])[2]
    assert "is not of a site of federation tumours" in sites.pool(sites.folders[1].path / "request-basel.json")[2]
    assert Path("experiment.toml").read_bytes() == before
    Path("has.toml").write_text("mean = [0.5, 0.5, 0.5]\n")
    status, _, err = sites.pool(*paths[1:], experiment="has.toml")
    assert status == 2
    assert "has.toml has another mean, [0.5, 0.5, 0.5]; delete this line, then run the command again" in err
    Path("kept.json").write_text("{}")
    assert "kept.json is JSON; name the experiment's TOML file" in sites.pool(*paths[1:], experiment="kept.json")[2]
    assert Path("kept.json").read_text() == "{}"
    Path("order.toml").write_text('classes = ["3", "2", "1", "0", "rare"]\n')
    assert sites.pool(*paths[1:], experiment="order.toml")[0] == 0      # more classes, in an order of the user's own


@pytest.mark.parametrize(("changes", "doubt"), [
    ({}, None),
    ({"examples": 10**9}, "cork has 100 % of all examples; ask whether that is so"),
    ({"mean": [0.0, 0.0, 9e9]}, "cork has a mean or spread of channel 2 far from the others'; ask whether its data"),
    ({"variance": [0.0, 1e9, 0.0]}, "cork has a mean or spread of channel 1 far from the others'; ask whether its"),
])
def test_a_site_that_decides_the_constants_by_unusual_numbers_is_named(sites, changes, doubt):
    paths = [sites.told(name)[1] for name in NAMES[:2]]
    signed = json.loads(paths[0].read_bytes())
    document = {key: value for key, value in signed.items() if key not in ("signature", "federation", "site")}
    status, out, _ = sites.pool(*paths, sites.folders[2].sign("constants", document | changes))
    assert status == 0
    assert doubt in out if doubt else "⋆" not in out
