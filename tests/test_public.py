"""What `import cwfed` has, and that readers need nothing else."""

from __future__ import annotations

import doctest
import inspect
import re
import sys

import pytest

import cwfed
from cwfed import api
from tests import processes
from tests.conftest import ROOT


def test_only_public_names_are_shown():
    assert dir(cwfed) == sorted(["__version__", *api.__all__])
    assert all(getattr(cwfed, name) is getattr(api, name) for name in api.__all__)


def test_other_names_are_unknown():
    with pytest.raises(AttributeError, match="module 'cwfed' has no attribute 'nothing'"):
        cwfed.nothing  # noqa: B018
    with pytest.raises(ImportError):
        from cwfed import partial  # noqa: F401 (api.py imports it: that makes it no public name)


def test_a_name_is_imported_when_it_is_used():
    code = "import sys, cwfed; assert 'torch' not in sys.modules; cwfed.FedAvg; assert 'torch' in sys.modules"
    processes.run([sys.executable, "-c", code], check=True)


ALIASES = {"Event", "Params"}
"""Of types: Python has no place for their words."""
DOCUMENTED = sorted(set(api.__all__) - ALIASES)


def missing(name):
    """What the docstring of a public name lacks."""
    thing = getattr(cwfed, name)
    text = inspect.getdoc(thing) or ""
    parts = [] if inspect.ismodule(thing) else ["Examples"]
    if inspect.isfunction(thing):
        parts += ["Arguments", "Returns", "Errors"]
    return [part for part in parts if f"{part}:\n" not in f"{text}\n"]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_public_name_explains_itself_with_an_example_that_works(name):
    assert missing(name) == []
    thing = getattr(cwfed, name)
    found = doctest.DocTestParser().get_doctest(inspect.getdoc(thing), {}, name, None, 0)
    assert found.examples or inspect.ismodule(thing)
    runner = doctest.DocTestRunner(verbose=False)
    said = []
    runner.run(found, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)


def functions(thing):
    """The functions of ours in a class or a module, by name."""
    every = {key: getattr(thing, key) for key in dir(thing) if not key.startswith("_")}
    return {
        key: f
        for key, f in every.items()
        if inspect.isroutine(f) and (getattr(f, "__module__", "") or "").startswith("cwfed")
    }


def test_everything_public_of_a_public_class_or_module_has_words():
    things = {name: getattr(cwfed, name) for name in DOCUMENTED}
    inside = {f"{name}.{key}": f for name, thing in things.items() for key, f in functions(thing).items()}
    assert {"FedAvg.begin", "CwFedAvg.begin", "Dataset.from_arrays", "mixing.average"} <= set(inside)
    assert [name for name, f in inside.items() if not inspect.getdoc(f)] == []
    assert "`own` has the tensors that the client kept" in inspect.getdoc(cwfed.CwFedAvg.begin)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]
DEEPER = re.compile(r"^\s*(?:from|import) cwfed\.(\w+)", re.M)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_examples_and_pages_reach_into_no_module(path):
    assert set(DEEPER.findall(path.read_text(encoding="utf-8"))) <= {"flower", "testing"}


def test_the_check_finds_what_it_looks_for():
    assert DEEPER.findall("import cwfed\nfrom cwfed.data.sources import digits\n    import cwfed.core") == [
        "data",
        "core",
    ]


def test_data_by_name_and_by_experiment():
    digits = cwfed.load_data()
    assert digits.inputs.shape == (1797, 8, 8, 1)
    assert cwfed.load_data(cwfed.load_config()).digest == digits.digest
    with pytest.raises(cwfed.CwfedError, match="unknown data set 'digit': did you mean digits"):
        cwfed.load_data("digit")


def test_an_unknown_backend_is_one_sentence():
    with pytest.raises(cwfed.CwfedError, match="unknown backend 'flowr': did you mean flower"):
        cwfed.run(backend="flowr")
