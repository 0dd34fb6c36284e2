"""The wheel has everything: built, installed into another environment, it runs the demo."""

from __future__ import annotations

import os
import sys
import sysconfig

import pytest

from tests import processes
from tests.conftest import ROOT


@pytest.mark.slow
def test_the_wheel_runs_the_demo_elsewhere(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path / "dist"), str(ROOT)]
    processes.run(build, check=True)
    (wheel,) = (tmp_path / "dist").glob("cwfed-*.whl")
    processes.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    python = tmp_path / "env" / "bin" / "python"
    processes.run([python, "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True)
    # the dependencies (gigabytes, minutes) are lent by this environment, cwfed itself is not
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = processes.run([python, "-c", ask], check=True).stdout.strip()
    (tmp_path / "lent").mkdir()
    for entry in os.listdir(sysconfig.get_path("purelib")):
        if "cwfed" not in entry:
            (tmp_path / "lent" / entry).symlink_to(os.path.join(sysconfig.get_path("purelib"), entry))
    with open(os.path.join(site, "lent.pth"), "w") as file:
        file.write(str(tmp_path / "lent"))
    cwfed = tmp_path / "env" / "bin" / "cwfed"
    processes.run([cwfed, "demo"], cwd=tmp_path, check=True)
    assert (tmp_path / "demo" / "report.html").exists()
    assert "524.69" in processes.run([cwfed, "reproduce", "memory"], cwd=tmp_path, check=True).stdout
