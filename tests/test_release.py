"""What a release says about itself: one version, said in one place."""

from __future__ import annotations

import json
import re
import tomllib

import pytest

import cwfed
from cwfed.federation import manifest
from cwfed.federation.config import SETTINGS
from cwfed.report.finished import THIS, release
from tests import processes
from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def said(path: str, pattern: str) -> str:
    found = re.search(pattern, (ROOT / path).read_text(encoding="utf-8"), re.M)
    assert found, f"{path} says no version"
    return found[1]


def test_the_version_is_in_one_place():
    """setuptools reads it off the module; what cannot read it is held to it here."""
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "cwfed.__version__"}
    assert said("CITATION.cff", r"^version: (\S+)$") == cwfed.__version__
    assert said("CHANGELOG.md", r"^## \[(\d\S*)\]") == cwfed.__version__, "the newest release in the changelog"
    assert manifest.manifest()["versions"]["cwfed"] == cwfed.__version__


def test_no_setting_is_of_a_later_release():
    assert {since for since in (s.since for s in SETTINGS.values()) if release(since) > THIS} == set()


def tracked() -> list[str]:
    """The files of the repository."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone: which files belong to the repository is not known")
    return processes.run(["git", "ls-files"], cwd=ROOT, check=True).stdout.splitlines()


def test_no_run_and_nothing_large_is_in_the_repository():
    """An example's run of 32 MB was, once; what people clone is the code."""
    names = tracked()
    assert "README.md" in names
    runs = [name for name in names if name.endswith((".safetensors", "events.jsonl", ".cwfed"))]
    published = "benchmarks/results/"  # the archives that docs/results.md is made from
    assert [name for name in runs if not name.startswith(published)] == []
    assert sum((ROOT / name).stat().st_size for name in runs) < 10_000_000
    there = [ROOT / name for name in names if (ROOT / name).exists()]
    assert [path.name for path in there if path.stat().st_size > 500_000] == []


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, with continued lines in one."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [
        (word, " ".join(rest.split()))
        for word, _, rest in (line.partition(" ") for line in text.splitlines())
        if word
    ]


def test_the_image_has_what_it_copies_and_starts_our_program():
    """Docker is not everywhere; what a build would stumble over first is looked at here."""
    steps = instructions()
    known = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "USER", "VOLUME", "ENTRYPOINT", "CMD"}
    assert [word for word, _ in steps if word not in known] == []
    assert steps[0][0] == "FROM"
    image, _, tag = steps[0][1].partition(":")
    assert image == "python"
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert tuple(map(int, tag.partition("-")[0].split("."))) >= tuple(map(int, oldest.split(".")))
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [source for word, rest in steps if word == "COPY" for source in rest.split()[:-1]]
    assert set(copied) == let_in
    assert all((ROOT / source).exists() for source in copied)
    needed = {
        PROJECT["project"]["readme"],
        *PROJECT["project"]["license-files"],
        "pyproject.toml",
        "constraints.txt",
        "src",
    }
    assert needed <= set(copied)
    (install,) = (rest for word, rest in steps if word == "RUN")
    assert "pip install --no-cache-dir -c constraints.txt ." in install, (
        "the pinned versions, and nothing of pip's cache"
    )
    words = [word for word, _ in steps]
    assert words.index("USER") < words.index("ENTRYPOINT"), "not as root"
    (entry,) = (json.loads(rest) for word, rest in steps if word == "ENTRYPOINT")
    assert entry[0] in PROJECT["project"]["scripts"]
