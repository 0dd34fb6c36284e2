"""What can happen to a run: kills, full disks, damaged files, taken rights, two processes on one folder.

`Chaos` does one of these to a real `cwfed run` and judges what comes of it: the run ends with the bits of the undisturbed
run, or one sentence says what is wrong, and then the files that were whole before are still there as they were.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from cwfed import cli
from cwfed.runs.checkpoint import read_tensors
from cwfed.runs.folder import RunFolder
from tests import processes
from tests.conftest import without_seconds

NOBODY = 65534
ROUNDS = 12
CSV_SAMPLES = 240


def bits(folder: Path) -> str:
    """A hash of everything that must not depend on how a run got to its end: events and models."""
    sha = hashlib.sha256()
    run = RunFolder(folder)
    for event in run.events():
        if event.kind != "note":
            sha.update(repr(sorted(without_seconds(event).items())).encode())
    for index in sorted((folder / "models").rglob("index.json")):
        place = index.relative_to(folder)
        for client, name in sorted(run.read_json(str(place)).items()):
            tensors, _ = read_tensors(index.parent / name)
            sha.update(repr((str(place), client, [(k, v.tolist()) for k, v in sorted(tensors.items())])).encode())
    return sha.hexdigest()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder that a run is made of."""
    paths = [p for p in folder.rglob("*") if p.is_file() and not any(part[0] == "." for part in p.parts[-2:])]
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths}


Death = tuple[Path, int, float]
"""SIGKILL: so many seconds after that file has so many lines."""

PROCESSES = multiprocessing.get_context("forkserver")
"""Real processes, forked from one that has imported everything: a start takes no seconds, and one without rights needs no files."""
PROCESSES.set_forkserver_preload(["tests.chaos.preload"])


def carry_out(command: list[str], folder: str, cache: str, said: str, user: int, death: Death | None) -> None:
    """A `cwfed` command as the process that this is."""
    if death:
        processes.die_after_lines(*death)
    os.chdir(folder)
    os.environ["CWFED_CACHE"] = cache
    handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 2)
    sys.stderr = os.fdopen(handle, "w")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    if user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    sys.argv = command
    cli.main()


@dataclass
class Done:
    """How a process ended."""

    code: int
    said: str


@dataclass
class Running:
    """A `cwfed` process."""

    process: BaseProcess
    stderr: Path

    def wait(self) -> Done:
        self.process.join(processes.LIMIT)
        code = self.process.exitcode
        self.process.kill()
        assert code is not None, "the run hangs"
        said = self.stderr.read_text() if self.stderr.exists() else ""
        self.stderr.unlink(missing_ok=True)
        return Done(code, said)


@dataclass
class Chaos:
    """One experiment, undisturbed once, and then disturbed again and again."""

    folder: Path
    seed: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """What was done and how it ended: kills, flipped bytes, resumed, refused."""
    launched: list[BaseProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.cache = self.folder / "cache"
        self.data = self.folder / "news.csv"
        words = [["goal", "match", "team"], ["stock", "bank", "price"], ["atom", "cell", "gene"]]
        draw = random.Random(1)
        lines = [f"{' '.join(draw.choices(words[i % 3], k=6))},{'abc'[i % 3]}" for i in range(CSV_SAMPLES)]
        self.data.write_text("\n".join(["text,label", *lines, ""]))
        self.folder.chmod(0o755)
        done = self.resume(self.folder / "whole")
        assert done.code == 0, done.said
        self.expected = bits(self.folder / "whole")
        # one checkpoint a round, broken off in the middle: what most disturbances begin with
        self.start(self.folder / "half", until=ROUNDS // 2, within=0)
        assert not (self.folder / "half" / "summary.json").exists()
        self.counts.clear()

    # --- real processes

    def __enter__(self) -> Chaos:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left running, whatever went wrong."""
        for process in self.launched:
            process.kill()

    def command(self, *arguments: str) -> list[str]:
        settings = ["data.name=csv", f"data.path={self.data}", "data.clients=4", "data.partition=iid"]
        settings += [
            f"train.rounds={ROUNDS}",
            "train.client_dropout=0.1",
            "run.checkpoint_seconds=0",
            "run.engine=loop",
        ]
        return ["cwfed", "run", *arguments, *(f"--set={s}" for s in settings)]

    def launch(self, folder: Path, user: int = 0, death: Death | None = None) -> Running:
        said = self.folder / f"stderr-{len(self.launched)}"
        command = self.command("--resume", "--out", str(folder))
        process = PROCESSES.Process(
            target=carry_out, args=(command, str(self.folder), str(self.cache), str(said), user, death)
        )
        process.start()
        self.launched.append(process)
        return Running(process, said)

    def resume(self, folder: Path, user: int = 0) -> Done:
        return self.launch(folder, user).wait()

    def start(self, folder: Path, until: int, within: float = 0.02) -> None:
        """Start or go on with a run that is killed when events.jsonl has so many lines, or a little later."""
        later = self.random.random() * within  # anywhere in a round, an event, a checkpoint, a model
        running = self.launch(folder, death=(folder / "events.jsonl", until + 1, later))
        self.counts["kills"] += running.wait().code == -signal.SIGKILL

    # --- the judgement

    def judge(self, folder: Path, what: str, again: Callable[[], object] = lambda: None) -> str:
        """Go on with the run. "resumed": to the same bits; "refused": in one sentence, with nothing lost."""
        before = contents(folder)
        done = self.resume(folder)
        if done.code == 0:
            assert bits(folder) == self.expected, f"{what}: the run ended with other bits"
            outcome = "resumed"
        else:
            assert done.code == 1, f"{what}: exit code {done.code}\n{done.said}"
            assert done.said.startswith("error: "), f"{what}: {done.said}"
            assert done.said.count("\n") == 1, f"{what}: not one sentence\n{done.said}"
            assert contents(folder) == before, f"{what}: refused, and yet something was changed"
            outcome = "refused"
        self.counts[what] += 1
        self.counts[outcome] += 1
        return outcome

    def copy(self, of: str) -> Path:
        target = self.folder / "run"
        if target.exists():
            shutil.rmtree(target)
        shutil.copytree(self.folder / of, target)
        return target

    # --- the disturbances

    def kill(self) -> str:
        """SIGKILL at a random moment, two or three times."""
        folder = self.folder / "run"
        shutil.rmtree(folder, ignore_errors=True)
        for _ in range(self.random.randint(2, 3)):
            self.start(folder, until=self.random.randrange(ROUNDS + 2))
        outcome = self.judge(folder, "killed runs")
        assert outcome == "resumed", "a kill damages nothing"
        return outcome

    def damage(self, path: Path, how: str) -> None:
        """Flip bits, cut off, write zeros as a lost sector would, or empty a file."""
        content = bytearray(path.read_bytes())
        if how == "flip":
            for _ in range(self.random.randint(1, 3)):
                content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
                self.counts["bits flipped"] += 1
        elif how == "cut":
            del content[self.random.randrange(len(content)) :]
        elif how == "zeros":
            at = self.random.randrange(len(content))
            end = min(len(content), at + 512)
            content[at:end] = bytes(end - at)
        else:
            content.clear()
        path.write_bytes(content)
        self.counts["files damaged"] += 1

    HOW = ("flip", "flip", "flip", "cut", "zeros", "empty")

    def damage_unfinished(self, name: str = "", how: str = "") -> str:
        """A file of a run that was broken off. The last checkpoint alone never stops a run."""
        folder = self.copy("half")
        files = sorted(contents(folder))
        chosen = name or self.random.choice(files)
        if chosen == "last checkpoint":
            chosen = max(name for name in files if name.startswith("checkpoints/"))
        how = how or self.random.choice(self.HOW)
        self.damage(folder / chosen, how)
        outcome = self.judge(folder, f"damaged {Path(chosen).suffix[1:]} of unfinished runs")
        if chosen.startswith("checkpoints/"):
            assert outcome == "resumed", f"{chosen} was damaged ({how}); the other checkpoint should have served"
        return outcome

    def damage_all_checkpoints(self) -> str:
        folder = self.copy("half")
        for path in (folder / "checkpoints").iterdir():
            self.damage(path, "flip")
        return self.judge(folder, "all checkpoints damaged")

    def damage_finished(self, name: str = "", how: str = "") -> str:
        """A file of a finished run: what is loaded or reported from it is right, or it is refused."""
        folder = self.copy("whole")
        chosen = name or self.random.choice(sorted(contents(folder)))
        self.damage(folder / chosen, how or self.random.choice(self.HOW))
        self.look(folder, f"damaged {chosen}")
        if chosen.startswith("models/"):
            self.counts["damaged models of finished runs"] += 1
            return "refused"
        return self.judge(folder, f"damaged {Path(chosen).suffix[1:]} of finished runs")

    def look(self, folder: Path, what: str) -> None:
        """Reading a damaged run gives what the whole one gives, or a CwfedError."""
        from cwfed.core.errors import CwfedError
        from cwfed.report.finished import read_run
        from cwfed.runs.predict import load_model

        def state(run: Path, client: int):
            return {k: v.tolist() for k, v in load_model(run, client).network.state_dict().items()}

        def report(run: Path):
            found = read_run(run)
            return found.summary, found.rounds, found.config, found.manifest

        looks: list[Callable[[Path], object]] = [lambda run, c=c: state(run, c) for c in range(4)]
        for look in [report, *looks]:
            try:
                seen = look(folder)
            except CwfedError:
                self.counts["reads refused"] += 1
                continue
            assert seen == look(self.folder / "whole"), f"{what}: something else was read without a word"
            self.counts["reads right"] += 1

    def damage_cache(self, name: str = "", how: str = "") -> str:
        """The cache of decoded data is decoded again."""
        entry = next(self.cache.iterdir())
        keep = {p.name: p.read_bytes() for p in entry.iterdir()}
        self.damage(entry / (name or self.random.choice(sorted(keep))), how or self.random.choice(self.HOW))
        outcome = self.judge(self.copy("half"), "damaged caches")
        assert outcome == "resumed", "a damaged cache is made again"
        return outcome

    def fill_disk(self, share: float = 0) -> str:
        """The run lies on a disk that is too small; later there is room."""
        disk = self.folder / "disk"
        disk.mkdir(exist_ok=True)
        needed = sum(2**12 * (1 + len(content) // 2**12) for content in contents(self.folder / "whole").values())
        size = max(2**13, int(needed * (share or self.random.uniform(0.05, 1.1))))
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True)
        if mounted.returncode:
            pytest.skip("no small disk can be mounted here: that needs root")
        try:
            done = self.resume(disk / "run")
            if done.code:
                assert done.code == 1, done.said
                assert done.said.startswith("error: "), done.said
                assert done.said.count("\n") == 1, done.said
                self.counts["disks filled"] += 1
            subprocess.run(["mount", "-o", f"remount,size={64 * 2**20}", disk], check=True)
            outcome = self.judge(disk / "run", "full disks")
            assert outcome == "resumed", "a full disk damages nothing"
            return outcome
        finally:
            subprocess.run(["umount", disk], check=True)

    def take_rights(self, name: str = "", mode: int | None = None) -> str:
        """Somebody changes who may read or write; then changes it back."""
        if os.getuid() != 0:
            pytest.skip("only root can start a process that has fewer rights")
        folder = self.copy("half")
        for path in [folder, *folder.rglob("*"), *self.cache.rglob("*")]:
            os.chown(path, NOBODY, NOBODY)
        before = contents(folder)
        names = [".", "checkpoints", *before]
        path = folder / (name or self.random.choice(names))
        had = path.stat().st_mode
        path.chmod(self.random.choice([0o000, 0o444, 0o555]) if mode is None else mode)
        if path == folder:
            os.chown(folder, 0, 0)
        done = self.resume(folder, user=NOBODY)
        if path.exists():  # a checkpoint may have had its day
            os.chown(path, NOBODY, NOBODY)
            path.chmod(had)
        if done.code:
            assert done.code == 1, done.said
            assert done.said.count("\n") == 1, done.said
            assert done.said.startswith("error: "), done.said
            self.counts["rights missed"] += 1
        outcome = self.judge(folder, "rights taken")
        assert outcome == "resumed", "taking rights damages nothing"
        return outcome

    def two_at_once(self) -> str:
        """Two processes on one folder: one runs, the other says that the folder is in use."""
        folder = self.copy("half")
        done = [running.wait() for running in [self.launch(folder), self.launch(folder)]]
        codes, said = sorted(d.code for d in done), [d.said for d in done]
        assert codes in ([0, 0], [0, 1]), said  # both, where one was through before the other asked
        if codes == [0, 1]:
            assert any("in use by another process" in words for words in said), said
            self.counts["second processes refused"] += 1
        return self.judge(folder, "two processes")

    def kinds(self) -> list[Callable[[], str]]:
        """Everything that can happen; what comes often in life comes often here."""
        often = [self.kill, self.damage_unfinished, self.damage_finished]
        return [
            *often * 2,
            self.damage_all_checkpoints,
            self.damage_cache,
            self.fill_disk,
            self.take_rights,
            self.two_at_once,
        ]
