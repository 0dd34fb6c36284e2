"""The wheel has everything: built, installed into another environment, it runs the demo."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_the_wheel_runs_the_demo_elsewhere(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = (tmp_path / "dist").glob("cwfed-*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True)
    # the dependencies (gigabytes, minutes) are lent by this environment, cwfed itself is not
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    (tmp_path / "lent").mkdir()
    for entry in os.listdir(sysconfig.get_path("purelib")):
        if "cwfed" not in entry:
            (tmp_path / "lent" / entry).symlink_to(os.path.join(sysconfig.get_path("purelib"), entry))
    with open(os.path.join(site, "lent.pth"), "w") as file:
        file.write(str(tmp_path / "lent"))
    cwfed = tmp_path / "env" / "bin" / "cwfed"
    done = subprocess.run([cwfed, "demo"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "demo" / "report.html").exists()
    done = subprocess.run([cwfed, "reproduce", "memory"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "524.69" in done.stdout
