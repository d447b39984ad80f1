"""The page in a real browser: it loads, sorts, filters and fits a phone."""

import shutil
from pathlib import Path

import pytest
from hand_made_stores import cell, leave

from quasiglobal.reproduction.leaderboard.standings import read_standings
from quasiglobal.reproduction.leaderboard.summary import leaderboard_document
from quasiglobal.reproduction.paper.summary import summary
from quasiglobal.reproduction.report.formats import write_report
from quasiglobal.runs.store import RunStore

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[browser]'")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")

SCORES = {"DSGD": [71, 72, 73], "DSGDm-N": [76, 77, 79], "QG-DSGDm-N": [81, 82, 83]}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    for row, scores in SCORES.items():
        leave(folder / "runs", cell("motivation", row, "ring 16, α = 0.1"), scores)
    leave(folder / "runs", cell("motivation", "QG-DSGDm-N", "ring 16, α = 0.1"), [80], lr=1.6)
    write_report(summary(RunStore.read(folder / "runs")), folder, ["html"])
    return (folder / "index.html").as_uri()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """The address of the leaderboard as its committed records make it."""
    folder = tmp_path_factory.mktemp("leaderboard")
    records = Path(__file__).parents[2] / "docs" / "results" / "leaderboard"
    write_report(leaderboard_document(read_standings(records)), folder, ["html"])
    return (folder / "index.html").as_uri()


@pytest.fixture
def visit(request, browser):
    """Return a function that opens the page; finally check for errors, console output and external requests."""
    address = request.getfixturevalue(getattr(request, "param", "address"))
    complaints, contexts = [], []

    def open_page(width=1280, colours="light", anchor=""):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=colours)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: request.url == address or complaints.append(request.url))
        page.goto(address + anchor)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [text for text in complaints if not text.startswith(address)] == []


def column(page, number):
    """Visible texts of a column of the motivation table, from top to bottom."""
    return page.locator(f"#motivation tbody tr:visible td:nth-child({number})").all_inner_texts()


def means(page):
    return [float(text.split()[0]) for text in column(page, 4) if text != "not run"]


def test_a_column_is_sorted_up_and_then_down_with_what_was_not_run_last(visit):
    page = visit()
    head = page.locator("#motivation th", has_text="ours")
    for state, expected in (("ascending", [72, 77.33, 82]), ("descending", [82, 77.33, 72])):
        head.get_by_role("button").click()
        assert head.get_attribute("aria-sort") == state
        assert means(page) == expected
        assert column(page, 4)[3:] == ["not run"] * 15
    page.locator("#motivation th", has_text="noise").get_by_role("button").click()
    assert all(column(page, 6)[:3]), "text columns are sorted too, empty cells last"
    page.locator("#motivation th", has_text="setting").get_by_role("button").click()
    assert head.get_attribute("aria-sort") is None
    settings = [text.replace("\u00a0", " ") for text in column(page, 2)]
    assert settings[::3] == sorted(set(settings), key=lambda text: (text[:4], float(text.split()[-1])))


def test_a_column_is_sorted_with_the_keyboard(visit):
    page = visit()
    page.locator("#motivation th", has_text="paper").get_by_role("button").focus()
    page.keyboard.press("Enter")
    scores = [float(text.split("\u00a0")[0]) for text in column(page, 3)]
    assert scores == sorted(scores)


def test_the_rows_of_one_algorithm_or_of_what_was_run_are_shown_alone(visit):
    page = visit()
    assert len(column(page, 1)) == 18
    page.get_by_label("Algorithm").select_option("qg-dsgdm-n")
    assert column(page, 1) == ["QG-DSGDm-N"] * 6
    page.get_by_label("only what was run").check()
    assert column(page, 1) == ["QG-DSGDm-N"]
    page.get_by_label("Algorithm").select_option("")
    assert sorted(column(page, 1)) == sorted(SCORES)
    page.get_by_label("Algorithm").select_option("d2")
    assert page.locator("#motivation .nothing").is_visible()


def test_a_link_leads_to_the_curves_and_opens_what_is_closed(visit):
    page = visit()
    page.locator("#motivation tbody a").first.click()
    assert page.evaluate("location.hash") == "#motivation-2"
    assert page.locator("#motivation-2 svg").first.is_visible()
    assert not page.locator("#weight-decay table").is_visible()
    page.locator('a[href="#weight-decay"]').click()
    page.locator("#weight-decay table").wait_for(state="visible", timeout=5000)


def test_a_square_tells_its_numbers_and_leads_to_its_row(visit):
    page = visit()
    tables = page.locator(".grid")
    ours = tables.first.get_by_role("link", name="QG-DSGDm-N, ring 16, α = 0.1")
    tip = page.locator("#tip")
    assert not tip.is_visible()
    ours.hover()
    assert tip.locator("p").all_inner_texts() == [
        "QG-DSGDm-N, ring 16, α = 0.1", "paper 82.20 ± 1.27", "ours 82.00 ± 1.00 (3)", "difference −0.20",
        "noise within ±2.65",
    ]
    ours.click()
    row = page.locator(":target")
    assert row.locator("td").first.inner_text() == "QG-DSGDm-N"
    assert row.is_visible()


def test_the_grid_is_walked_with_the_keyboard(visit):
    page = visit()
    page.locator(".grid a").first.focus()
    for key, name in (
        ("ArrowRight", "DSGD, ring 16, α = 1;"), ("ArrowDown", "DSGDm-N, ring 16, α = 1;"),
        ("ArrowLeft", "DSGDm-N, ring 16, α = 10;"), ("ArrowUp", "DSGD, ring 16, α = 10;"),
    ):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith(name)
        assert page.locator("#tip").is_visible()
    assert page.locator('.grid a[tabindex="0"]').count() == page.locator(".grid").count(), "Tab goes to the next table"


def test_a_cell_that_is_filtered_away_is_shown_when_a_square_leads_to_it(visit):
    page = visit()
    page.get_by_label("only what was run").check()
    page.locator(".grid").first.get_by_role("link", name="DSGD, social 32, α = 1;").click()
    page.locator(":target").wait_for(state="visible", timeout=5000)


@pytest.mark.parametrize("visit", ["board"], indirect=True)
def test_every_column_of_the_leaderboard_sorts_and_what_has_no_number_is_last(visit):
    page = visit()
    headings = page.locator("#digits-sorted th")
    titles = [text.strip() for text in headings.all_inner_texts()]
    for number, title in enumerate(titles, start=1):
        if title in ("method", "graph", "note"):
            continue
        cells = f"#digits-sorted tbody tr:visible td:nth-child({number})"
        for order in (False, True):
            headings.nth(number - 1).get_by_role("button").click()
            texts = [text.split("±")[0].strip(" *") for text in page.locator(cells).all_inner_texts()]
            numbers = [text.replace(",", "").replace("−", "-") for text in texts if text and text[0] in "−+0123456789"]
            told = [float(text) for text in numbers]
            assert len(told) > 20, title
            assert told == sorted(told, reverse=order), title
            assert not any(text and text[0] in "−+0123456789" for text in texts[len(told) :]), title


@pytest.mark.parametrize("visit", ["board"], indirect=True)
@pytest.mark.parametrize("width", [1280, 390])
def test_the_leaderboard_fits(visit, width):
    assert visit(width).evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_nothing_sticks_out(visit, width):
    page = visit(width)
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_pictures_have_a_name_and_a_description(visit):
    page = visit()
    pictures = page.get_by_role("img")
    assert pictures.count() > 0
    for picture in pictures.all():
        assert picture.locator("title").text_content()
        assert "against" in picture.locator("desc").text_content()


def contrast(page, selector):
    """The contrast of a text with the page, by WCAG's formula."""

    def luminance(colour):
        channels = [int(value) / 255 for value in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    text = page.locator(selector).first.evaluate("(node) => getComputedStyle(node).color")
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    low, high = sorted((luminance(text), luminance(back)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_texts_are_readable_in_light_and_in_dark(visit, colours):
    page = visit(colours=colours)
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 27)"
    assert dark == (colours == "dark")
    for selector in ("p", ".good", ".fair", ".bad", ".none", ".soft", "a", ".why"):
        assert contrast(page, selector) >= 4.5, selector
