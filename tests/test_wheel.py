"""Wheel and sdist have everything: built, installed into another environment, they run the demo."""

from __future__ import annotations

import os
import sys
import sysconfig
import tarfile

import pytest

import cwfed as here
from tests import processes
from tests.conftest import ROOT


def environment(folder, package):
    """A new one with this package; the dependencies (gigabytes, minutes) are lent by ours, cwfed itself is not."""
    processes.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
    python = folder / "env" / "bin" / "python"
    processes.run([python, "-m", "pip", "install", "-q", "--no-deps", str(package)], check=True)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = processes.run([python, "-c", ask], check=True).stdout.strip()
    (folder / "lent").mkdir()
    for entry in os.listdir(sysconfig.get_path("purelib")):
        if "cwfed" not in entry:
            (folder / "lent" / entry).symlink_to(os.path.join(sysconfig.get_path("purelib"), entry))
    with open(os.path.join(site, "lent.pth"), "w") as file:
        file.write(str(folder / "lent"))
    return folder / "env" / "bin"


@pytest.mark.slow
def test_the_wheel_made_from_the_sdist_runs_the_demo_elsewhere(tmp_path):
    """What is uploaded: the sdist from the tree, the wheel from the sdist."""
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    processes.run(build, check=True)
    (wheel,) = (tmp_path / "dist").glob("cwfed-*.whl")
    (sdist,) = (tmp_path / "dist").glob("cwfed-*.tar.gz")
    assert (wheel.name, sdist.name) == (
        f"cwfed-{here.__version__}-py3-none-any.whl",
        f"cwfed-{here.__version__}.tar.gz",
    )
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "src/cwfed/py.typed"} <= held
    bin_ = environment(tmp_path, wheel)
    cwfed = bin_ / "cwfed"
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    said = processes.run(
        [bin_ / "python", "-c", "import cwfed; print(cwfed.__version__, cwfed.__file__)"],
        cwd=tmp_path,
        check=True,
        env=clean,
    )
    version, where = said.stdout.split()
    assert (version, where.startswith(str(tmp_path))) == (here.__version__, True)
    processes.run([cwfed, "demo"], cwd=tmp_path, check=True, env=clean)
    assert (tmp_path / "demo" / "report.html").exists()
    assert "524.69" in processes.run([cwfed, "reproduce", "memory"], cwd=tmp_path, check=True, env=clean).stdout
