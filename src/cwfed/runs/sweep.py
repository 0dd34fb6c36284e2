"""Finds the best settings by held-out training data; test data never decide.

A search is a generator: it yields settings to try and is sent how good each was. A grid yields all settings at once, Optuna's sampler
one at a time, chosen by the results so far. The sampler has a seed of its own: the same command asks for the same settings again, finds
their runs finished, and continues from there.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from cwfed.core.errors import ConfigError, RunError
from cwfed.core.events import Event, Round, Started
from cwfed.federation.config import SETTINGS, Config, current_name, parse_value, with_settings
from cwfed.runs import compare
from cwfed.runs.folder import RunFolder
from cwfed.runs.series import Done, Planned, Series
from cwfed.runs.summary import pick, spread

MOST_SETTINGS = 10_000
SAME_TASK = ("data.augment", "data.image_size")
"""Settings of the sections below that may be swept nevertheless: they change neither the task nor how it is judged."""
FIXED = {
    "data": "it changes the data, and results on other data are not comparable: make a sweep for each value",
    "adversary": "it changes the task, and results of other tasks are not comparable: make a sweep for each value",
    "run": "it does not change what is learned, or changes what is measured: give it with --set",
}


# --- what is tried


@dataclass(frozen=True)
class Range:
    """Any number from `low` to `high`, both included; whole numbers if both are."""

    low: float
    high: float
    log: bool


Values: TypeAlias = "list[Any] | Range"
Space: TypeAlias = dict[str, Values]
"""By setting, the values that are tried."""


@dataclass(frozen=True)
class Candidate:
    """One choice of the swept settings."""

    values: Mapping[str, Any]

    @property
    def key(self) -> str:
        """A text that is equal for equal values."""
        return json.dumps(dict(self.values))

    @property
    def label(self) -> str:
        """The values in short, without "algorithm." in the keys."""
        return ", ".join(f"{key.removeprefix('algorithm.')}={_short(value)}" for key, value in self.values.items())

    def applied(self, config: Config) -> Config:
        """The experiment with these values."""
        return with_settings(config, [f"{key}={json.dumps(value)}" for key, value in self.values.items()])


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def parse_space(grids: Sequence[str], ranges: Sequence[str]) -> Space:
    """--grid section.key=1,5,25 and --range section.key=0.001..0.1:log, by their keys."""
    space: Space = {}
    for option, texts in (("--grid", grids), ("--range", ranges)):
        for text in texts:
            key, equals, raw = text.partition("=")
            key = current_name(key.strip())
            if not equals or not raw.strip() or "." not in key:
                example = "train.lr=0.01,0.1" if option == "--grid" else "train.lr=0.001..0.1:log"
                raise ConfigError(f"{option} {text!r} must look like {example}")
            if key in space:
                raise ConfigError(f"{option} {text!r}: {key} is given twice")
            _check_key(key, f"{option} {text!r}")
            space[key] = _values(raw, text) if option == "--grid" else _range(raw, text)
    if not space:
        raise ConfigError("nothing to sweep: give settings and values, such as --grid algorithm.wdr=1,5,25")
    return space


def _check_key(key: str, option: str) -> None:
    section = key.partition(".")[0]
    if key == "run.seed":
        raise ConfigError(f"{option}: a setting is judged by the mean over seeds, so give them as --seeds 0,1,2")
    if section in FIXED and key not in SAME_TASK:
        raise ConfigError(f"{option}: {key} cannot be swept, because {FIXED[section]}")
    if key in SETTINGS and SETTINGS[key].changes == "length":
        raise ConfigError(
            f"{option}: {key} need not be swept, the round is picked on held-out data: set the most with --set"
        )


def _values(raw: str, text: str) -> list[Any]:
    parts = [part.strip() for part in re.split(r",(?![^\[]*\])", raw)]  # not inside brackets
    values = [parse_value(part) for part in parts]
    if "" in parts or any(value in values[:i] for i, value in enumerate(values)):
        raise ConfigError(f"--grid {text!r}: values are separated by commas, and each is another one")
    return values


def _range(raw: str, text: str) -> Range:
    found = re.fullmatch(r"(.+?)\.\.(.+?)(:log)?", raw.strip())
    ends = [parse_value(part) for part in found.groups()[:2]] if found else []
    numbers = bool(ends) and all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends)
    if not found or not numbers or not -math.inf < ends[0] < ends[1] < math.inf or (found[3] and ends[0] <= 0):
        raise ConfigError(
            f"--range {text!r} must look like train.lr=0.001..0.1, the smaller number first; with :log behind it for "
            "a logarithmic scale, both above 0"
        )
    return Range(ends[0], ends[1], bool(found[3]))


Search: TypeAlias = Generator[list[Candidate], list[float | None], None]
"""Yields settings to try; is sent how good each was: more is better, None if a run was given up."""


def grid(space: Space) -> list[Candidate]:
    """All combinations."""
    lists = {key: _listed(key, values) for key, values in space.items()}
    if math.prod(map(len, lists.values())) > MOST_SETTINGS:
        raise ConfigError(
            f"the grid has more than {MOST_SETTINGS:,} settings: --search optuna tries as many as you want"
        )
    return [Candidate(dict(zip(lists, chosen, strict=True))) for chosen in product(*lists.values())]


def _listed(key: str, values: Values) -> list[Any]:
    if isinstance(values, Range):
        raise ConfigError(f"--range {key}: a grid needs values, --grid {key}=...; ranges are for --search optuna")
    return values


def all_of(candidates: list[Candidate]) -> Search:
    """A search that tries these, all at once."""
    yield candidates


def optuna(space: Space, trials: int, seed: int) -> Search:
    """A search of so many settings, chosen by Optuna's default sampler (TPE) from the results so far."""
    try:
        import optuna as package
    except ImportError:
        raise ConfigError('--search optuna needs Optuna: pip install "cwfed[sweep]"') from None
    package.logging.set_verbosity(package.logging.WARNING)
    study = package.create_study(direction="maximize", sampler=package.samplers.TPESampler(seed=seed))
    kinds = {key: _distribution(package.distributions, values) for key, values in space.items()}
    for _ in range(trials):
        trial = study.ask(kinds)
        chosen = {
            key: trial.params[key] if isinstance(values, Range) else values[trial.params[key]]
            for key, values in space.items()
        }
        (worth,) = yield [Candidate(chosen)]
        if worth is None:
            study.tell(trial, state=package.trial.TrialState.FAIL)
        else:
            study.tell(trial, worth)


def _distribution(kinds: Any, values: Values) -> Any:
    if not isinstance(values, Range):
        return kinds.CategoricalDistribution(range(len(values)))  # their numbers: a value may be a list
    whole = isinstance(values.low, int) and isinstance(values.high, int)
    kind = kinds.IntDistribution if whole else kinds.FloatDistribution
    return kind(values.low, values.high, log=values.log)


# --- how good it was


def held_out(events: Sequence[Event]) -> tuple[float, float] | None:
    """The picking metric on held-out data, in the round that these data pick; and its worth (more is better)."""
    started = next(event for event in events if isinstance(event, Started))
    rounds = [event for event in events if isinstance(event, Round)]
    found = pick(rounds, started.phase, started).validated
    value = found[1].held_out(started.pick) if found else None
    return None if value is None else (value, started.worth(value))


@dataclass(frozen=True)
class Tried:
    """A candidate and its outcome."""

    candidate: Candidate
    row: dict[str, Any] | None
    """As in a comparison, and `validation`: mean and standard deviation over the seeds. None if a run was given up."""
    worth: float | None
    """The mean over the seeds, on held-out data; more is better. It alone decides."""
    why_not: str = ""
    """Why it has no result."""


@dataclass(frozen=True)
class Sweep:
    """All candidates, the best first."""

    pick: str
    """The metric that decided."""
    seeds: list[int]
    tried: list[Tried]
    config: Config
    """The experiment with the best setting."""

    @property
    def best(self) -> Tried:
        """What held-out data chose."""
        return self.tried[0]


def check(config: Config) -> None:
    """ConfigError unless data are held out, as only these decide."""
    if not config.data.validation:
        raise ConfigError(
            "a sweep is decided by held-out training data only, never by test data, and data.validation is 0: set it "
            "above 0, such as --set data.validation=0.1"
        )


def sweep(
    config: Config, search: Search, seeds: Sequence[int], out: str | Path, series: Series, runs: int = 0
) -> Sweep:
    """Try what the search asks for, with every seed, and find the best. `runs`: how many runs there will be, if that is known."""
    check(config)
    tried: dict[str, Tried] = {}
    asked, made = next(search), 0
    while asked:
        new = {
            candidate.key: candidate for candidate in asked if candidate.key not in tried
        }  # a sampler may ask again
        wanted = [planned for candidate in new.values() for planned in _plan(config, candidate, seeds, Path(out))]
        made += len(wanted)
        done = series.carry_out(wanted, more=max(0, runs - made))
        for i, (key, candidate) in enumerate(new.items()):
            tried[key] = _judge(candidate, done[i * len(seeds) : (i + 1) * len(seeds)])
        asked = _told(search, [tried[candidate.key].worth for candidate in asked])
    ranked = sorted(tried.values(), key=lambda one: -math.inf if one.worth is None else one.worth, reverse=True)
    if ranked[0].worth is None:
        raise RunError(f"no setting of the sweep has a result to be judged by: {ranked[0].why_not}")
    return Sweep(config.run.pick, list(seeds), ranked, ranked[0].candidate.applied(config))


def _told(search: Search, worths: list[float | None]) -> list[Candidate]:
    """The candidates that the search asks for next; none if it is over."""
    try:
        return search.send(worths)
    except StopIteration:
        return []


def _plan(config: Config, candidate: Candidate, seeds: Sequence[int], out: Path) -> list[Planned]:
    """The runs of a candidate. Their folders have the hash of the experiment in their names, so the same experiment is found again in any sweep."""
    planned = []
    for seed in seeds:
        one = compare.without_models(candidate.applied(with_settings(config, [f"run.seed={seed}"])))
        name = re.sub(r"[^\w.=-]+", "_", candidate.label)[:80]
        planned.append(Planned(candidate.label, seed, one, out / f"{name}-seed-{seed}-{one.fingerprint[:10]}"))
    return planned


def _judge(candidate: Candidate, done: Sequence[Done]) -> Tried:
    if failed := next((one for one in done if one.given_up), None):
        return Tried(candidate, None, None, failed.given_up)
    found = [held_out(RunFolder(one.planned.folder).result()[1]) for one in done]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return Tried(candidate, None, None, "nothing of its data could be held out: the clients have too few samples")
    worth = sum(worth for _, worth in known) / len(known)
    row = compare.row(done) | {"validation": spread([value for value, _ in known])}
    return Tried(candidate, row, worth)
