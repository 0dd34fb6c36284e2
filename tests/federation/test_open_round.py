"""A round without engine or network: answers made by hand, and what becomes of them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from cwfed.core.errors import RunError
from cwfed.core.metrics import Tally
from cwfed.core.types import nbytes
from cwfed.engine import Score
from cwfed.federation.experiment import Blueprint
from cwfed.federation.open_round import OpenRound, Update
from cwfed.federation.rounds import SPOILS, Progress, give_up_in_vain, is_over
from cwfed.models import InputShape
from tests.conftest import leaves, small

NAN = math.nan
SIZES = dict.fromkeys(range(4), (10, 5))
"""By client, test and held-out samples."""


@cache
def blueprint(*settings: str) -> Blueprint:
    """Four clients, samples of two numbers, two classes."""
    base = ["algorithm.name=fedavg", "model.options.hidden=2", "data.clients=4", "train.rounds=9"]
    return Blueprint(small(*base, *settings), InputShape((2,)), 2, 4)


def open_round(*settings: str, before: Progress | None = None) -> OpenRound:
    blue = blueprint(*settings)
    return OpenRound(blue, before or Progress(0, blue.first_state()), range(4))


def models(*values: float):
    """A stack of models, all of whose numbers are the same."""
    initial = blueprint().initial
    return {name: torch.stack([torch.full_like(w, value) for value in values]) for name, w in initial.items()}


def take(opened: OpenRound, values: dict[int, float], samples: int = 1, **more) -> OpenRound:
    opened.take([Update(c, samples, penalty=0.5, loss=2.0, **more) for c in values], models(*values.values()))
    return opened


def close(opened: OpenRound) -> OpenRound:
    opened.close(lambda client: {name: torch.zeros_like(w) for name, w in opened.blueprint.initial.items()})
    return opened


def value_of(opened: OpenRound) -> float:
    """All numbers of the server's model, where they are the same."""
    (value,) = {number for w in opened.progress.server["model"].values() for number in w.flatten().tolist()}
    return value


def score(right: int, held_out: int = 0) -> Score:
    return Score(Tally(right, 1.0), Tally(held_out, 1.0))


# --- who is invited


def test_everybody_is_asked_but_who_is_lost_on_the_way():
    assert open_round().asked == [0, 1, 2, 3]
    half = open_round("train.participation=0.5")
    assert half.invited == half.asked
    assert len(half.asked) == 2
    for number in range(8):
        opened = open_round("train.client_dropout=0.5", before=Progress(number, None))
        assert sorted(opened.asked + opened.lost) == [0, 1, 2, 3]
        again = open_round("train.client_dropout=0.5", before=Progress(number, None))
        assert again.lost == opened.lost
    assert 0 < len(open_round("train.client_dropout=0.5", before=Progress(1, None)).lost) < 4


# --- answers


def test_a_round_by_hand():
    """1 x 1 sample and 4 x 2 samples: (1 + 8) / 3 = 3."""
    opened = open_round()
    updates = [Update(1, 1, penalty=0.5, loss=1.0), Update(3, 2, penalty=1.5, loss=4.0)]
    opened.down = 40
    opened.take(updates, models(1.0, 4.0))
    close(opened)
    assert value_of(opened) == 3.0
    after = opened.finish({})
    assert (after.round, after.kept, after.trained, after.in_vain) == (1, {}, {}, ())
    event = opened.event()
    assert (event.round, event.participants, event.dropped, event.refused) == (1, [1, 3], [0, 2], {})
    assert (event.loss, event.penalty, event.client_loss) == (2.5, 1.0, [1.0, 4.0])
    assert (event.down, event.up) == (40, 2 * nbytes(blueprint().initial))
    assert event.received is event.trained is None
    assert list(event.seconds) == ["train", "guard", "aggregate", "evaluate", "report"]


def test_when_all_are_lost_nothing_changes_and_nothing_was_in_vain():
    opened = open_round()
    before = opened.before.server
    opened.take([], {})
    close(opened)
    assert opened.progress.server is before
    event = opened.event()
    assert (event.participants, event.dropped, event.loss, event.up) == ([], [0, 1, 2, 3], None, 0)
    assert event.skipped == "0 good updates, and guard.least = 1"
    assert opened.progress.in_vain == ()


def test_who_is_refused_is_left_out_with_its_reason_and_what_it_sent_is_counted():
    opened = open_round()
    opened.refuse(3, "it cannot be read")
    opened.refuse(3, "a second reason")
    take(opened, {0: 1.0, 2: NAN})
    assert opened.lost == [1]
    close(opened)
    assert value_of(opened) == 1.0
    event = opened.event()
    assert event.participants == [0]
    assert list(event.refused) == ["2", "3"]
    assert "not finite" in event.refused["2"]
    assert event.refused["3"] == "it cannot be read"
    assert event.up == 2 * nbytes(blueprint().initial)
    assert opened.progress.in_vain == ()


def test_a_training_that_diverged_is_refused():
    opened = open_round()
    opened.take([Update(0, 1, 0.0, NAN), Update(1, 1, math.inf, 1.0), Update(2, 1, 0.0, 1.0)], models(1.0, 1.0, 1.0))
    assert opened.refused.keys() == {0, 1}
    assert "the loss of client 0 in round 1 is not a finite number" in opened.refused[0]


def test_who_makes_the_state_infinite_is_refused_although_its_update_looks_fine(monkeypatch):
    """Here the aggregation divides by a number that one of them makes 0."""
    aggregate = type(blueprint().algorithm).aggregate

    def divide(self, state, up):
        return aggregate(self, state, up) | {"inverse": (1 / up.models["output.bias"][:, 0]).sum()}

    monkeypatch.setattr(type(blueprint().algorithm), "aggregate", divide)
    opened = close(take(open_round(), {0: 1.0, 1: 0.0, 2: 3.0}, keeps={"x": torch.ones(1)}))
    assert opened.refused == {1: SPOILS}
    assert value_of_model(opened) == 2.0
    assert opened.event().participants == [0, 2]
    assert opened.kept.keys() == {0, 2}


def value_of_model(opened: OpenRound) -> float:
    return float(opened.progress.server["model"]["output.bias"][0])


def test_all_refused_three_times_is_the_end_and_one_good_update_begins_anew():
    progress = Progress(0, blueprint().first_state())
    for number in (1, 2):
        opened = open_round(before=progress)
        opened.refuse(1, f"unreadable in round {number}")
        close(take(opened, {0: NAN}))
        assert opened.progress.server is progress.server
        progress = opened.progress
        give_up_in_vain(progress, rounds=9)
    assert [reason.split()[0] for reason in progress.in_vain] == ["fc.weight", "fc.weight"], (
        "that of the first client"
    )
    good = close(take(open_round(before=progress), {0: NAN, 1: 1.0}))
    assert good.progress.in_vain == ()
    silent = open_round(before=progress)
    silent.take([], {})
    assert close(silent).progress.in_vain == (), "nobody was refused"

    bad = close(take(open_round(before=progress), {0: NAN, 3: NAN}))
    with pytest.raises(RunError, match=r"every update of the last 3 rounds was refused: fc.weight of the model"):
        give_up_in_vain(bad.progress, rounds=9)


def test_too_few_good_updates_leave_everything_as_it_was():
    own = {"w": torch.ones(1)}
    before = Progress(4, blueprint().first_state(), kept={0: {"w": torch.zeros(1)}})
    opened = close(take(open_round("guard.least=3", before=before), {0: 1.0, 1: 2.0, 2: NAN}, keeps=own))
    event = opened.event()
    assert (event.participants, event.loss, event.client_loss) == ([], None, [])
    assert event.skipped == "2 good updates, and guard.least = 3"
    assert list(event.refused) == ["2"]
    after = opened.progress
    assert (after.round, after.in_vain) == (5, ())
    assert after.server is before.server
    assert leaves(after.kept) == leaves(before.kept)


def test_long_updates_are_scaled_back():
    """From zero: updates of 1, 2 and 9 numbers' lengths; the median is 2, at most 1.5 times it is 3. (1 + 2 + 3) / 3 = 2."""
    opened = close(take(open_round("guard.norm_bound=1.5"), {0: 1.0, 1: 2.0, 2: 9.0}))
    assert opened.event().scaled_back == [2]
    assert opened.progress.server["model"]["output.bias"].tolist() == pytest.approx([2.0, 2.0])
    assert close(take(open_round(), {0: 1.0, 1: 2.0, 2: 9.0})).event().scaled_back == []


def test_a_loss_that_one_does_not_tell_is_nobodys():
    opened = open_round()
    opened.take([Update(0, 1, penalty=1.0), Update(1, 1, penalty=2.0, loss=3.0)], models(1.0, 1.0))
    event = close(opened).event()
    assert (event.loss, event.client_loss, event.penalty) == (None, [], 1.5)


# --- what clients keep, and how good it is


def test_what_participants_keep_is_theirs_from_now_on():
    before = Progress(1, blueprint().first_state(), kept={0: {"w": torch.zeros(1)}, 3: {"w": torch.zeros(1)}})
    opened = close(take(open_round(before=before), {0: 1.0, 1: 1.0, 2: NAN}, keeps={"w": torch.ones(1)}))
    assert {client: float(own["w"]) for client, own in opened.progress.kept.items()} == {0: 1, 1: 1, 3: 0}
    assert before.kept.keys() == {0, 3}


def test_scores_of_models_that_clients_keep_last_until_they_train_again():
    own = "algorithm.name=fedavg-ft"
    assert blueprint(own).has_own_models
    before = Progress(1, blueprint(own).first_state(), trained={0: score(1), 1: score(2), 3: score(4)})
    opened = take(open_round(own, before=before), {0: 1.0, 1: NAN}, score=score(9))
    opened.forget(3)  # its data have changed
    close(opened)
    assert opened.progress.trained == {0: score(9), 1: score(2)}, "a refused client goes on with its old model"
    opened.measured("received", dict.fromkeys(range(4), score(5)))
    opened.measured("trained", {3: score(7)})
    after = opened.finish(SIZES)
    assert after.trained == {0: score(9), 1: score(2), 3: score(7)}
    event = opened.event()
    assert event.received.right == [5, 5, 5, 5]
    assert event.trained.right == [9, 2, 5, 7], "client 2 has no model of its own yet"
    assert event.trained.accuracy == 23 / 40
    assert before.trained.keys() == {0, 1, 3}


def test_a_model_that_was_trained_and_not_measured_has_no_score():
    own = "algorithm.name=fedavg-ft"
    before = Progress(1, blueprint(own).first_state(), trained={0: score(1), 1: score(2)})
    assert close(take(open_round(own, before=before), {0: 1.0})).finish({}).trained == {1: score(2)}


def test_without_own_models_scores_are_of_one_round():
    opened = close(take(open_round(before=Progress(1, blueprint().first_state())), {0: 1.0}, score=score(9)))
    opened.measured("received", {0: score(5), 1: score(5)})
    assert opened.finish(SIZES).trained == {}
    assert opened.event().trained.right == [9, 5]


def test_scores_that_the_data_cannot_have_are_passed_over():
    own = "algorithm.name=fedavg-ft"
    before = Progress(1, blueprint(own).first_state(), trained={0: score(9), 1: score(3, held_out=6), 2: score(9)})
    opened = open_round(own, before=before)
    opened.take([], {})
    close(opened)
    opened.measured("received", {0: score(2), 1: score(2)})
    opened.finish({0: (8, 5), 1: (8, 5), 2: (8, 5)})
    assert opened.event().trained.right == [2, 2], "and client 2 was not measured"
    assert opened.result("received", {0: (0, 0), 1: (0, 0)}) is None, "nobody has test samples"


# --- when models are measured, and when the run ends


def test_every_second_round_and_the_last_are_evaluated():
    rare = [open_round("run.evaluate_every=2", before=Progress(number, None)).is_evaluated for number in range(9)]
    assert rare == [False, True, False, True, False, True, False, True, True]


def test_patience_counts_evaluated_rounds_since_the_best():
    patient = ("run.patience=2", "data.validation=0.2")
    progress = Progress(0, blueprint(*patient).first_state())
    seen = []
    for held_out in (3, None, 4, 4, None, 2):  # right answers of five; None: a round without evaluation
        opened = open_round(*patient, before=progress)
        opened.take([], {})
        close(opened)
        if held_out is not None:
            opened.measured("received", {0: score(1, held_out)})
        progress = opened.finish(SIZES)
        seen.append((progress.best, progress.waited, bool(opened.event().stopped)))
    assert seen == [(0.6, 0, False)] * 2 + [(0.8, 0, False)] + [(0.8, 1, False)] * 2 + [(0.8, 2, True)]
    assert "stopped after round 6 of 9" in opened.event().stopped
    assert is_over(blueprint(*patient).config, progress)
    assert not is_over(blueprint(*patient).config, replace(progress, waited=1))


class Counted(int):
    """A client's number that counts how often it is compared."""

    times = 0
    __hash__ = int.__hash__

    def __eq__(self, other):
        Counted.times += 1
        return int(self) == int(other)


def test_ten_times_as_many_clients_are_not_a_hundred_times_the_work():
    """Half of them are lost. Each of 10,000 was looked for among the lost ones: a second a round."""
    blue, clients = blueprint("train.client_dropout=0.5"), [Counted(c) for c in range(300)]
    opened = OpenRound(blue, Progress(0, blue.first_state()), clients)
    assert Counted.times < 10 * len(clients)
    assert sorted([*map(int, opened.lost), *map(int, opened.asked)]) == list(range(300))
    assert 100 < len(opened.lost) < 200
