"""What the suite itself relies on: processes are waited for while they live, and none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes

FAMILY = "import subprocess, sys; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); "


def is_gone(pid: int) -> bool:
    """Ended; somebody may still have to take note of it."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
@pytest.mark.parametrize("then", ["sys.stdin.read()", "subprocess.run(['sleep', '1000'])", "pass"])
def test_a_failure_leaves_no_process_nor_its_children(then):
    child = 0

    def fail() -> None:
        nonlocal child
        with processes.running([sys.executable, "-c", FAMILY + then]) as process:
            child = int(process.stdout.readline())
            assert not is_gone(child)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    processes.until(lambda: is_gone(child))


def test_who_ends_before_what_is_waited_for_is_heard(tmp_path):
    with processes.running([sys.executable, "-c", "raise SystemExit('no room')"]) as process:  # noqa: SIM117
        with pytest.raises(AssertionError, match=r"ended before(.|\n)*no room"):
            processes.until_lines(tmp_path / "never", 1, process)


def test_what_is_done_last_counts():
    done, lives = iter([False, True]), iter([True, False])
    assert processes.until(lambda: next(done), lambda: next(lives), pause=0)


def test_what_hangs_is_ended_at_the_limit(monkeypatch):
    monkeypatch.setattr(processes, "LIMIT", 0)
    with pytest.raises(AssertionError, match="it hangs"):
        processes.until(lambda: False)
    with pytest.raises(subprocess.TimeoutExpired):
        processes.run([sys.executable, "-c", "import time; time.sleep(1000)"])


def test_a_process_dies_by_its_file(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from tests.processes import die_after_lines;"
        "die_after_lines(Path('log'), 2, 0.0); Path('log').write_text('one\\ntwo\\n'); time.sleep(1000)"
    )
    path = [str(Path(__file__).parent.parent), *sys.path]
    done = processes.run([sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"], cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL


def test_nobody_starts_processes_past_this_module():
    """So there is one limit, and whatever a test starts is ended. The chaos tests mount disks, the federation's look for processes."""
    uses = {
        p.name
        for p in Path(__file__).parent.rglob("*.py")
        if "subprocess.run" in p.read_text() or "Popen(" in p.read_text()
    }
    assert uses == {"processes.py", "warm.py", "test_processes.py", "world.py", "test_deployment.py"}


def test_a_command_has_a_process_of_its_own(tmp_path):
    """Forked from one that has imported everything: folder, environment, output and end are the command's."""
    command = [sys.executable, "-m", "cwfed"]
    done = processes.run([*command, "run", "--set", "train.rounds=none"], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "train.rounds" in done.stderr
    assert "Traceback" not in done.stderr
    (tmp_path / "mine.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    done = processes.run([*command, "run", "--set", "algorithm.name=mine:Mine"], cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, "its own module was imported from its folder, and ended it"
    wide = processes.run([*command, "algorithms"], cwd=tmp_path, env={**os.environ, "COLUMNS": "60"})
    assert max(map(len, wide.stdout.splitlines())) == 60
