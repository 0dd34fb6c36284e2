"""The user's own code: what is recorded of it, and that results of other code are never taken for its own."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

import cwfed
from cwfed.core import files, plugins
from cwfed.core.errors import CwfedError, RunError
from cwfed.core.events import Note
from cwfed.federation import config as configs
from cwfed.report import tables
from cwfed.report.finished import collect
from cwfed.report.groups import group
from cwfed.runs import compare, session
from cwfed.runs.folder import RunFolder
from tests.conftest import small
from tests.runs.test_session import interrupt_after

OWN = """
from dataclasses import dataclass
import numpy, torch
from own_parts import FACTOR
from cwfed import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    def penalty(self, params, output, labels, start):
        return FACTOR * output.logits.square().mean()
"""


class Project:
    """A folder with the user's modules, as a session that starts in it sees them."""

    def __init__(self, folder):
        self.folder = folder

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
        self.forget()

    def forget(self):
        """As a new process would: nothing of it is imported yet."""
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(str(self.folder)):
                del sys.modules[name]
        importlib.invalidate_caches()


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made = Project(tmp_path)
    made.write("own.py", OWN)
    made.write("own_parts.py", "FACTOR = 0.0\n")
    yield made
    made.forget()


def own(*settings):
    return small("algorithm.name=own:Mine", *settings)


def test_code_is_a_module_and_what_it_imports_from_its_folder(project):
    project.write("own_parts.py", "import helpers.deep\nfrom helpers import *\nFACTOR = 0.0\n")
    project.write("helpers/__init__.py", "from .near import value\n")
    project.write("helpers/near.py", "def value():\n    from . import late\n    from .late import own_parts\n")
    project.write("helpers/late.py", "own_parts = 1\nimport own_parts\n")
    project.write("helpers/deep.py", "")
    project.write("helpers/not_used.py", "")
    project.write("value.py", "not imported: helpers.near.value is a function")
    expected = [
        "helpers/__init__.py",
        "helpers/deep.py",
        "helpers/late.py",
        "helpers/near.py",
        "own.py",
        "own_parts.py",
    ]
    found = plugins.sources(["own:Mine", "own:Other"])
    assert list(found) == expected
    assert found["own_parts.py"] == files.sha256((project.folder / "own_parts.py").read_bytes())
    assert "own" not in sys.modules, "to look at code imports nothing"
    assert list(plugins.sources(["helpers.near:value"])) == [name for name in expected if name != "own.py"]
    assert plugins.sources(["torch.nn:Linear", "cwfed.models.mlp:MLP", "json:loads", "nowhere:x"]) == {}
    project.write("own_parts.py", "this is no Python\n")
    assert list(plugins.sources(["own:Mine"])) == ["own.py", "own_parts.py"]


def test_code_is_recorded_as_it_was_imported(project):
    """A file that is edited while the process runs is not what runs; imported again, it is."""
    plugins.load_object("own:Mine", "algorithm")
    before = plugins.sources(["own:Mine"])
    (project.folder / "own_parts.py").write_text("FACTOR = 7.0\n")
    assert plugins.sources(["own:Mine"]) == before
    importlib.reload(sys.modules["own_parts"])
    assert plugins.sources(["own:Mine"]) != before


def test_the_code_of_all_parts_of_a_config_counts(project):
    options = {"name": "cwfedavg", "objective": {"name": "own:Mine"}}
    table = {"algorithm": options, "model": {"name": "m:net"}, "data": {"name": "d:load"}}
    assert cwfed.federation.config.from_table(table, imports=False).code() == ["own:Mine", "m:net", "d:load"]


def test_a_finished_run_of_other_code_is_not_reused(project):
    session.run(own(), "run")
    session.run(own(), "run", resume=True)
    project.write("own_parts.py", "FACTOR = 50.0\n")
    for config in (own(), None, own("train.rounds=5")):
        with pytest.raises(
            RunError, match=r"made with other code: own_parts\.py was changed.*another --out, or remove"
        ):
            session.run(config, "run", resume=True)
    project.write("own_parts.py", "FACTOR = 0.0\n")
    session.run(own("train.rounds=5"), "run", resume=True)


def test_a_broken_off_run_of_other_code_is_not_gone_on_with(project):
    with pytest.raises(KeyboardInterrupt):
        session.run(own(), "run", on_event=interrupt_after(2))
    before = {p: p.read_bytes() for p in (project.folder / "run").rglob("*") if p.is_file()}
    project.write("own.py", OWN.replace("FACTOR *", "2 * FACTOR *"))
    with pytest.raises(RunError, match=r"other code: own\.py was changed"):
        session.run(None, "run", resume=True)
    assert before == {p: p.read_bytes() for p in (project.folder / "run").rglob("*") if p.is_file()}


def test_compare_says_what_it_reused_and_refuses_other_code(project):
    entries = compare.parse_entries("fedavg,own:Mine", small())
    rows = compare.compare(small(), entries, [0], "both")
    assert [row["reused"] for row in rows] == [[], []]
    rows = compare.compare(small(), entries, [0, 1], "both")
    assert [row["reused"] for row in rows] == [[0], [0]]
    assert "| fedavg (1 of 2 reused) |" in tables.markdown(rows)
    rows = compare.compare(small(), entries, [0], "both")
    assert "| own:Mine (reused) |" in tables.markdown(rows)
    project.write("own_parts.py", "FACTOR = 50.0\n")
    with pytest.raises(RunError, match=r"own_parts\.py was changed"):
        compare.compare(small(), compare.parse_entries("fedavg,own:Mine", small()), [0], "both")


def test_a_report_keeps_runs_of_other_code_apart(project):
    session.run(own(), "runs/before")
    project.write("own_parts.py", "FACTOR = 50.0\n")
    session.run(own(), "runs/after")
    records, left_out = collect(["runs"])
    assert (len(records), left_out) == (2, [])
    ((one, other),) = [found.methods for found in group(records)]
    assert one.label != other.label
    assert "code=" in one.label
    session.run(own(), "runs/twice")
    assert "the same experiment and seed" in collect(["runs"])[1][0].why


def test_runs_of_versions_that_did_not_record_code_are_taken_with_a_note(project):
    session.run(own(), "run")
    manifest = RunFolder("run").read_json("manifest.json")
    del manifest["code"]
    (project.folder / "run" / "manifest.json").write_text(json.dumps(files.seal_table(manifest)))
    seen = []
    session.run(own(), "run", resume=True, on_event=seen.append)
    (note,) = [event for event in seen if isinstance(event, Note)]
    assert "own:Mine was changed since is not known" in note.message
    summary = session.run(own("train.rounds=4"), "run", resume=True)
    assert "is not known" in summary["notes"][0]
    assert collect(["run"])[1] == []


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("data.name=os:system", r"data 'os:system': the function failed \(TypeError: system\(\) missing"),
        ("data.name=sys:exit", r"data 'sys:exit': the function failed \(SystemExit\)"),
        ("data.name=faulty:data", r"the function failed \(ZeroDivisionError: division by zero, faulty.py, line 2\)"),
        ("model.name=faulty:model", r"model 'faulty:model' cannot be built: KeyError: 'x', faulty.py, line 4"),
        ("model.name=os:system", "model 'os:system' cannot be built: TypeError"),
        ("algorithm.name=os:system", "must be a dataclass that derives"),
        (
            "algorithm.name=script:Mine",
            r"the module 'script' cannot be imported \(SystemExit: 0, script.py, line 2\)",
        ),
        ("data.partition=os:system", "partition 'os:system' cannot be used: TypeError"),
    ],
)
def test_code_that_fails_or_was_never_meant_to_be_called_is_one_sentence(project, setting, says):
    project.write("script.py", "import sys\nsys.exit(0)\n")
    project.write("faulty.py", "def data():\n    return 1 / 0\ndef model(shape, classes):\n    return {}['x']\n")
    with pytest.raises(CwfedError, match=says):
        session.run(configs.load(None, [setting, "train.rounds=1", "data.samples=200"]))
