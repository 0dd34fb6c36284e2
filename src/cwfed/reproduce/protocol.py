"""Notes about how the numbers of a page were made: what was held out, what ± is computed over, how a scale differs. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cwfed.federation.config import Config
from cwfed.federation.settings import flat
from cwfed.reproduce.spec import Setup

SECTIONS = ("data", "model", "train")
"""The sections in which scales differ; how a run is carried out does not change its results."""
SAID_ELSEWHERE = ("data.validation", "data.split_seed")
"""Settings that have a note of their own."""
BEST_ROUND = "Accuracies are those of the best round on test data, as in the paper."


def notes(configs: Sequence[Config]) -> list[str]:
    """The notes of a page, from the configs of its runs."""
    return [held_out(configs), spread_over(configs)] if configs else []


def held_out(configs: Sequence[Config]) -> str:
    """A note about the data that clients did not train on."""
    shares = sorted({config.data.validation for config in configs})
    if shares == [0.0]:
        words = "Clients train on all of their training data (75 % of their samples): nothing is held out for validation, so no round can be picked on it."
    else:
        some = " or ".join(f"{100 * share:g} %" for share in shares)
        words = f"{some} of each client's training data (75 % of its samples) is held out for validation and not trained on; no round is picked on it here."
    own = sorted({(c.algorithm_name, c.build_algorithm().held_out()) for c in configs})
    return words + "".join(
        f" {name} holds out another {100 * share:g} % for its own use." for name, share in own if share
    )


def spread_over(configs: Sequence[Config]) -> str:
    """What seeds stand for."""
    seeds = len({config.run.seed for config in configs})
    if seeds == 1:
        return "One seed: how much results differ from seed to seed is not measured."
    if all(config.data.split_seed >= 0 for config in configs):
        return (
            f"± is the standard deviation over {seeds} training seeds on one split of each data set, as in the paper."
        )
    return (
        f"± is the standard deviation over {seeds} seeds, each with a split of its own; "
        "the paper's is over training seeds on one split."
    )


def reduced(setups: Sequence[Setup]) -> list[str]:
    """How the settings of a scale differ from the paper's: first what all have in common, then the rest of each."""
    changes = {setup.title: _changes(setup) for setup in setups}
    if not any(changes.values()):
        return []
    shared = [words for words in next(iter(changes.values())) if all(words in found for found in changes.values())]
    parts = [", ".join(shared)] if shared else []
    for title, found in changes.items():
        if own := [words for words in found if words not in shared]:
            parts.append(f"{title}: {', '.join(own)}")
    return [f"Not the paper's setting (its values in brackets): {'; '.join(parts)}."]


def _changes(setup: Setup) -> list[str]:
    here, there = (settings(s.config) | flat(s.algorithms) for s in (setup, Setup(setup.name, "paper")))
    keys = [key for key in here | there if here.get(key) != there.get(key) and key not in SAID_ELSEWHERE]
    return [f"{key} = {_word(key, here)} ({_word(key, there)})" for key in keys]


def _word(key: str, table: dict[str, Any]) -> Any:
    value = table.get(key, "default")
    return "all" if key == "data.samples" and value == 0 else value


def settings(config: Config) -> dict[str, Any]:
    """What can differ between experiments, by dotted names."""
    return flat({name: config.model_dump()[name] for name in SECTIONS})
