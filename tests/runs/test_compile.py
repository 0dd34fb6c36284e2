"""Whether a run's step is compiled changes its last bits: the choice is recorded, kept, and refused or noted where it cannot be had."""

from __future__ import annotations

import pytest

from cwfed.core.errors import ConfigError
from cwfed.core.events import Note
from cwfed.engine import traced, vmap
from cwfed.runs import session
from cwfed.runs.folder import RunFolder
from tests.conftest import small

BATCHED = ("run.engine=vmap", "data.samples=200", "train.rounds=2", "algorithm.name=fedavg")


def choice(path):
    """What the folder says of it: its config, its manifest."""
    folder = RunFolder(path)
    return folder.config().run.compile, folder.facts().engine.compiled


def notes(path):
    return [event.message for event in RunFolder(path).events() if isinstance(event, Note)]


@pytest.fixture
def _eager(monkeypatch):
    """Every run is long enough to be compiled: to what it is, for only who asks for it matters here, and torch's compiler takes long."""

    def as_it_is(self, given, compile):
        return lambda *leaves: self.function(*traced._like(given, iter(leaves)))

    monkeypatch.setattr(vmap, "COMPILE_FOR", 1)
    monkeypatch.setattr(traced.Traced, "_straight", as_it_is)


@pytest.fixture
def _no_compiler(monkeypatch):
    """None is found, and none is asked."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delattr(traced.Traced, "_straight")


def test_a_longer_run_stays_as_it_was_begun(tmp_path, monkeypatch):
    """Two rounds are not worth compiling for; the four of the same run would be."""
    session.run(small(*BATCHED), tmp_path / "run")
    assert choice(tmp_path / "run") == ("never", False)
    whole = session.run(small(*BATCHED, "train.rounds=4"), tmp_path / "whole")
    monkeypatch.setattr(vmap, "COMPILE_FOR", 1)
    monkeypatch.delattr(traced.Traced, "_straight")  # whoever compiles fails
    longer = session.run(small(*BATCHED, "train.rounds=4"), tmp_path / "run", resume=True)
    assert choice(tmp_path / "run") == ("never", False)
    assert longer.accuracy == whole.accuracy
    assert notes(tmp_path / "run") == []


@pytest.mark.usefixtures("_eager")
def test_a_compiled_run_says_so_and_is_not_resumed_without_a_compiler(tmp_path, monkeypatch):
    session.run(small(*BATCHED), tmp_path)
    assert choice(tmp_path) == ("always", True)
    monkeypatch.setattr(
        vmap, "COMPILE_FOR", 10**9
    )  # "auto" would not compile now: it is the run's choice that counts
    session.run(small(*BATCHED, "train.rounds=3"), tmp_path, resume=True)
    assert choice(tmp_path) == ("always", True)
    with monkeypatch.context() as without:
        without.setenv("PATH", "")
        sentence = r'run\.compile = "always" needs a C\+\+ compiler.*or set it to "never", with which the last bits are others'
        with pytest.raises(ConfigError, match=sentence):
            session.run(small(*BATCHED, "train.rounds=4"), tmp_path, resume=True)
    session.run(small(*BATCHED, "train.rounds=4", "run.compile=never"), tmp_path, resume=True)
    assert "resumed on another engine (vmap, compiled, on cpu, now vmap on cpu)" in notes(tmp_path)[-1]


@pytest.mark.usefixtures("_eager", "_no_compiler")
def test_without_a_compiler_a_run_notes_it_and_stays_so(tmp_path, monkeypatch):
    session.run(small(*BATCHED), tmp_path)
    assert choice(tmp_path) == ("never", False)
    assert "this machine has no C++ compiler: it is not compiled" in notes(tmp_path)[0]
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")  # now there is one
    session.run(small(*BATCHED, "train.rounds=4"), tmp_path, resume=True)
    assert choice(tmp_path) == ("never", False)
    assert len(notes(tmp_path)) == 1


def test_other_engines_leave_the_choice_open(tmp_path):
    session.run(small(*BATCHED, "run.engine=loop"), tmp_path)
    assert choice(tmp_path) == ("auto", False)
