"""Report of a run store: texts, marks and every format."""

import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hand_made_stores import cell, leave

from quasiglobal import cli
from quasiglobal.reproduction.paper.outcomes import by_model_and_column, order, outcomes, to_paper
from quasiglobal.reproduction.paper.summary import summary
from quasiglobal.reproduction.paper.tables import TABLES, ColumnLabel, RowLabel
from quasiglobal.reproduction.report.document import Cell, Column, Document, Line, Plot, Row, Section
from quasiglobal.reproduction.report.formats import latex, markdown, write_report
from quasiglobal.reproduction.report.noise import Sample, difference, tolerance
from quasiglobal.reproduction.report.page import figure, grid, page
from quasiglobal.runs.store import RunFolder, RunStore

HETEROGENEOUS = "ring 16, α = 0.1"


def document(root, scale="paper"):
    return summary(RunStore.read(root), scale)


def in_motivation(row, column=HETEROGENEOUS):
    return cell("motivation", row, column)


def row_of(root, row, column=HETEROGENEOUS, table="motivation", scale="paper"):
    """A table row as a dict from column title to cell."""
    section = next(section for section in document(root, scale).sections if section.anchor == table)
    found = next(line for line in section.rows if (line.cells[0].text, line.cells[1].text) == (row, column))
    return {head.title: cell for head, cell in zip(section.columns, found.cells, strict=True)}


def test_a_cell_has_the_papers_number_ours_and_how_it_came_about(tmp_path):
    leave(tmp_path, in_motivation("QG-DSGDm-N"), [80, 81, 82], lr=0.8)
    for rate in (0.4, 1.6):
        leave(tmp_path, in_motivation("QG-DSGDm-N"), [79], lr=rate)
    line = row_of(tmp_path, "QG-DSGDm-N")
    assert line["paper"].text == "82.20 ± 1.27"
    assert line["ours"].text == "81.00 ± 1.00 (3)"
    assert line["difference"].text == "−1.20"
    assert (line["lr"].text, line["lr"].why) == ("0.8", ("best of 3",))
    assert line["epochs"].text == "300"
    assert line["averaged"].text == "82.00 ± 1.00"
    assert line["curves"].link == "motivation-2"


def test_best_is_the_best_epoch_and_ours_the_last(tmp_path):
    chosen = in_motivation("DSGD")
    leave(tmp_path, chosen, [70])
    (metrics,) = tmp_path.glob("*/metrics.jsonl")
    metrics.write_text('{"epoch": 10, "accuracy": 0.75, "accuracy_averaged": 0.8}\n' + metrics.read_text())
    (found,) = [one for one in outcomes(TABLES["motivation"], RunStore.read(tmp_path)) if one.runs]
    RunFolder.of(found.runs[0].experiment, tmp_path).finish("finished", {})
    line = row_of(tmp_path, "DSGD")
    assert (line["ours"].text, line["best"].text) == ("70.00 (1)", "75.00")


def test_what_was_not_run_says_so_and_nothing_else(tmp_path):
    line = row_of(tmp_path, "DSGD")
    assert line["ours"].text == "not run"
    assert all(line[title].text == "" for title in ("difference", "noise", "order", "lr", "best", "averaged", "curves"))


@pytest.mark.parametrize(("ours", "text", "mark"), [
    ([81, 82, 83], "within ±2.65", "good"),
    ([77, 78, 79], "beyond ±2.65", "bad"),
    ([78], "too few seeds", "none"),
    ([75], "beyond ±6.31", "bad"),      # one seed uses the paper's std: t = 4.303 at 2 degrees of freedom
    ([80, 82], "too few seeds", "none"),
])  # fmt: skip
def test_a_difference_is_marked_as_within_the_noise_or_beyond(tmp_path, ours, text, mark):
    leave(tmp_path, in_motivation("QG-DSGDm-N"), ours)
    noise = row_of(tmp_path, "QG-DSGDm-N")["noise"]
    assert (noise.text, noise.mark) == (text, mark)


def test_one_run_of_each_leaves_the_noise_unknown(tmp_path):
    leave(tmp_path, cell("gradient-tracking", "D²", HETEROGENEOUS), [49])
    noise = row_of(tmp_path, "D²", table="gradient-tracking")["noise"]
    assert (noise.text, noise.mark) == ("unknown", "none")


def test_seeds_that_diverge_are_counted_and_never_averaged_away(tmp_path):
    leave(tmp_path, in_motivation("DSGD"), [74, 75, 10], diverged=(2,))
    line = row_of(tmp_path, "DSGD")
    assert (line["ours"].text, line["ours"].why) == ("⋆ (3)", ("1 of 3 diverged",))
    assert line["noise"].text == "ours diverged"
    assert line["best"].text == ""


@pytest.mark.parametrize(("diverged", "text", "mark"), [
    ((0, 1), "neither converged", "good"), ((), "the paper's diverged", "fair"),
])  # fmt: skip
def test_where_the_paper_did_not_converge_there_is_no_difference(tmp_path, diverged, text, mark):
    place = "ImageNet-32, ResNet-20-x2 GN: DSGDm-N", "α = 0.1"
    leave(tmp_path, cell("imagenet", *place), [10, 11], diverged=diverged)
    line = row_of(tmp_path, *place, table="imagenet")
    assert (line["paper"].text, line["difference"].text) == ("⋆", "")
    assert (line["noise"].text, line["noise"].mark) == (text, mark)


@pytest.mark.parametrize(("local", "text", "mark"), [
    ([75, 76, 77], "holds", "good"),
    ([83.5, 82.5, 81.5], "undecided", "fair"),
    ([86, 87, 88], "does not hold", "bad"),
])  # fmt: skip
def test_the_order_of_methods_is_compared_with_the_papers(tmp_path, local, text, mark):
    leave(tmp_path, in_motivation("QG-DSGDm-N"), [81, 82, 83])
    leave(tmp_path, in_motivation("DSGDm-N"), local)
    for name, other in (("QG-DSGDm-N", "DSGDm-N"), ("DSGDm-N", "QG-DSGDm-N")):
        found = row_of(tmp_path, name)["order"]
        assert (found.text, found.mark) == (text, mark)
        assert found.why == (() if mark == "good" else (f"not with {other}",))


def test_a_method_alone_in_its_column_has_no_order(tmp_path):
    leave(tmp_path, in_motivation("QG-DSGDm-N"), [81, 82, 83])
    leave(tmp_path, in_motivation("DSGDm-N", "ring 16, α = 1"), [90, 90, 91])
    assert row_of(tmp_path, "QG-DSGDm-N")["order"].text == ""


def test_what_diverged_is_below_what_did_not(tmp_path):
    leave(tmp_path, in_motivation("QG-DSGDm-N"), [81])
    leave(tmp_path, in_motivation("DSGDm-N"), [85], diverged=(0,))
    found = outcomes(TABLES["motivation"], RunStore.read(tmp_path))
    group = by_model_and_column(found)["", ColumnLabel.parse(HETEROGENEOUS)]
    (best,) = [one for one in group if one.cell.row == RowLabel("QG-DSGDm-N")]
    assert order(best, group).verdict == "holds"
    assert [to_paper(one) is None for one in group if one.runs] == [True, False]


def test_one_seed_that_diverged_where_the_papers_is_best_reverses_the_order(tmp_path):
    leave(tmp_path, in_motivation("QG-DSGDm-N"), [81], diverged=(0,))
    leave(tmp_path, in_motivation("DSGDm-N"), [75])
    assert row_of(tmp_path, "QG-DSGDm-N")["order"].text == "does not hold"


def test_another_scale_is_not_held_against_the_paper(tmp_path):
    leave(tmp_path, in_motivation("QG-DSGDm-N"), [90, 91, 92], lr=0.1, scale="smoke")
    line = row_of(tmp_path, "QG-DSGDm-N", scale="smoke")
    assert line["ours"].text == "91.00 ± 1.00 (3)"
    assert (line["difference"].text, line["noise"].text) == ("", "other scale")
    assert "SMOKE" in document(tmp_path, "smoke").sections[1].title
    assert row_of(tmp_path, "QG-DSGDm-N")["ours"].text == "not run"


@pytest.mark.parametrize("scale", ["smoke", "short"])
def test_another_scale_gives_no_verdict_on_a_claim_or_an_order(tmp_path, scale):
    leave(tmp_path, in_motivation("QG-DSGDm-N"), [90, 91, 92], lr=0.1, scale=scale)
    leave(tmp_path, in_motivation("DSGDm-N"), [80, 81, 82], lr=0.1, scale=scale)
    claims, table = document(tmp_path, scale).sections[:2]
    assert {row.cells[3].text for row in claims.rows} == {"not run", "other scale"}
    assert {row.cells[6].text for row in table.rows} == {"", "other scale"}
    for section in (claims, table):
        assert not re.search("hold|undecided", section.says), section.says


def test_learning_rates_tried_are_drawn(tmp_path):
    for rate, accuracy in ((0.4, 79), (0.8, 82), (1.6, 80)):
        leave(tmp_path, in_motivation("QG-DSGDm-N"), [accuracy], lr=rate)
    plots = document(tmp_path).sections[1].plots
    assert [plot.anchor for plot in plots] == ["motivation-2", "motivation-2-rates"]
    assert plots[1].lines[0].points == [(0.4, pytest.approx(79)), (0.8, pytest.approx(82)), (1.6, pytest.approx(80))]
    assert plots[1].description.endswith("QG-DSGDm-N is highest at 0.8.")


def test_noise_is_welchs():
    ours, paper = Sample(81, 4.33, 3), Sample(77.5, 2.67, 3)
    variance = 4.33**2 / 3 + 2.67**2 / 3
    freedom = variance**2 / ((4.33**2 / 3) ** 2 / 2 + (2.67**2 / 3) ** 2 / 2)
    assert freedom == pytest.approx(3.33, abs=0.01)
    quantile = 3.01                                 # between t = 3.182 at 3 degrees of freedom and 2.776 at 4
    assert tolerance([(1, ours), (-1, paper)]) == pytest.approx(quantile * variance**0.5, rel=0.01)


@pytest.mark.parametrize("seeds", [(3, 3), (3, 1)])
def test_equals_are_called_different_at_most_once_in_twenty(seeds):
    random, alarms = np.random.default_rng(0), 0
    for _ in range(1000):
        pair = [random.normal(size=count) for count in seeds]
        samples = [Sample(x.mean(), x.std(ddof=1) if len(x) > 1 else None, len(x)) for x in pair]
        terms = [(1, samples[0]), (-1, samples[1])]
        alarms += abs(difference(terms)) > tolerance(terms)
    assert 15 <= alarms <= 65       # an exact test has 50 ± 14 (two standard deviations); Welch's is conservative


NASTY = "<b>&\"'$x_1^2$ 50% #{~}|*\\"
SMALL = Document(
    NASTY, (NASTY,),
    (Section(
        "one", NASTY, NASTY, (Column(NASTY), Column("n", numeric=True), Column("more", brief=False)),
        (Row((Cell(NASTY, why=(NASTY,)), Cell("1.00 ± 0.10", 1.0), Cell("detail")), NASTY),), (NASTY,),
        (Plot("p", NASTY, (Line(NASTY, [(1, 2.0), (2, 3.0)], [(1.5, 2.5), (2, 4)]),), NASTY, NASTY),),
    ),),
    (NASTY,),
)  # fmt: skip


class Reader(HTMLParser):
    """HTML parser that checks balanced tags and collects tags, ids and texts."""

    EMPTY = ("meta", "link", "input", "col")

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.texts, self.ids = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.EMPTY:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def read(text):
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))
    return reader


def test_the_page_shows_any_text_as_it_is():
    reader = read(page(SMALL))
    assert "b" not in reader.seen
    assert reader.texts.count(NASTY) >= 8


def test_the_page_needs_nothing_else(tmp_path):
    leave(tmp_path, in_motivation("QG-DSGDm-N"), [81, 82])
    text = page(document(tmp_path))
    assert not re.search(r"https?://|@import|url\((?!#)|src=", text)
    reader = read(text)
    assert {"title", "desc", "svg", "table"} <= set(reader.seen)
    assert {link[1:] for link in re.findall(r'href="(#[^"]+)"', text)} <= set(reader.ids)


@pytest.mark.slow
def test_figures_stand_on_the_page_as_far_as_there_are_runs(tmp_path):
    leave(tmp_path, cell("single-worker", "SGDm", "GN"), [90, 91])
    assert document(tmp_path).drawings == ()
    leave(tmp_path, cell("single-worker", "QG-SGDm", "GN"), [91, 92])
    made = document(tmp_path)
    assert [one.anchor for one in made.drawings] == ["figure-effective-step", "figure-single-worker"]
    reader = read(page(made))
    assert {"figure-effective-step-desc", "figure-single-worker-desc"} <= set(reader.ids)
    assert reader.seen.count("style") == 1
    used = {name for one in made.drawings for name in re.findall(r"""(?:url\(|href=")#([^)"]+)""", one.svg)}
    assert used <= set(reader.ids)
    assert made.drawings[0].says in markdown(made)


def test_every_cell_is_a_square_by_its_agreement_that_leads_to_its_row(tmp_path):
    for row, column, scores, diverged in (
        ("DSGD", "ring 16, α = 1", [88.8, 88.9, 89.0], ()),
        ("DSGD", HETEROGENEOUS, [90, 91, 92], ()),
        ("DSGDm-N", "ring 16, α = 1", [89, 90, 91], (1,)),
        ("QG-DSGDm-N", HETEROGENEOUS, [82], ()),
    ):
        leave(tmp_path, in_motivation(row, column), scores, diverged=diverged)
    leave(tmp_path, cell("imagenet", "ImageNet-32, ResNet-20-x2 GN: DSGDm-N", "α = 0.1"), [10], diverged=(0,))
    made = document(tmp_path)
    rows = [row for section in made.sections for row in section.rows if row.agreement]
    ours = {row.anchor: row.agreement for row in rows if row.anchor.startswith("motivation") and row.known}
    assert list(ours.values()) == ["within", "above", "below", "open"]
    cells = sum(len(table.cells) for table in TABLES.values())
    shown = Counter(row.agreement for row in rows)          # cifar10, among others, shares the four cells
    assert (shown.total(), shown["neither"]) == (cells, 1)
    text, picture = page(made), grid(made)
    links = re.findall(r'<a href="#([\w-]+)" aria-label="([^"]+)"', text)
    assert sorted(link for link, _ in links) == sorted(row.anchor for row in rows)
    said = "DSGD, ring 16, α = 1; paper 88.88 ± 0.26; ours 88.90 ± 0.10 (3); difference +0.02; noise within ±0."
    assert any(text.startswith(said) for _, text in links)
    assert picture.count('class="square"') == cells + len(shown), "and the legend"
    run = cells - shown["absent"]
    assert made.overview.says.startswith(f"{run} of {cells} cells run: {shown['within']} within the noise")
    assert made.overview.says in read(text).texts


def test_a_plot_of_a_single_point_is_drawn():
    drawing = figure(Plot("p", "t", (Line("dsgd", [(300, 80.0)], dots=True),), "epoch", "%"))
    assert "nan" not in drawing
    assert "<circle" in drawing


def test_the_papers_scores_are_drawn_hollow_under_ours():
    papers = [(0.1, 74.5, 2.0), (1, 88.9, 0.3), (10, 89.9, 0.3)]
    lines = (
        Line("DSGD", [(0.1, 77.2)], [(73, 81.4)], dots=True, algorithm="dsgd", published=papers),
        Line("DSGDm-N", [], dots=True, algorithm="dsgdm-n", published=papers),
    )
    plot = Plot("p", "t", lines, "α", "%", logarithmic=True, beside_paper=True)
    hollow, filled = (figure(plot).count(f'dash-0{kind}">') for kind in (" published", ""))
    assert (hollow, filled) == (2, 1), "two methods of the paper's, and the one that was run"
    assert "DSGD: ours 77.2 at 0.1, the paper's 74.5 at 0.1, 88.9 at 1, 89.9 at 10" in plot.description
    assert "DSGDm-N: ours not run" in plot.description


def test_markdown_keeps_its_columns_and_escapes():
    lines = [line for line in markdown(SMALL).splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {3}
    assert "<b>" not in markdown(SMALL)
    assert "detail" not in markdown(SMALL)


def test_latex_keeps_its_columns_and_escapes():
    text = latex(SMALL)
    assert r"\toprule" in text
    assert r"\bottomrule" in text
    assert r"\begin{longtable}{>{\raggedright\arraybackslash}p{0.2\linewidth}r}" in text
    (row,) = [line for line in text.splitlines() if line.endswith(r"1.00 $\pm$ 0.10 \\")]
    assert r"\textless{}b\textgreater{}\&" in row
    assert r"\$x\_1\textasciicircum{}2\$ 50\% \#\{\textasciitilde{}\}" in row
    body = [line for line in text.splitlines() if not line.startswith("%")]
    assert not re.search(r"(?<!\\)[%#]", "\n".join(body))


def test_latex_knows_every_sign_of_the_report(tmp_path):
    leave(tmp_path, in_motivation("QG-DSGDm-N"), [81, 82])
    assert {sign for sign in latex(document(tmp_path)) if ord(sign) > 126} == set()


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no LaTeX here")
def test_latex_is_typeset_on_its_pages(tmp_path):
    text = latex(document(Path(__file__).parents[2] / "docs" / "results" / "runs"))
    (needs,) = re.findall(r"^% (\\usepackage.*)$", text, re.MULTILINE)
    head = rf"\documentclass{{article}}\usepackage[a4paper]{{geometry}}{needs}"
    (tmp_path / "paper.tex").write_text(rf"{head}\begin{{document}}{chr(10)}{text}\end{{document}}")
    words = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    for _ in range(3):                                      # longtable needs two passes for its column widths
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, errors="replace")
        assert done.returncode == 0, done.stdout[-1000:]
    assert "Overfull" not in done.stdout


def test_all_formats_are_written_whole(tmp_path):
    (tmp_path / "runs").mkdir()
    paths = write_report(document(tmp_path / "runs"), tmp_path / "out")
    assert [path.name for path in paths] == ["index.html", "tables.md", "tables.tex", "grid.svg"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in paths}


def test_the_command_writes_one_format_or_all(tmp_path, monkeypatch, capsys):
    (tmp_path / "runs").mkdir()
    everything = {"index.html", "tables.md", "tables.tex", "grid.svg"}
    for words, files in (([], everything), (["--format", "latex"], {"tables.tex"})):
        out = tmp_path / f"out{len(words)}"
        line = ["qg", "report", "--runs", str(tmp_path / "runs"), "--out", str(out), *words]
        monkeypatch.setattr(sys, "argv", line)
        cli.main()
        assert {path.name for path in out.iterdir()} == files
    assert "tables.tex" in capsys.readouterr().out


def test_a_store_that_is_not_there_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["qg", "report", "--runs", str(tmp_path / "no")])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert "there is no folder" in capsys.readouterr().err
