"""What a release says about itself: one version, said in one place."""

from __future__ import annotations

import re
import tomllib

import cwfed
from cwfed.federation import manifest
from cwfed.federation.config import SETTINGS
from cwfed.report.finished import THIS, release
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
