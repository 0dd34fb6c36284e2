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
from tests.test_release import tracked


def elsewhere(command, folder):
    """Carried out in `folder`, without PYTHONPATH: neither pip nor Python may find the tree that the package was built from."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return processes.run(command, cwd=folder, check=True, env=clean).stdout


def environment(folder, package):
    """A new one with this package; the dependencies (gigabytes, minutes) are lent by ours, cwfed itself is not."""
    elsewhere([sys.executable, "-m", "venv", folder / "env"], folder)
    python = folder / "env" / "bin" / "python"
    elsewhere([python, "-m", "pip", "install", "-q", "--no-deps", package], folder)
    site = elsewhere([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip()
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
        held = {member.name.partition("/")[2] for member in archive if member.isfile()}
    made = {name for name in held if name in ("PKG-INFO", "setup.cfg") or name.startswith("src/cwfed.egg-info/")}
    assert held - made == set(tracked()), "the sdist is the repository"
    bin_ = environment(tmp_path, wheel)
    said = elsewhere([bin_ / "python", "-c", "import cwfed; print(cwfed.__version__, cwfed.__file__)"], tmp_path)
    version, where = said.split()
    assert (version, where.startswith(str(tmp_path))) == (here.__version__, True)
    elsewhere([bin_ / "cwfed", "demo"], tmp_path)
    assert (tmp_path / "demo" / "report.html").exists()
    assert "524.69" in elsewhere([bin_ / "cwfed", "reproduce", "memory"], tmp_path)
