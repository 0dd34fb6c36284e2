"""What `import cwfed` has, and that readers need nothing else."""

from __future__ import annotations

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
