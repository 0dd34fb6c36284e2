"""What the docs say about the code is so; their links lead somewhere, and their snippets are what they say. Needs no mkdocs."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from cwfed import algorithms
from cwfed.cli import app
from cwfed.federation.config import FORMER_NAMES, SETTINGS, Config
from tests.conftest import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [
    *PAGES,
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "AGENTS.md", "llms.txt")
    ),
]
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.DOTALL)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def text_of(path: Path) -> str:
    """A page, or what a notebook says between its code."""
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


# --- the pages and the code


def test_the_architecture_page_names_every_module_once():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = text[text.index("## Where things are") : text.index("## An algorithm")]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = re.findall(r"`([\w/]+(?:\.py|/))`", "".join(first))
    assert len(names) == len(set(names))
    package = ROOT / "src/cwfed"
    files = {p.name for p in package.glob("*.py") if not p.name.startswith("__")}
    folders = {f"{p.parent.name}/" for p in package.glob("*/__init__.py")}
    assert set(names) == files | folders


def test_tests_named_in_the_pages_exist():
    tests = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py"))
    names = re.findall(r"::(test_\w+)", "".join(map(text_of, PAGES)))
    assert len(names) > 50
    assert [name for name in names if f"def {name}(" not in tests] == []


@cache
def tool() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "methods.py"))


def test_the_pages_of_the_methods_say_what_the_code_does():
    for path, text in tool()["current"]().items():
        assert path.exists(), "run: make reference"
        assert text == path.read_text(encoding="utf-8"), f"{named(path)} is not current; run: make reference"


def test_every_method_and_plug_in_has_a_page_and_none_is_of_nothing():
    alone = {name for name, cls in algorithms.PLUGINS.items() if cls not in algorithms.ALGORITHMS.values()}
    assert {path.stem for path in (DOCS / "methods").glob("*.md")} == set(algorithms.ALGORITHMS) | alone
    assert [named(p) for p in (DOCS / "methods").glob("*.md") if "Nothing is written" in text_of(p)] == []


def test_a_page_that_is_not_current_is_noticed():
    old = "# X\n<!-- methods: numbers -->\nwrong\n<!-- end -->\nstays\n"
    assert (
        tool()["filled"](old, {"numbers": ["right"]})
        == "# X\n<!-- methods: numbers -->\n\nright\n\n<!-- end -->\nstays\n"
    )


def test_years_papers_and_numbers_of_methods():
    found = tool()["methods"]()
    assert found["cwfedavg"].paper[1] == "2025"
    assert found["fedrep"].paper == ("Collins et al., Exploiting Shared Representations", "2021")
    assert found["local"].paper == ("", "–")
    assert [name for name, m in found.items() if not m.is_plugin and m.paper[1] == "–"] == ["fedavg-ft", "local"]
    assert found["fedper"].words(found["fedper"].kept) == "the output layer"
    assert (found["fedala"].engines, found["fedavg"].engines) == ("all; on receipt client by client", "all")


def test_a_measured_row_has_both_phases_and_a_method_that_exists():
    numbers = json.loads((DOCS / "data" / "comparison.json").read_text(encoding="utf-8"))
    assert all(" NAME" in command for command in numbers["settings"].values())
    for row in numbers["rows"]:
        assert row.keys() == {"setting", "method", "received", "trained", "std", "seeds", "command"}
        assert 0 <= row["received"] <= 100
        assert 0 <= row["trained"] <= 100
        assert row["std"] is None or (len(row["std"]) == 2 and row["seeds"] > 1)
        algorithms.find(row["method"].partition(":")[0])
        check_command(row["command"])


def test_a_plug_in_has_the_numbers_of_its_combinations():
    found = tool()
    of_owners = [found["_is_of"](found["methods"]()["owners"], name) for name in ("fedavg+balanced+owners", "fedavg")]
    assert of_owners == [True, False]
    assert not found["_is_of"](found["methods"]()["fedavg"], "fedavg+balanced+owners")


def test_the_comparison_is_of_all_methods():
    compared = {
        name.partition(":")[0] for name in runpy.run_path(str(ROOT / "benchmarks" / "comparison.py"))["METHODS"]
    }
    assert set(algorithms.ALGORITHMS) - compared == {
        "fedbn",
        "fedavg-ft",
    }  # the same as fedavg there, and its other phase
    for name in compared:
        algorithms.build(name)


def test_the_commands_page_says_what_the_program_does():
    current = runpy.run_path(str(ROOT / "tools" / "commands.py"))["current"]
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    assert current() == page, "run: make reference"
    assert "## cwfed flower deploy" in page
    assert "| `--jobs`, `-j` | `0` | " in page, "0 is a default, too"


# --- links


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    body = FENCED.sub("", text_of(path))
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", body, re.M)}


def links(path: Path) -> list[str]:
    body = re.sub(r"`[^`\n]*`", "", FENCED.sub("", text_of(path)))
    return re.findall(r"\]\(([^)\s]+)\)", body)


def broken(path: Path) -> list[str]:
    """Links of a page that lead nowhere; those to other places in the world are not followed."""
    found = []
    for link in links(path):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        at = (path.parent / target).resolve() if target else path
        if not at.exists() or (anchor and at.suffix in (".md", ".ipynb") and anchor not in anchors(at)):
            found.append(link)
    return found


@pytest.mark.parametrize("path", [*TEXTS, *NOTEBOOKS], ids=named)
def test_links_and_anchors_exist(path):
    assert broken(path) == []


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "a.md").write_text(
        "# A\n[x](b.md) [y](b.md#there) [z](b.md#Here) [u](#a) [v](c.md)\n```\n[w](d.md)\n```\n"
    )
    (tmp_path / "b.md").write_text("## There, *now*\n## there\n")
    assert broken(tmp_path / "a.md") == ["b.md#Here", "c.md"]
    assert anchors(tmp_path / "b.md") == {"there-now", "there"}


def test_every_page_is_in_the_navigation_once():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r": ([\w./-]+\.md)$", nav, re.M)
    pages = [path.relative_to(DOCS).as_posix() for path in PAGES]
    assert sorted(listed) == sorted([*pages, *(f"notebooks/{path.stem}.md" for path in NOTEBOOKS)])


def test_pictures_are_where_the_pages_look_for_them():
    for path in TEXTS:
        for link in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", text_of(path)):
            assert (path.parent / link).exists(), f"{named(path)}: {link}"


def test_the_site_asks_nobody_for_fonts():
    assert re.search(r"^  font: false", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)


# --- snippets


def snippets(kind: str) -> list[Any]:
    found = [
        (path, i, body)
        for path in TEXTS
        for i, (what, body) in enumerate(FENCED.findall(text_of(path)))
        if what == kind
    ]
    return [pytest.param(path, body, id=f"{named(path)}-{i}") for path, i, body in found]


@pytest.mark.parametrize(("path", "body"), snippets("python"))
def test_python_snippets_are_python(path, body):
    ast.parse(body)


WHOLE = [
    snippet
    for snippet in snippets("python")
    if snippet.id.startswith(("README.md", "docs/tutorial.md", "docs/extend.md", "docs/evaluation.md"))
]


@pytest.mark.parametrize(("path", "body"), WHOLE)
def test_snippets_of_the_first_pages_run(path, body, tmp_path, monkeypatch):
    """As they stand, but for the number of rounds and the model."""
    monkeypatch.chdir(tmp_path)
    quick = body.replace("train.rounds=20", "train.rounds=1").replace(
        '"train.lr=0.05"', '"train.lr=0.05", "model.name=mlp"'
    )
    exec(compile(quick, named(path), "exec", dont_inherit=True), {"__name__": "__main__"})


def test_the_tutorial_needs_the_wheel_and_nothing_else():
    """Its config is on the page, and is the example's but for the number of rounds."""
    page = text_of(DOCS / "tutorial.md")
    commands = [line for kind, body in FENCED.findall(page) if kind == "sh" for line in body.splitlines()]
    assert not [line for line in commands if "examples/" in line]
    (config,) = (body for kind, body in FENCED.findall(page) if kind == "toml")
    printed, example = tomllib.loads(config), tomllib.loads((ROOT / "examples/cifar10-pathological.toml").read_text())
    printed["train"], example["train"] = {}, {}
    assert Config(**printed) == Config(**example)


@cache
def program() -> click.Command:
    return typer.main.get_command(app)


def check_command(line: str) -> None:
    """A command line names a command and options that exist, settings that exist, methods that exist."""
    words = shlex.split(line, comments=True)
    assert words[0] == "cwfed", line
    command, at = program(), 1
    while isinstance(command, click.Group):
        assert words[at] in command.commands, f"{line}: no command {words[at]!r}"
        command, at = command.commands[words[at]], at + 1
    context = click.Context(command, info_name=" ".join(words[:at]))
    options, _, _ = command.make_parser(context).parse_args(words[at:])
    for given in options.get("set_") or []:
        key = given.partition("=")[0].strip()
        known = key in SETTINGS or key in FORMER_NAMES or key.startswith(("algorithm", "model.options."))
        assert known, f"{line}: no setting {key!r}"
    chosen = options.get("algorithms")
    for name in chosen.split(",") if isinstance(chosen, str) else []:
        if re.fullmatch(r"[a-z][\w+-]*(:\w+=.*)?", name):  # else the reader's own, or a part of a list of settings
            algorithms.find(name.partition(":")[0])


COMMANDS = [
    pytest.param(line.strip(), id=f"{snippet.id}-{i}")
    for snippet in snippets("sh")
    for i, line in enumerate(snippet.values[1].replace("\\\n", " ").splitlines())
    if line.strip().startswith("cwfed ") and "..." not in line
]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_in_the_pages_exist_with_their_options(line):
    check_command(line)


def test_a_command_that_is_none_is_found():
    for line in ("cwfed runn", "cwfed run --nothing", "cwfed run --set train.round=1", "cwfed compare -a fedavgg"):
        with pytest.raises(Exception, match=r"no command|No such option|no setting|unknown algorithm"):
            check_command(line)


def test_targets_named_in_the_pages_are_in_the_makefile():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    lines = "\n".join(snippet.values[1] for snippet in snippets("sh"))
    wanted = re.findall(r"^make ((?:[a-z-]+ ?)+)", lines, re.M)
    assert {name for line in wanted for name in line.split()} <= targets


# --- notebooks


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_a_notebook_runs(path, tmp_path):
    """As it stands, but for the number of rounds and seeds."""
    execute = runpy.run_path(str(ROOT / "tools" / "notebooks.py"))["execute"]
    notebook = json.loads(path.read_text(encoding="utf-8"))
    done = execute(
        json.loads(
            path.read_text(encoding="utf-8")
            .replace("train.rounds=20", "train.rounds=2")
            .replace("range(3)", "range(2)")
        ),
        tmp_path,
    )
    code = [cell for cell in done["cells"] if cell["cell_type"] == "code"]
    printed = "".join("".join(out.get("text", [])) for cell in code for out in cell["outputs"])
    assert len(code) > 4
    assert re.search(r"received.*trained", printed), "both phases"
    assert all(
        cell["outputs"]
        for cell in notebook["cells"]
        if cell["cell_type"] == "code" and "print(" in "".join(cell["source"])
    ), "run: make notebooks"
