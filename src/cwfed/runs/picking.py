"""The round that validation picks while a run goes on, and which clients' models are saved at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import NamedTuple

from cwfed.core.events import Event, PhaseResult, Round, Started
from cwfed.federation.config import Config
from cwfed.federation.rounds import FinalModels, Progress
from cwfed.runs.backend import Runner
from cwfed.runs.folder import RunFolder
from cwfed.runs.summary import pick

MODELS_LIMIT = 2**30
"""Bytes of all clients' models of one round up to which `run.save_models = "auto"` writes them."""


class Picked(NamedTuple):
    """The round that validation has picked so far, with the progress that its models are made from if they are to be saved."""

    round: int = 0
    worth: float = -inf
    progress: Progress | None = None


def after(picked: Picked, event: Event, started: Started, progress: Callable[[], Progress | None]) -> Picked:
    """What validation picks after one more event. As in `summary.pick`, the first of equal rounds."""
    result: PhaseResult | None = getattr(event, started.phase) if isinstance(event, Round) else None
    if not isinstance(event, Round) or result is None:
        return picked
    worth = started.worth(result.held_out(started.pick))
    return Picked(event.round, worth, progress()) if worth > picked.worth else picked


def picked_before(folder: RunFolder, started: Started, progress: Progress | None) -> Picked:
    """What validation had picked when the run was interrupted; its progress, if the checkpoint has it."""
    happened = [event for event in folder.events() if isinstance(event, Round)]
    found = pick(happened, started.phase, started).validated
    if found is None:
        return Picked()
    worth = started.worth(found[1].held_out(started.pick))
    return Picked(found[0], worth, progress if progress and progress.round == found[0] else None)


def saves_models(config: Config, final: FinalModels | None) -> bool:
    """Whether the clients' models are to be saved."""
    wanted = config.run.save_models
    return final is not None and (wanted == "all" or (wanted == "auto" and final.nbytes <= MODELS_LIMIT))


def save_models(folder: RunFolder, runner: Runner, progress: Progress, picked: Picked) -> Iterator[str]:
    """Write every client's model of the last round, and of the round that validation picked if that is another one; yields notes."""
    config, final = runner.config, runner.final_models(progress)
    if final is None or config.run.save_models == "none":
        return
    if not saves_models(config, final):
        yield (
            f"the final models of {final.clients:,} clients could take {final.nbytes / 2**30:.1f} GiB and were not "
            'written; run.save_models = "all" with --resume writes them'
        )
        return
    rounds, validated = {"last": progress.round}, None
    if picked.round and picked.round != progress.round:
        validated = runner.final_models(picked.progress) if picked.progress else None
        if validated is None:
            yield (
                f"only the models of the last round were written: those of round {picked.round}, which validation picked, "
                "were not kept when it was made"
            )
    if validated or picked.round == progress.round:
        rounds["validated"] = picked.round
    folder.save_models(final.models, rounds, validated.models if validated else None)
