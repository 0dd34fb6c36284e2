"""A node's fork server with the real `flwr-clientapp`: to whoever starts it, it is the program, and it ends with its node.

The node is `sleep`: what Flower's SuperNode does with it, tests/flower/test_deployment.py says.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra flower is not installed")

from cwfed.flower import clientapp_shim
from cwfed.flower.clientapp_shim import FALLBACK
from cwfed.flower.programs import MARK, MODULE, marked
from tests import processes

pytestmark = [
    pytest.mark.federation,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Flower's own way is used"),
]

REAL = Path(sys.executable).parent / "flwr-clientapp"


@pytest.fixture(autouse=True)
def _hears_sighup():
    """Whoever is started under nohup ignores it, and so would all that is started here: the test of it would wait for ever."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Of a fork server: with a space, and longer than the path of a socket may be."""
    return tmp_path / ("the long name of a node " * 5).strip()


@pytest.fixture
def node(folder):
    """A node with a fork server."""
    environment = os.environ | {MARK: str(folder), "PATH": f"{REAL.parent}{os.pathsep}{os.environ['PATH']}"}
    with processes.running(
        [*MODULE, "cwfed.flower.fork_server", folder, "sleep", "infinity"], env=environment
    ) as node:
        processes.until(lambda: is_up(folder))
        yield node
    processes.until(lambda: not marked(str(folder)))


def is_up(folder: Path) -> bool:
    """Whether a fork server answers in this folder; a connection without a request is nothing to it."""
    try:
        clientapp_shim.connect(str(folder)).close()
    except OSError:
        return False
    return True


def servers(folder: Path) -> list[int]:
    """Who starts the fork server, the fork server, and its children; parents first."""
    found = [pid for pid in marked(str(folder)) if b"keep" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    parents = {pid: parent(pid) for pid in found}
    return sorted(found, key=lambda pid: (parents[pid] in found) + (parents.get(parents[pid]) in found))


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Silence:
    """A SuperNode that takes calls and never answers: who calls it works until he is ended."""

    def __init__(self, folder: Path) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.folder, self.calls = folder, list[socket.socket]()
        address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.command = [folder / "flwr-clientapp", "--runtime-api-address", address, "--token", "abc", "--insecure"]

    def until_called(self) -> int:
        """The child that has called; a call may be one of an earlier child, which is gone."""
        self.calls.append(self.listener.accept()[0])
        (child,) = processes.until(lambda: servers(self.folder)[2:])
        return child

    def close(self) -> None:
        for end in (self.listener, *self.calls):
            end.close()


@pytest.fixture
def silence(folder):
    with closing(Silence(folder)) as made:
        yield made


def test_the_shim_is_the_program_to_whoever_starts_it(folder, node, tmp_path):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (tmp_path / "ca.crt").write_text("not a certificate")
    certificate = ["--token", "abc", "--root-certificates", "ca.crt"]  # found from the folder it was started in
    for arguments in (["--help"], ["--nonsense"], certificate):
        options = {"cwd": tmp_path, "env": os.environ | {"COLUMNS": "47", "FLWR_HOME": str(tmp_path / "flwr")}}
        shim, real = (
            processes.run([program, *arguments], **options) for program in (folder / "flwr-clientapp", REAL)
        )
        assert shim.returncode == real.returncode, shim.stderr
        assert shim.stdout == real.stdout
        assert shim.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]
        assert FALLBACK not in shim.stderr


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_reach_the_work(node, silence, sent):
    with processes.running(silence.command) as shim:
        child = silence.until_called()
        assert parent(child) != shim.pid
        os.kill(shim.pid, sent)
        _, said = shim.communicate(timeout=processes.LIMIT)
    assert shim.returncode == (-sent if sent == signal.SIGHUP else 0), (
        "Flower's program ends in good order at the others"
    )
    assert ("Task stopped." in said) == (sent != signal.SIGHUP)
    processes.until(lambda: not Path(f"/proc/{child}").exists())


def test_the_work_ends_with_the_shim_and_with_the_node(folder, node, silence):
    with processes.running(silence.command) as shim:
        child = silence.until_called()
        os.kill(shim.pid, signal.SIGKILL)
        processes.until(lambda: not Path(f"/proc/{child}").exists())
    # another SuperNode: at the first one a call of the child that was ended may still wait
    with closing(Silence(folder)) as other, processes.running(other.command) as shim:
        other.until_called()
        os.kill(node.pid, signal.SIGKILL)
        assert shim.wait(processes.LIMIT) == 1
    processes.until(lambda: not marked(str(folder)))
    assert not is_up(folder)


def test_a_fork_server_that_dies_takes_no_work_with_it_and_comes_back(folder, node, silence):
    with processes.running(silence.command) as shim:
        child = silence.until_called()
        keeper, server = servers(folder)[:2]
        os.kill(server, signal.SIGKILL)
        processes.until(lambda: server not in servers(folder))
        alone = processes.run([folder / "flwr-clientapp", "--help"])
        assert alone.returncode == 0
        assert "Run a Flower ClientApp" in alone.stdout
        assert FALLBACK in alone.stderr, "it did the work itself"
        assert Path(f"/proc/{child}").exists(), "what was begun goes on"
        os.kill(shim.pid, signal.SIGTERM)
        assert shim.wait(processes.LIMIT) == 1, "nobody could say how it ended"
        processes.until(lambda: not Path(f"/proc/{child}").exists())
    processes.until(lambda: is_up(folder))
    again = processes.run([folder / "flwr-clientapp", "--help"])
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout == alone.stdout
    assert keeper in servers(folder)
