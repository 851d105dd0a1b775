"""The documents say what is so: links lead somewhere, line numbers are right, code blocks run, tables are complete.

A link to a line carries a text in backquotes: the name that is defined in that line, or code that stands in it. After
lines have moved, `python -m tests.test_docs` writes the numbers anew.

Code blocks marked python run in one process or, marked ranks=N, on N ranks; each runs after the first one of its
document if that is for one process.
"""

from __future__ import annotations

import ast
import collections
import csv
import dataclasses
import functools
import importlib
import inspect
import json
import re
import statistics
from pathlib import Path

import pytest
import torch

from tests import test_troubleshooting
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [p.relative_to(ROOT).as_posix() for p in [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]]
RUN = ["README.md", "docs/checkpoint.md", "docs/groups.md", "docs/learning_rates.md", "docs/memory.md",
       "docs/metrics.md", "docs/migration.md", "docs/modes.md", "docs/qk_clip.md", "docs/rules.md", "docs/scaling.md",
       "docs/units.md", "docs/walk.md"]  # of others: compiled

FENCE = re.compile(r"^```(?:(python)(?: ranks=(\d+))?)?[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*")

every_document = pytest.mark.parametrize("document", DOCUMENTS)


# Links


@functools.cache
def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def links(document: str) -> list[tuple[str, Path, str]]:
    """(text, file, fragment) of each link into the repository, code blocks left out."""
    found = []
    for text, target in LINK.findall(FENCE.sub("", text_of(document))):
        if not re.match(r"[a-z]+:", target):
            path, _, fragment = target.partition("#")
            found.append((text, (ROOT / document).parent / path if path else ROOT / document, fragment))
    return found


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", LINK.sub(r"\1", heading).lower()).replace(" ", "-") for heading in headings]
    return {a if plain[:i].count(a) == 0 else f"{a}-{plain[:i].count(a)}" for i, a in enumerate(plain)}


@functools.cache
def definitions(path: Path) -> dict[str, int]:
    """Qualified name -> line, of the functions, classes and variables that a Python file defines."""
    found = {}

    def visit(body, prefix):
        for node in body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [t.id for t in targets if isinstance(t, ast.Name)]
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names = [node.name]
                visit(node.body if isinstance(node, ast.ClassDef) else (), f"{prefix}{node.name}.")
            found.update((prefix + name, node.lineno) for name in names)

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


def lines_of(path: Path, text: str) -> list[int]:
    """The lines that a link with this text may lead to."""
    code = text.strip("`")
    if path.suffix == ".py" and NAME.fullmatch(code):
        return [definitions(path)[code]] if code in definitions(path) else []
    return [n for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1) if code in line]


@every_document
def test_links_lead_to_files_and_anchors(document):
    for text, path, fragment in links(document):
        assert path.exists(), f"[{text}] leads to {path}, which does not exist"
        assert ROOT in path.resolve().parents or path.resolve() == ROOT, f"[{text}] leads out of the repository"
        if fragment and path.suffix == ".md":
            assert fragment in anchors(path), f"[{text}]: {path.name} has no heading #{fragment}"


@every_document
def test_links_to_lines_name_what_stands_there(document):
    for text, path, fragment in links(document):
        if fragment and path.suffix != ".md":
            assert re.fullmatch(r"L\d+", fragment) and re.fullmatch(r"`[^`]+`", text), f"[{text}](...#{fragment})"
            assert int(fragment[1:]) in lines_of(path, text), (
                f"{document}: {text} is not in line {fragment[1:]} of {path.name}, but in {lines_of(path, text)}; "
                "python -m tests.test_docs writes the numbers anew")


@every_document
def test_code_names_in_the_text_of_links_are_not_taken_for_lines(document):
    """A link whose text is a name of the linked Python file leads to its line, so that it can be checked."""
    for text, path, fragment in links(document):
        if path.suffix == ".py" and path.is_file() and not fragment:
            assert text.strip("`") not in definitions(path), f"{document}: say in which line of {path.name} {text} is"


def renumber(document: str) -> None:
    """Write the line numbers of a document's links anew: the nearest line that a link may lead to."""
    def corrected(match):
        text, target = match.groups()
        path, _, fragment = target.partition("#")
        if not re.fullmatch(r"L\d+", fragment):
            return match.group()
        found = lines_of((ROOT / document).parent / path, text)
        line = min(found, key=lambda n: abs(n - int(fragment[1:])), default=fragment[1:])
        return f"[{text}]({path}#L{line})"

    before = text_of(document)
    parts, at = [], 0
    for fence in FENCE.finditer(before):
        parts += [LINK.sub(corrected, before[at:fence.start()]), fence.group()]
        at = fence.end()
    after = "".join(parts) + LINK.sub(corrected, before[at:])
    if after != before:
        (ROOT / document).write_text(after, encoding="utf-8")
        print("changed", document)


# Code blocks


def blocks(document: str) -> list[tuple[int, int, str]]:
    """(lines before it, ranks, code) of each block that is marked python."""
    text = text_of(document)
    return [(text[:m.start(3)].count("\n"), int(m[2] or 1), m[3]) for m in FENCE.finditer(text) if m[1]]


def programs() -> list:
    """One test case per block: the document, the ranks, and the blocks to run one after the other."""
    found = []
    for document in RUN:
        every = blocks(document)
        common = every[:1] if every and every[0][1] == 1 else []
        for block in every:
            parts = [*common, block] if block not in common else common
            found.append(pytest.param(document, block[1], parts, id=f"{document}:{block[0]}"))
    return found


def execute(rank, world, document, parts, folder):
    """Run blocks in one namespace, which has a `folder` to write to, and return the routes of its `opt`; a traceback
    names the line of the document.
    """
    namespace = {"__name__": "__main__", "folder": folder}
    for before, _, code in parts:
        exec(compile("\n" * before + code, document, "exec"), namespace)
    return [type(route).__name__ for route, _ in getattr(getattr(namespace.get("opt"), "_bound", None), "jobs", ())]


@pytest.mark.parametrize("document, ranks, parts", programs())
def test_code_blocks_run(document, ranks, parts, optimizer, tmp_path):
    if torch.cuda.device_count() in range(1, ranks):
        pytest.skip(f"needs {ranks} GPUs, or none")
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if ranks == 1:
        taken = [execute(0, 1, document, parts, str(tmp_path))]
    else:
        taken = run_ranks(ranks, execute, document, parts, str(tmp_path), backend=backend)
    if document == "docs/modes.md" and len(parts) > 1:
        mode = re.findall(r"^## (.*)$", "\n".join(text_of(document).splitlines()[:parts[1][0]]), re.MULTILINE)[-1]
        assert all(table(document, "# Modes")[mode][0] in routes for routes in taken)


@every_document
def test_code_blocks_compile(document):
    for before, _, code in blocks(document):
        compile("\n" * before + code, document, "exec")


def test_the_rule_of_ones_own_runs_as_it_stands(optimizer):
    """Alone, without the other blocks of docs/rules.md."""
    before, ranks, code = next(block for block in blocks("docs/rules.md") if "optimizer.Rule)" in block[2])
    assert ranks == 1 and len(code.splitlines()) <= 30
    names = {"__name__": "__main__"}
    exec(compile("\n" * before + code, "docs/rules.md", "exec"), names)
    weight = names["model"].weight
    norms = names["opt"].state[weight]["row_norm"]  # of rows of the polar factor of a matrix of rank 1
    assert norms.square().sum() == pytest.approx(0.1**2, rel=0.3)


# Tables and entries


def table(document: str, heading: str) -> dict[str, list[str]]:
    """The rows of the first table below a heading: first cell without backquotes -> the other cells."""
    section = f"\n{text_of(document)}".split(f"\n{heading}\n", 1)[1]
    rows = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE).group().splitlines()[2:]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
    return {first.strip("`"): rest for first, *rest in cells}


def test_the_argument_table_is_complete_and_right(optimizer, part):
    arguments = inspect.signature(optimizer.Muon.__init__).parameters.values()
    expected = {p.name: p.default for p in arguments if p.name not in ("self", "params", "options")}
    expected |= {f.name: f.default for f in dataclasses.fields(part("muon").MuonConfig)}
    expected |= {"beta2": inspect.signature(optimizer.NorMuon.__init__).parameters["beta2"].default}
    rows = table("docs/reference.md", "## Arguments")
    said = {name: cells[0].strip("`") for name, cells in rows.items() if name != "params"}
    assert said == {name: repr(default).replace("'", '"') for name, default in expected.items()}


def test_the_table_of_group_keys_is_complete(part):
    known = part("params.checks.group_keys").GROUP_KEYS | {"beta2"}
    assert set(table("docs/reference.md", "## Keys of a group")) == known


def test_keys_that_are_let_through_are_listed(part):
    said = re.search(r"\n\n([^|]*)are let through without effect", text_of("docs/reference.md"))[1]
    names = {name.partition("=")[0] for name in re.findall(r"`([^`]+)`", said)}
    assert names == part("params.checks.group_keys").TOLERATED


def test_the_reference_has_all_names(optimizer):
    def names(heading: str) -> set[str]:
        return {name for cell in table("docs/reference.md", heading) for name in re.findall(r"\w+", cell)}

    assert names("## Functions and classes") == set(optimizer.__all__)
    public = {name for name in dir(optimizer.Muon) if name[0] != "_"} - set(dir(torch.optim.Optimizer))
    assert names("## Methods and attributes of the optimizer") == public


def test_the_list_of_documents_is_complete():
    """Pages are named in the first cells of the tables."""
    cells = re.findall(r"^\| (\[.*?) \|", text_of("docs/README.md"), re.MULTILINE)
    listed = [name for cell in cells for _, name in LINK.findall(cell)]
    assert sorted([*listed, "README.md"]) == sorted(p.name for p in (ROOT / "docs").glob("*.md"))


def test_ranks_compare_as_many_numbers_as_is_said(part):
    assert f"one row of {len(part('communication.plan_check').FACTS)} numbers" in text_of("docs/reliability.md")


def test_every_variable_that_the_package_reads_is_documented():
    sources = "".join(p.read_text() for p in (ROOT / "torch-ext").rglob("*.py"))
    read = set(re.findall(r"environ(?:\.get\(|\[)\s*[\"'](\w+)", sources))
    assert read and read <= set(table("docs/env.md", "## The package"))


def test_every_variable_of_the_tests_is_documented():
    named = set(re.findall(r"\"(OPTIMIZER_[A-Z]+)\"", "".join(p.read_text() for p in (ROOT / "tests").rglob("*.py"))))
    tests = set(table("docs/env.md", "## Tests"))
    assert tests <= named <= tests | set(table("docs/env.md", "## The package"))


def test_the_page_of_architectures_and_the_rules_agree(part):
    """Every fused layer of the page has a rule, and every rule has a layer there."""
    layouts = part("params.model.layouts")
    rows = text_of("docs/architectures.md").partition("With `split")[0].splitlines()
    columns = [row.split(" | ")[1] for row in rows if row.startswith("| ") and "`" in row and "| whole" not in row]
    layers = {name.rpartition(".")[2].rstrip("*") for column in columns for name in re.findall("`([^`]*)`", column)}
    rules = [rule.layers for rule in (*layouts.ATTENTION, *layouts.OTHERS)]
    assert len(layers) > 40 and all(any(rule.search(layer) for rule in rules) for layer in layers)
    assert not [rule.pattern for rule in rules if not any(map(rule.search, layers))]


def test_the_tree_of_the_walk_is_complete():
    """Files whose row begins with a link; the `__init__.py` of a folder is empty, and `_ops.py` is generated."""
    root = ROOT / "torch-ext" / "optimizer"
    files = {p.relative_to(ROOT).as_posix() for p in root.rglob("*.py")
             if p.name not in ("__init__.py", "_ops.py") or p == root / "__init__.py"}
    rows = re.findall(r"^\| \[[^\]]*\]\(\.\./([^()\s]*\.py)\) \|", text_of("docs/walk.md"), re.MULTILINE)
    assert set(rows) == files


def test_every_mode_has_a_section():
    sections = set(re.findall(r"^## (.*)$", text_of("docs/modes.md"), re.MULTILINE))
    assert set(table("docs/modes.md", "# Modes")) <= sections


def test_tables_of_measurements_are_those_of_the_rows(monkeypatch):
    """`--docs docs` of benchmarks/plot_lr.py and benchmarks/polar_page.py writes them anew."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    plot_lr, polar_page, documents, table_of = map(
        importlib.import_module, ("plot_lr", "polar_page", "documents", "convergence_table"))
    rows = plot_lr.read(ROOT / "benchmarks" / "results" / "convergence.csv")
    assert documents.part(ROOT / "docs" / "learning_rates.md", "best rates") == plot_lr.best_rates(rows)
    assert documents.part(ROOT / "docs" / "learning_rates.md", "figures") == plot_lr.links(rows)
    for name, lines in plot_lr.evidence(rows).items():
        assert documents.part(ROOT / "docs" / "evidence.md", name) == lines
    for name, lines in polar_page.page(polar_page.known_rows(polar_page.RESULTS)).items():
        assert documents.part(ROOT / "docs" / "polar_benchmark.md", name) == lines
    assert set(table("docs/polar_benchmark.md", "## What is compared")) == set(polar_page.peers.POLAR)
    assert f"a difference of {table_of.MARGIN} nats" in text_of("docs/evidence.md").replace("\n", " ")


def test_the_numbers_of_the_demo_are_those_of_its_committed_results():
    said = text_of("README.md").split("\n## What the demo shows\n")[1].split("\n## ")[0]
    results = ROOT / "examples" / "results"
    for run in json.loads((results / "demo" / "summary.json").read_text())["runs"]:
        name = run["optimizer"]
        numbers = [f"{run['heldout_loss']:.3f} with {name}", f"{run['step_ms']:.0f} ms with {name}",
                   f"{run['optimizer_ms']:.0f} ms of it in the"]
        assert [number for number in numbers if number not in said.replace("\n", " ")] == []
    losses = collections.defaultdict(list)
    with open(results / "sweep.csv", newline="") as file:
        for row in csv.DictReader(file):
            losses[row["optimizer"], float(row["lr"])].append(float(row["heldout_loss"]))
    for name in ("Muon", "NorMuon", "AdamW"):
        best, lr = min((statistics.mean(each), key[1]) for key, each in losses.items() if key[0] == name.lower())
        assert re.search(rf"{name} {best:.3f} \((?:lr )?{lr:g}\)", said), (name, best, lr)


WIDTH = 120


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name != "docs/log.md"])
def test_prose_is_wrapped(document):
    """Tables and indented figures are not; the log is a record, and stays as it was written."""
    text = re.sub(r"^```.*?^```", "", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)
    prose = [line for line in text.splitlines() if not line.startswith(("|", "    "))]
    assert [line for line in prose if len(line) > WIDTH and " " in line.strip()] == []


def test_log_entries_are_dated_and_newest_first():
    entries = re.split(r"^## ", text_of("docs/log.md"), flags=re.MULTILINE)[1:]
    dates = [re.match(r"\d{4}-\d\d-\d\d(?=, )", entry) for entry in entries]
    assert entries and all(dates)
    assert [d.group() for d in dates] == sorted((d.group() for d in dates), reverse=True)
    for entry in entries:
        assert all(f"\n- {key}:" in entry for key in ("Device", "Versions", "Commit", "Question", "Found")), entry[:60]


if __name__ == "__main__":
    test_troubleshooting.update()
    for name in DOCUMENTS:
        renumber(name)
