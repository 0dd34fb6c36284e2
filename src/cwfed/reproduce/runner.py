"""What a table or figure runs, how long that will take, and carrying it out."""

from __future__ import annotations

import dataclasses
import re
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cwfed.core.errors import ConfigError, DataError, RunError
from cwfed.core.events import Event, Round
from cwfed.federation.config import Config, with_settings
from cwfed.report.finished import RunRecord, read_run
from cwfed.reproduce.spec import Item, Row, Scale, Setup, find
from cwfed.runs import archive, memory, session
from cwfed.runs.compare import Entry, with_algorithm
from cwfed.runs.folder import RunFolder

SHORT_ROUND = 40
"""Samples a client in the short round from which a dry run estimates the time."""


@dataclass(frozen=True)
class Job:
    """One run: a setting, a method, a seed."""

    setup: Setup
    row: Row
    seed: int
    folder: Path

    @property
    def entry(self) -> Entry:
        """The algorithm with all its settings."""
        return self.setup.entry(self.row)

    @property
    def config(self) -> Config:
        """The run's config."""
        return with_algorithm(self.setup.config, self.entry, self.seed)

    @property
    def title(self) -> str:
        """A title for progress bars. The part that differs comes first, because a narrow terminal cuts off the end."""
        return self.row.label + (f", seed {self.seed}" if self.seed else "") + f" on {self.setup.title}"

    @property
    def place(self) -> Path:
        """Where the run is: its folder, or beside that the archive that `cwfed export` made of it, also of a run that goes on in the folder."""
        packed = self.folder.with_name(self.folder.name + archive.ENDING)
        if not archive.is_archive(packed):
            return self.folder
        if not RunFolder(self.folder).exists:
            return packed
        with archive.readable(packed) as path:
            is_wanted = RunFolder(path).rounds_done() == self.config.train.rounds
        return packed if is_wanted else self.folder

    @property
    def state(self) -> str:
        """The state: finished, begun or new. A run with fewer rounds than wanted is begun; as an archive it is new, since it cannot be resumed."""
        with archive.readable(self.place) as path:
            folder = RunFolder(path)
            if folder.has_all(self.config.train.rounds):
                return "finished"
            return "begun" if folder.exists and path == self.folder else "new"

    def check_same(self) -> None:
        """RunError if the run is another experiment."""
        with archive.readable(self.place) as path:
            RunFolder(path).check_same(self.config)


class Workshop:
    """The runs of a scale, and their folders. Tables and figures share runs."""

    def __init__(
        self,
        scale: Scale,
        out: Path,
        seeds: Sequence[int] | None = None,
        data_dir: str | None = None,
        changes: Sequence[str] = (),
    ) -> None:
        self.scale, self.folder, self.seeds, self.data_dir, self.changes = (
            scale,
            out / scale,
            seeds,
            data_dir,
            changes,
        )
        for change in changes:
            if re.match(r"\s*(algorithm\b|run\.seed\s*=)", change):
                raise ConfigError(
                    f"--set {change}: methods and seeds are those of the table; --methods and --seeds choose among them"
                )

    def setup(self, name: str) -> Setup:
        """An experimental setting as it is run here."""
        return Setup(name, self.scale, self.changes)

    def setups(self, item: Item) -> list[Setup]:
        """Those of a table or figure."""
        return [self.setup(name) for name in item.settings]

    def jobs(self, item: Item) -> list[Job]:
        """All runs that a table or figure needs."""
        return [job for setup in self.setups(item) for row in item.rows for job in self.jobs_of(setup, row)]

    def missing(self, item: Item) -> list[Job]:
        """Those of them that are not finished."""
        return [job for job in self.jobs(item) if job.state != "finished"]

    def jobs_of(self, setup: Setup, row: Row) -> list[Job]:
        """The runs of one method in one setting, a seed each."""
        entry = setup.entry(row)
        return [
            Job(setup, row, seed, self.folder / setup.name / entry.folder / f"seed-{seed}")
            for seed in self.seeds or setup.seeds
        ]

    def records(self, setup: Setup, row: Row) -> list[RunRecord]:
        """The finished runs of one method in one setting."""
        try:
            return [read_run(job.place, row.label) for job in self.jobs_of(setup, row)]
        except RunError as error:
            raise RunError(f"{error}; remove that, the same command runs it again") from None

    def carry_out(
        self,
        item: Item,
        on_run: Callable[[Job], Callable[[Event], None]],
        on_done: Callable[[Job], None] = lambda job: None,
    ) -> None:
        """Run what is not finished; interrupted runs are resumed."""
        for job in self.jobs(item):
            listener = on_run(job)
            if job.place != job.folder and job.state == "finished":
                job.check_same()
            else:
                session.run(job.config, job.folder, resume=True, data_dir=self.data_dir, on_event=listener)
            on_done(job)

    def require(self, item: Item) -> None:
        """An error where runs are missing (all of them, of what is beyond the paper), with the command that makes them, or are
        of other settings."""
        jobs, missing = self.jobs(item), self.missing(item)
        if missing and not (item.beyond and len(missing) < len(jobs)):
            raise RunError(
                f"{item.name} needs {len(missing)} runs that are not finished, such as {missing[0].folder}: "
                f"{self.command(item)} makes them"
            )
        for job in jobs:
            if job.state == "finished":
                job.check_same()

    def command(self, item: Item) -> str:
        """The command that makes a table or figure here."""
        whole = find(item.name)
        labels = [row.label for row in item.rows]
        more = ["--seeds", ",".join(map(str, self.seeds))] if self.seeds else []
        more += ["--settings", ",".join(item.settings)] if item.settings != whole.settings else []
        more += ["--methods", ",".join(labels)] if labels != [row.label for row in whole.rows] else []
        more += [part for change in self.changes for part in ("--set", change)]
        return shlex.join(
            ["cwfed", "reproduce", item.name, "--scale", self.scale, *more, "--out", str(self.folder.parent)]
        )


@dataclass(frozen=True)
class Estimate:
    """What a run will cost, from one short round of it on this machine."""

    seconds: float
    traffic: float
    """Bytes that would travel in a real federation."""
    memory: int
    """Peak memory of the short round, which loads the whole data set and has a model for every client."""

    def for_job(self, job: Job) -> Estimate:
        """What is left of a job that was begun or finished."""
        left = 1 - _done(job)
        return Estimate(self.seconds * left, self.traffic * left, self.memory)

    def as_dict(self) -> dict[str, float]:
        """For programs."""
        return dataclasses.asdict(self)


def estimate(job: Job, data_dir: str | None) -> Estimate:
    """Measure one round on few samples and multiply: time goes with the samples, traffic does not.

    It is the second of three: the first warms up, the last draws the portrait.
    """
    config = job.config
    wanted = max(SHORT_ROUND, 4 * config.train.batch_size) * config.data.clients
    samples = min(wanted, config.data.samples or wanted)
    seen: list[Event] = []
    memory.forget_peak()
    with tempfile.TemporaryDirectory() as scratch:
        times = _short_round(config, samples, Path(scratch) / "run", data_dir, seen.append)
    _, middle, _ = (event for event in seen if isinstance(event, Round))
    rounds, every = config.train.rounds, config.run.evaluate_every
    training, measuring = middle.seconds.get("train", 0.0), middle.seconds.get("evaluate", 0.0)
    rest = sum(middle.seconds.values()) - training - measuring
    seconds = rounds * (times * (training + measuring / every) + rest)
    return Estimate(seconds, float(rounds * (middle.down + middle.up)), memory.peak())


def _short_round(
    config: Config, samples: int, folder: Path, data_dir: str | None, on_event: Callable[[Event], None]
) -> float:
    """Three rounds on few samples; how many times as many the run has."""
    settings = ["train.rounds=3", "run.evaluate_every=1", "run.compile=never", "run.save_models=none"]
    try:
        session.run(
            with_settings(config, [f"data.samples={samples}", *settings]),
            folder,
            data_dir=data_dir,
            on_event=on_event,
        )
    except DataError:  # too few to be dealt out: measure on all that the run has
        session.run(with_settings(config, settings), folder, data_dir=data_dir, on_event=on_event)
        return 1.0
    whole: int = RunFolder(folder).read_json("manifest.json", "data")["data"]["samples"]
    return (config.data.samples or whole) / samples


def _done(job: Job) -> float:
    """The share of a job's rounds that is done already."""
    folder = RunFolder(job.folder)
    if not (job.folder / "events.jsonl").exists():
        return 0.0
    return min(1.0, sum(isinstance(event, Round) for event in folder.events()) / job.config.train.rounds)
