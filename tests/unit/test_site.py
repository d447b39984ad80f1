"""The documentation site: every public name has a page and a docstring; links, images and anchors lead somewhere."""

import inspect
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import quasiglobal as qg

ROOT = Path(__file__).parents[2]

SECTIONS = [
    "Start", "Your model and data", "Tutorials", "How-to", "Choosing a method", "API reference", "The paper", "Results",
    "Performance", "Architecture", "Extending",
]

REFERRED = {"quasiglobal.minimize": "quasiglobal.minimize.minimize"}
"""Names that are both a function of `qg` and the module of that function."""


def public_names():
    """The full names of everything public: of `qg`, and of its modules."""
    for name in qg.__all__:
        found = getattr(qg, name)
        if not inspect.ismodule(found):
            yield f"quasiglobal.{name}"
            continue
        own = [key for key, value in vars(found).items() if getattr(value, "__module__", None) == found.__name__]
        for member in getattr(found, "__all__", own):
            if not member.startswith("_") and getattr(found, member) is not qg.Topology:
                yield f"{found.__name__}.{member}"


def found(name):
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules[module], attribute)


def documented():
    pages = (ROOT / "docs" / "api").glob("*.md")
    return [name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)]


def test_every_public_name_is_in_the_reference_once():
    names = documented()
    assert len(names) == len(set(names))
    assert {REFERRED.get(name, name) for name in public_names()} <= set(names)


def test_every_public_name_has_a_docstring():
    data = {"quasiglobal.ALGORITHMS", "quasiglobal.State"}          # docstrings below the assignment, for the site
    lacking = []
    for name in set(public_names()) - data:
        one = found(name)
        members = [
            (f"{name}.{key}", value) for key, value in vars(one).items()
            if not key.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
        ] if inspect.isclass(one) else []
        # An overridden method has the docstring of the base class.
        lacking += [key for key, value in [(name, one), *members] if not inspect.getdoc(value)]
    assert lacking == []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make docs` builds it."""
    if find_spec("mkdocstrings") is None:
        pytest.skip("needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300,
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


class Page(HTMLParser):
    """Links, sources and anchors of a page, and the text of its tabs."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loaded, self.anchors, self.tabs = [], [], set(), []
        self._in_tab = False
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in ("img", "script", "link", "source", "iframe"):
            relation = given.get("rel", "")
            self.loaded += [given[key] for key in ("src", "href") if given.get(key) and relation != "canonical"]
        self._in_tab = tag == "a" and given.get("class") == "md-tabs__link"
        if self._in_tab:
            self.tabs.append("")

    def handle_data(self, text):
        if self._in_tab:
            self.tabs[-1] += text.strip()

    def handle_endtag(self, tag):
        self._in_tab = self._in_tab and tag != "a"


@pytest.mark.slow
def test_the_site_builds_strictly_and_nothing_leads_nowhere(site):
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 35
    broken = []
    for path, page in pages.items():
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "data", "mailto"):
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


@pytest.mark.slow
def test_the_site_needs_no_network(site):
    loaded = [link for path in site.rglob("*.html") for link in Page(path).loaded]
    assert [link for link in loaded if urlsplit(link).scheme in ("http", "https")] == []
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"url\(['\"]?https?:[^)]*\)|@import[^;]*https?:[^;]*", styles) == []


@pytest.mark.slow
def test_the_sections_are_in_their_order(site):
    assert Page(site / "index.html").tabs == SECTIONS


@pytest.mark.slow
def test_the_reference_shows_every_public_name(site):
    anchors = set().union(*(Page(path).anchors for path in (site / "api").glob("*.html")))
    assert set(documented()) <= anchors


@pytest.mark.slow
def test_run_folders_are_left_out(site):
    assert not list(site.rglob("metrics.jsonl"))
    assert (site / "results" / "report.html").read_bytes() == (ROOT / "docs" / "results" / "index.html").read_bytes()
