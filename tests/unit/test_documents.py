"""Examples, tables and numbers in the documents equal the program's output."""

import csv
import re
import runpy
from pathlib import Path

import pytest
import torch

import quasiglobal as qg
from quasiglobal.cli import explain, look
from quasiglobal.reproduction.leaderboard.standings import read_standings
from quasiglobal.reproduction.leaderboard.summary import BLOCK, blocks, leaderboard_document
from quasiglobal.reproduction.paper.summary import summary
from quasiglobal.reproduction.report.formats import latex, markdown
from quasiglobal.reproduction.report.page import grid
from quasiglobal.runs.store import RunStore

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def python_blocks(text):
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_the_readmes_examples_are_the_files_and_print_what_it_says(tmp_path, monkeypatch, capsys):
    examples = [ROOT / "examples" / name for name in ("own_model.py", "quickstart.py")]
    assert python_blocks(README) == [example.read_text() for example in examples]
    monkeypatch.chdir(tmp_path)
    for example in examples:
        runpy.run_path(str(example), run_name="__main__")
        assert f"```text\n{capsys.readouterr().out}```" in README
    assert len(examples[0].read_text().splitlines()) < 15


def run_blocks(document, folder, monkeypatch, has=()):
    """Run the Python of a document, without the blocks that need something else."""
    text = (ROOT / "docs" / document).read_text()
    blocks = re.findall(r"(?:<!-- needs (\w+) -->\n)?```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(folder)
    names = {"__name__": "__main__"}
    for needed, block in blocks:
        if not needed or needed in has:
            exec(compile(block, document, "exec"), names)
    return names


def test_the_examples_of_your_own_run(tmp_path, monkeypatch, capsys):
    run_blocks("your-own.md", tmp_path, monkeypatch)
    said = capsys.readouterr().out
    assert "Linear gives 2 outputs, but the highest label is 2; it needs 3 outputs" in said
    assert list((tmp_path / "runs").glob("*/best/node-0.safetensors"))


@pytest.mark.slow
def test_the_examples_of_your_own_run_with_trackers(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_blocks("your-own.md", tmp_path, monkeypatch, has=("wandb",))
    assert list((tmp_path / "wandb").glob("offline-run-*"))


def test_the_table_of_algorithms_is_the_programs(capsys):
    explain.algorithms(markdown=True)
    assert capsys.readouterr().out in (ROOT / "docs" / "algorithms.md").read_text()


def test_the_table_of_bytes_is_the_programs():
    table = runpy.run_path(str(ROOT / "benchmarks" / "bytes.py"))["table"]
    assert table() in (ROOT / "docs" / "deploy.md").read_text()


def test_the_table_of_topologies_is_what_the_command_prints(capsys):
    explain.topology(markdown=True)
    assert capsys.readouterr().out in (ROOT / "docs" / "topologies.md").read_text()


def test_the_readmes_results_are_the_demos():
    with open(ROOT / "docs" / "figures" / "demo.csv") as file:
        for row in csv.DictReader(file):
            others = " | ".join(f"{float(row[name]):.1f}" for name in ("best", "worst_node", "averaged_model"))
            cells = f"{float(row['accuracy']):.1f} ± {float(row['std']):.1f} | {others}"
            assert f"| `{row['algorithm']}` | {row['data']} | {float(row['lr']):g} | {cells} |" in README


def test_the_results_are_what_their_records_say(capsys):
    page = (ROOT / "docs" / "results" / "README.md").read_text()
    places = re.findall(r"made by: qg compare --markdown (\S+)/\*", page)
    assert places
    made = {}
    for place in places:
        look.compare(tuple(sorted((ROOT / place).iterdir())), markdown=True)
        made[place] = capsys.readouterr().out
        assert made[place] in page
    found = re.findall(r"^\| `(\S+)`.*?\| (.*?) \| (.*?) \| (.*?) \| (.*?) \|(?: (.*?) \|)?", page, re.MULTILINE)
    assert len(found) == 7
    rows = [row.split(" | ") for row in made["docs/results/agnews"].splitlines() if "| 3 |" in row]
    for algorithm, rate, *cells, averaged in found:
        own = [row for row in rows if row[0].startswith(f"| {algorithm}, ") and f"lr={float(rate)}," in row[0]]
        scores = {(tokens, alpha): row for row in own for alpha in ("0.1", "1.0") for tokens in ("64", "128")
                  if f"alpha={alpha}" in row[0] and row[0].endswith(f"shape={tokens}")}
        if algorithm == "adam":
            assert cells == [own[0][2], "the same", "the same"]
        elif averaged:
            assert (*cells[:2], averaged) == tuple(scores["128", "0.1"][at] for at in (2, 3, 5))
        else:
            assert cells == [scores["64", "0.1"][2], scores["64", "1.0"][2], scores["64", "0.1"][5]]


def test_the_results_page_shows_the_rows_that_were_run():
    results = ROOT / "docs" / "results"
    tables, page = ((results / name).read_text() for name in ("tables.md", "README.md"))
    for title in ("CIFAR-10: architectures", "Gradient tracking and D²", "Variants of momentum"):
        (section,) = re.findall(rf"^## {title}.*?(?=^## )", tables, re.MULTILINE | re.DOTALL)
        shown = [line for line in section.splitlines() if line.startswith("|") and "| not run |" not in line]
        assert "\n".join(shown) in page


def test_the_results_are_what_the_program_makes_of_the_runs():
    results = ROOT / "docs" / "results"
    store = RunStore.read(results / "runs")
    page = (results / "README.md").read_text()
    readings_table = runpy.run_path(str(ROOT / "benchmarks" / "readings.py"))["table"]
    assert readings_table(store) in page
    assert readings_table(store, averaged=True) in page
    document = summary(store)
    for render, name in ((markdown, "tables.md"), (latex, "tables.tex"), (grid, "grid.svg")):
        again = "qg report --runs docs/results/runs --out docs/results"
        assert render(document) == (results / name).read_text(), f"{name} is old; make it again: {again}"


def test_the_leaderboard_is_what_its_records_say():
    records = ROOT / "docs" / "results" / "leaderboard"
    standings = read_standings(records)
    documents = ("README.md", "docs/leaderboard.md", "docs/choosing.md")
    again = f"qg leaderboard --show --out docs/results/leaderboard --update {' '.join(documents)}"
    assert markdown(leaderboard_document(standings)) == (records / "tables.md").read_text(), f"make it again: {again}"
    made = blocks(standings)
    for document in documents:
        for _, name, _ in BLOCK.findall(text := (ROOT / document).read_text()):
            assert f"<!-- leaderboard: {name} -->\n{made[name]}\n<!-- end -->" in text, f"make it again: {again}"
    assert sum(path.stat().st_size for path in records.rglob("*.json")) < 1e6


def test_the_readmes_headline_is_what_the_tables_say():
    tables = (ROOT / "docs" / "results" / "tables.md").read_text()

    def ours(method, setting):
        row = rf"\| ResNet-EvoNorm-20: {re.escape(method)} \| ring 16, {setting} \| \S+ ± \S+ \| ([\d.]+)"
        return f"{float(re.search(row, tables)[1]):.1f}"

    for alpha in ("1", "0.1"):
        plain, local, quasi_global = (ours(method, f"α = {alpha}") for method in ("DSGD", "DSGDm-N", "QG-DSGDm-N"))
        assert re.search(rf"{plain}, {local} and {quasi_global} %\sat α = {alpha}\b", README)
    assert f"centralized training {ours('SGDm-N (centralized)', 'iid')} %" in README


def test_the_numbers_for_choosing_a_method_are_those_of_the_tables():
    tables, page = ((ROOT / "docs" / name).read_text() for name in ("results/tables.md", "choosing.md"))
    methods = {"dsgd": "DSGD", "dsgdm-n": "DSGDm-N", "dsgd-gt": "DSGD (GT)", "dsgdm-n-gt": "DSGDm-N (GT)", "d2+": "D²₊"}
    for name, method in (methods | {"qg-dsgdm-n": "QG-DSGDm-N"}).items():
        row = r"^\| (?:ResNet-EvoNorm-20: )?{} \| ring 16, α = {} \| [^|]+ \| ([\d.]+ ± [\d.]+) \(3\)"
        ours = [re.search(row.format(re.escape(method), alpha), tables, re.MULTILINE)[1] for alpha in ("1", "0.1")]
        assert f"| `{name}` | {ours[0]} | {ours[1]} |" in page


@pytest.mark.filterwarnings("ignore:W of matrices is not doubly stochastic")
def test_the_errors_on_a_directed_graph_are_those_that_are_printed():
    page, names = (ROOT / "docs" / "choosing.md").read_text(), {}
    (block,) = python_blocks(page)
    exec(block, names)

    def error(name, lr):
        x0 = torch.zeros(1, dtype=torch.float64)
        x = qg.minimize(lambda x, t: x - names["target"], x0, name, names["graph"], lr, 2000, keep_history=False).x
        return float((x - 2.5).abs().max())

    momentum = [("qg-dsgdm-n", 0.002), ("sgp:beta=0.9,nesterov=true", 0.002), ("qg-sgp", 0.002)]
    errors = [f"{error(*one):.2g}" for one in momentum]
    said = "`qg-dsgdm-n` ends {} from the minimum, `sgp` with momentum {}, `qg-sgp` {}, `push-diging` and `ab` 1e-13"
    assert said.format(*errors) in page
    assert max(error("push-diging", 0.02), error("ab", 0.02)) < 1e-13


@pytest.mark.slow
def test_your_algorithm_in_15_lines_works(capsys):
    names = {}
    blocks = python_blocks((ROOT / "docs" / "your-algorithm.md").read_text())
    assert len(blocks) == 9
    for block in blocks:
        exec(block, names)
    mean, passed, *others = capsys.readouterr().out.splitlines()
    assert mean.startswith("tensor(3.5")
    checked = [passed, others[0], others[2], others[4], others[6]]
    assert all("'resume'" in line for line in checked)
    edges, pushed = ([float(x) for x in re.findall(r"\d\.\d+", others[at])] for at in (1, 3))
    assert edges == [3.5] * 8
    assert pushed == pytest.approx([1.0] * 3, abs=0.03)
    assert others[5].startswith("tensor(3.5") or others[5].startswith("tensor(3.49")
    assert float(others[7][7:-1]) == pytest.approx(3.5, abs=0.3)
    assert others[8] == "0.0"
    for block in (blocks[0], *blocks[3:]):
        body = block[max(block.find("class "), 0) :].partition("\n\n\n")[0]
        assert len([line for line in body.splitlines() if line.strip()]) <= 15


PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page):
    text = page.read_text()
    links = re.findall(r"\]\((?!http)([^)#]+)", text)
    named = re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]+)`", text)
    missing = [name for name in links if not (page.parent / name).exists()]
    missing += [name for name in named if not (ROOT / name).exists()]
    assert missing == []


def test_the_architecture_names_files_and_functions_that_exist():
    source = ROOT / "src" / "quasiglobal"
    packages = "|".join(path.name for path in source.iterdir() if (path / "__init__.py").exists())
    text = (ROOT / "docs" / "architecture.md").read_text()
    inside = (ROOT / "docs" / "internals.md").read_text()
    files = re.findall(rf"`((?:{packages})/[\w./]+)`", text + inside)
    assert len(files) > 40
    assert [name for name in files if not (source / name).exists()] == []
    whole = "".join(path.read_text() for path in source.rglob("*.py"))
    walks = text[text.index("## Walk 1") : text.index("## Every dependency")]
    names = {word.split(".")[-1] for word in re.findall(r"`([A-Za-z_]+(?:\.[a-z_]+)?)`", walks)} - {"py", "QG_SECRET"}
    assert len(names) > 40
    assert [name for name in names if not re.search(rf"(def|class) {name}\b|^{name}\b", whole, re.MULTILINE)] == []


def test_the_docs_never_call_quasi_global_momentum_unbiased():
    texts = {path.name: path.read_text() for path in [*PAGES, *(ROOT / "src").rglob("*.py")]}
    for name, text in texts.items():
        innocent = text.lower().replace("*", "").replace("not unbiased", "").replace("_unbiased", "")
        assert "unbiased" not in innocent, name
