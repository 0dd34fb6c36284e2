"""Every example runs as its reader would run it, and says what it should."""

from __future__ import annotations

import re
import sys

import pytest

from cwfed.federation import config as configs
from tests import processes
from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("[!t]*.py")), ids=lambda p: p.stem)
def test_example(path, tmp_path):
    for other in EXAMPLES.glob("*.py"):
        (tmp_path / other.name).write_text(other.read_text())
    done = processes.run([sys.executable, path.name], cwd=tmp_path, check=True, warm=True)
    assert max(float(p) for p in re.findall(r"([\d.]+)%", done.stdout)) > 60


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda p: p.stem)
def test_config(path):
    config = configs.load(path)
    halved = {"cifar10": 5.0, "cifar100": 500.0}[config.data.name]  # the paper's lambda is 10 and 1000
    assert (config.algorithm["wdr"], config.train.rounds, config.data.clients) == (halved, 1000, 20)
