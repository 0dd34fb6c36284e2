"""What the guard refuses, in words; what happens to a round whose updates are refused; how long updates may be."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cwfed.algorithms.fedavg import FedAvg, Local
from cwfed.cli.console import print_summary
from cwfed.core.errors import ConfigError, RunError
from cwfed.core.events import Round
from cwfed.core.types import ExtraSpec
from cwfed.federation.guard import Guard, bounded, harmless, is_finite_state, misfit, spec_of
from cwfed.federation.rounds import SPOILS, close, to_tree
from cwfed.federation.sections import GuardSection
from cwfed.federation.simulation import Simulation
from cwfed.privacy.dp import SamplePrivacy
from cwfed.privacy.noise import Seeded
from cwfed.runs import session
from cwfed.runs.folder import RunFolder
from tests.algorithms.helpers import model, task, uploads
from tests.conftest import finish, leaves, small

GOOD = {"w": torch.ones(2, 3), "b": torch.zeros(())}
GUARD = Guard(spec_of(GOOD), {"counts": ExtraSpec(torch.float32, (2,), 0, 10)}, most_samples=1000)
BESIDE = {"counts": torch.tensor([0.0, 10.0])}


def test_an_honest_upload_is_fine():
    assert GUARD.problem(GOOD, BESIDE, 1) == GUARD.problem(GOOD, BESIDE, 1000) == ""


@pytest.mark.parametrize(
    ("model", "beside", "samples", "says"),
    [
        ({"w": GOOD["w"]}, BESIDE, 5, "the model lacks b"),
        (GOOD | {"extra": torch.ones(1)}, BESIDE, 5, "the model has an unknown tensor extra"),
        (GOOD | {"w": torch.ones(3, 2)}, BESIDE, 5, r"w of the model has the shape \(3, 2\), not \(2, 3\)"),
        (GOOD | {"w": torch.ones(2, 3).double()}, BESIDE, 5, "w of the model is torch.float64, not torch.float32"),
        (GOOD | {"b": torch.tensor(math.nan)}, BESIDE, 5, "b of the model has values that are not finite"),
        (GOOD | {"w": torch.full((2, 3), -math.inf)}, BESIDE, 5, "w of the model has values that are not finite"),
        (GOOD, {}, 5, "what comes beside the model lacks counts"),
        (GOOD, {"counts": torch.tensor([-1.0, 3.0])}, 5, "counts .* outside 0 to 10"),
        (GOOD, {"counts": torch.tensor([1.0, 11.0])}, 5, "counts .* outside 0 to 10"),
        (GOOD, BESIDE, 0, "0 training samples, which must be a whole number from 1 to 1,000"),
        (GOOD, BESIDE, -3, "-3 training samples"),
        (GOOD, BESIDE, 2.5, "2.5 training samples"),
        (GOOD, BESIDE, 1001, "1001 training samples"),
        (GOOD, BESIDE, math.nan, "nan training samples"),
        (GOOD, BESIDE, math.inf, "inf training samples"),
    ],
)
def test_what_is_refused_and_why(model, beside, samples, says):
    assert re.search(says, GUARD.problem(model, beside, samples))


@pytest.mark.parametrize(
    ("form", "value", "fine"),
    [
        (ExtraSpec(torch.float32, (), 0), -1.0, False),  # bounded on one side only
        (ExtraSpec(torch.float32, (), 0), 1e9, True),
        (ExtraSpec(torch.float32, ()), -2e18, False),
        (ExtraSpec(torch.float32, (), high=3), 4.0, False),
        (ExtraSpec(torch.float32, (), high=3), 3.0, True),
        (ExtraSpec(torch.float32, (), 2, 2), 2.0, True),
    ],
)
def test_bounds_of_what_comes_beside(form, value, fine):
    assert (misfit({"x": torch.tensor(value)}, {"x": form}, "it") == "") == fine


def test_an_empty_tensor_has_nothing_out_of_bounds():
    assert misfit({"x": torch.zeros(0)}, {"x": ExtraSpec(torch.float32, (0,), 0, 1)}, "it") == ""


def test_a_round_of_nobody_has_no_problem():
    assert GUARD.problems({"w": torch.zeros(0, 2, 3), "b": torch.zeros(0)}, [], []) == {}


def test_methods_that_upload_no_model_are_judged_by_what_comes_beside():
    assert Guard({}, GUARD.extras_spec).problems({}, [BESIDE, {}], [1, 1]) == {
        1: "what comes beside the model lacks counts"
    }


def test_a_guard_knows_what_its_algorithm_uploads():
    assert Guard.of(FedAvg(), GOOD, task(3)) == Guard(spec_of(GOOD), {}, 10**9)
    assert Guard.of(Local(), GOOD, task(3), 5) == Guard({}, {}, 5)


def test_large_finite_numbers_are_not_mistaken_for_too_large_ones():
    """The norm of the row is above the bound; a closer look shows that none of its numbers is."""
    large = GOOD | {"w": torch.full((2, 3), 0.99e18)}
    assert large["w"].norm() > 1e18
    assert GUARD.problem(large, BESIDE, 5) == ""
    stack = {name: torch.stack([w, GOOD[name]]) for name, w in large.items()}
    assert GUARD.problems(stack, [BESIDE, BESIDE], [5, 5]) == {}


@pytest.mark.parametrize("value", [3e38, -3e38, 1.1e18])
def test_numbers_that_sums_cannot_hold_are_refused(value):
    """Two uploads with 3e38 are a float32 mean that is infinite."""
    large = GOOD | {"w": torch.full((2, 3), value)}
    says = "w of the model has values outside -1e+18 to 1e+18 (the training diverged: lower train.lr; where a client may be hostile, set guard.norm_bound)"
    assert GUARD.problem(large, BESIDE, 5) == says
    stack = {name: torch.stack([GOOD[name], w]) for name, w in large.items()}
    assert GUARD.problems(stack, [BESIDE, BESIDE], [5, 5]) == {1: says}


LARGEST_FLOAT = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("counts", "samples", "says"),
    [
        ([3.0, 4.0], 7, ""),
        ([0.0, 7.0], 7, ""),
        ([0.0, 0.0], 7, "add up to 0, not to its 7 samples"),
        ([3.0, 5.0], 7, "add up to 8, not to its 7 samples"),
        ([LARGEST_FLOAT, 0.0], 7, "outside 0 to 1e"),
        ([1e18, 0.0], 10**9, "add up to 1e.18, not to its 1,000,000,000 samples"),
        ([1e-45, 0.0], 1, "not to its 1 samples"),
        ([-1.0, 8.0], 7, "outside 0 to 1e"),
        ([0.5e9, 0.3e9], 8 * 10**8, ""),  # float32 rounds such counts
    ],
)
def test_class_counts_are_those_of_the_samples(counts, samples, says):
    form = ExtraSpec(torch.float32, (2,), 0, counts_samples=True)
    found = Guard(spec_of(GOOD), {"counts": form}).problem(GOOD, {"counts": torch.tensor(counts)}, samples)
    assert re.search(says, found) if says else found == ""


def test_noisy_class_counts_may_miss_the_samples_by_what_the_noise_can_do():
    """Laplace noise of scale 1 / 2 on two classes, never above 50 / 2 each: 7 samples may be up to 57, but not none."""
    guard = Guard(spec_of(GOOD), {"counts": ExtraSpec(torch.float32, (2,), 0, counts_samples=True)}, histogram=2.0)
    for counts, is_fine in (((57.0, 0.0), True), ((58.0, 0.0), False), ((0.0, 0.0), False), ((0.1, 0.0), True)):
        assert (guard.problem(GOOD, {"counts": torch.tensor(counts)}, 7) == "") == is_fine


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 200), min_size=2, max_size=10).filter(any), st.floats(0.1, 20), st.integers(0, 2**31))
def test_no_honest_noisy_histogram_is_refused(counts, epsilon, seed):
    how = SamplePrivacy(1.0, 1.0, 1e-5, epsilon)
    noisy = how.class_counts(np.array(counts), Seeded(seed), 0)
    form = ExtraSpec(torch.float32, (len(counts),), 0, counts_samples=True)
    assert Guard({}, {"counts": form}, histogram=epsilon).problem({}, {"counts": noisy}, sum(counts)) == ""


# --- uploads that look fine and give no state


@pytest.mark.parametrize("bad", [set(), {0}, {6}, {2, 3}, {0, 1, 2, 3, 4, 5, 6}])
def test_culprits_are_found_and_nobody_else_is_refused(bad):
    up = uploads(range(7), [[1.0 + row] for row in range(7)])
    tries = []

    def is_good(rows):
        tries.append(rows)
        return not bad & set(rows)

    assert harmless(up, is_good) == [row for row in range(7) if row not in bad]
    assert len(tries) <= 1 + 2 * 3 * max(1, len(bad))


def test_of_two_that_only_spoil_together_the_larger_one_is_refused():
    up = uploads((4, 7, 9), [[5.0], [2.0], [3.0]])
    assert harmless(up, lambda rows: not {0, 2} <= set(rows)) == [1, 2]


@dataclass(frozen=True)
class Inverse(FedAvg):
    """A user's algorithm that divides by what it is sent."""

    def aggregate(self, state, up):
        inverses = {name: 1 / w for name, w in up.models.items()}
        return {"model": state["model"], "inverse": {name: w.sum(0) for name, w in inverses.items()}}


def test_no_state_is_taken_over_that_is_not_finite():
    up = uploads((3, 5, 8), [[1.0], [0.0], [2.0]], [10, 20, 30])
    state = {"model": model(7.0)}
    closed = close(Inverse(), state, up, lambda _: model(0.0), GuardSection())
    assert closed.refused == {5: SPOILS}
    assert closed.participants == [3, 8]
    assert closed.server["inverse"]["w"].tolist() == [1.5]
    assert closed.uploads.counts.tolist() == [10, 30]
    assert closed.skipped == ""
    few = close(Inverse(), state, up, lambda _: model(0.0), GuardSection(least=3))
    assert (few.server, few.participants, few.refused) == (state, [], {5: SPOILS})
    assert few.skipped == "2 good updates, and guard.least = 3"
    nothing = close(Inverse(), state, uploads((1,), [[0.0]]), lambda _: model(0.0), GuardSection())
    assert (nothing.server, nothing.refused, nothing.skipped) == (
        state,
        {1: SPOILS},
        "0 good updates, and guard.least = 1",
    )


@pytest.mark.parametrize("settings_", [["algorithm.distribution=empirical"], ["algorithm.name=fednh"]])
def test_a_checkpoint_of_a_method_that_sends_label_counts_is_tried_with_possible_ones(settings_):
    """With zeros, which no honest client sends, a good state looked like a damaged one, and the run could not be resumed."""
    simulation = Simulation(small(*settings_, "run.engine=loop"))
    simulation.try_state(simulation.first_state(), simulation.members)
    simulation.close()


@pytest.mark.parametrize(
    ("tree", "fine"),
    [
        ({"a": [torch.ones(2), {"b": torch.tensor(3)}], "c": "text", "d": None, "e": 1.5}, True),
        ({"a": [torch.ones(2), {"b": torch.tensor(math.nan)}]}, False),
        ({"a": (torch.ones(2), math.inf)}, False),
        ({"a": torch.zeros(0), "b": torch.tensor([3e38, 3e38])}, True),
    ],
)
def test_a_state_is_searched_to_its_leaves(tree, fine):
    assert is_finite_state(tree) == fine


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.data())
def test_a_whole_stack_is_judged_like_its_uploads_one_by_one(count, data):
    kinds = [data.draw(st.sampled_from(["good", "nan", "inf", "both", "counts", "samples"])) for _ in range(count)]
    stack = {name: torch.stack([w] * count) for name, w in GOOD.items()}
    beside, samples = [], []
    for row, kind in enumerate(kinds):
        if kind in ("nan", "inf"):
            stack["w"][row, 1, data.draw(st.integers(0, 2))] = float(kind)
        if kind == "both":  # they would cancel out in a sum of signs, not in a sum of numbers
            stack["w"][row, 0, 0], stack["w"][row, 1, 2] = math.inf, -math.inf
        beside.append({"counts": torch.tensor([99.0, 0.0])} if kind == "counts" else BESIDE)
        samples.append(0 if kind == "samples" else 7)
    one_by_one = {
        row: problem
        for row in range(count)
        if (problem := GUARD.problem({n: w[row] for n, w in stack.items()}, beside[row], samples[row]))
    }
    assert GUARD.problems(stack, beside, samples) == one_by_one
    assert sorted(one_by_one) == [row for row, kind in enumerate(kinds) if kind != "good"]


# --- in a run


NAN = ["adversary.clients=1", "adversary.attack=not-a-number"]


def test_a_refused_client_costs_its_own_part_of_the_round_and_nothing_else(tmp_path, capsys):
    summary = session.run(small(*NAN), tmp_path / "run")
    rounds = [e for e in RunFolder(tmp_path / "run").events() if isinstance(e, Round)]
    assert summary["refused"] == {next(iter(rounds[0].refused)): 3}
    assert len(rounds) == 3
    for event in rounds:
        ((client, why),) = event.refused.items()
        assert why == "fc.weight of the model has values that are not finite numbers"
        assert sorted([*event.participants, int(client)]) == list(range(6))
        assert event.up == event.down  # six models down and six up: a bad one was sent too
        assert len(event.client_loss) == 5
    assert summary["reported"]["accuracy"] > 0.5
    print_summary(summary)
    assert "refused: 3 updates of 1 client" in capsys.readouterr().out


def test_a_run_without_refusals_says_nothing_about_them():
    assert not {"refused", "skipped"} & session.run(small("train.rounds=1")).keys()


@pytest.mark.parametrize("algorithm", ["cwfedavg", "local", "fedamp"])
def test_a_round_with_too_few_good_updates_is_skipped(algorithm):
    settings_ = [
        f"algorithm.name={algorithm}",
        "adversary.clients=2",
        "adversary.attack=not-a-number",
        "guard.least=5",
    ]
    simulation = Simulation(small(*settings_, "train.rounds=4"))
    before = simulation.start()
    if algorithm == "local":  # it sends nothing that could be refused
        assert finish(simulation, before)[1][0].refused == {}
        return
    progress, events = finish(simulation, before)
    assert leaves(to_tree(progress)) == leaves(to_tree(before)) | {"round/": 4}
    for event in events:
        assert (event.participants, event.loss, len(event.refused)) == ([], None, 2)
        assert event.skipped == "4 good updates, and guard.least = 5"


def test_more_good_updates_than_a_round_has_cannot_be_asked_for():
    with pytest.raises(ConfigError, match=r"guard.least = 4, but a round has only 3 participants"):
        Simulation(small("guard.least=4", "train.participation=0.5"))


def test_when_everybody_is_refused_the_run_ends_with_the_reason():
    with pytest.raises(
        RunError, match=r"every update of the last 3 rounds was refused: \d+ training samples.*1 to 2"
    ):
        finish(Simulation(small("guard.most_samples=2", "train.rounds=100")))


@pytest.mark.parametrize("checkpoint_seconds", [0, 1000])
def test_a_run_that_was_given_up_is_given_up_again_in_the_same_round(checkpoint_seconds, tmp_path):
    """Resumed, it remembers how many rounds were in vain."""
    config = small("guard.most_samples=2", "train.rounds=100", f"run.checkpoint_seconds={checkpoint_seconds}")
    for resume in (False, True, True):
        with pytest.raises(RunError, match="of the last 3 rounds was refused"):
            session.run(config, tmp_path / "run", resume=resume)
        events = RunFolder(tmp_path / "run").events()
        assert [event.round for event in events if isinstance(event, Round)] == [1, 2, 3]


# --- how long an update may be


def test_long_updates_are_scaled_back_to_the_median_by_hand():
    # sent 1, 1, 1; updates (3, 4), (0, 1), (2, 0) are 5, 1 and 2 long: median 2, bound 1.5 -> at most 3
    stack = {"a": torch.tensor([4.0, 1.0, 3.0]), "b": torch.tensor([[5.0], [2.0], [1.0]])}
    scaled, longer = bounded(stack, lambda row: {"a": torch.tensor(1.0), "b": torch.tensor([1.0])}, 1.5)
    assert longer == [0]
    torch.testing.assert_close(scaled["a"], torch.tensor([1 + 3 * 3 / 5, 1.0, 3.0]))
    torch.testing.assert_close(scaled["b"], torch.tensor([[1 + 4 * 3 / 5], [2.0], [1.0]]))
    assert stack["a"].tolist() == [4.0, 1.0, 3.0]
    same, nobody = bounded(stack, lambda row: {"a": torch.tensor(1.0), "b": torch.tensor([1.0])}, 2.5)
    assert (same is stack, nobody) == (True, [])


def test_counters_have_no_length_and_are_not_scaled():
    # updates 1, 1, 10: the third is scaled back to 2; its counter of batches is not a number to scale
    stack = {"w": torch.tensor([[1.0], [1.0], [10.0]]), "batches": torch.tensor([5, 5, 10**6])}
    scaled, longer = bounded(stack, lambda row: {"w": torch.tensor([0.0]), "batches": torch.tensor(0)}, 2.0)
    assert (longer, scaled["w"].tolist(), scaled["batches"].tolist()) == ([2], [[1.0], [1.0], [2.0]], [5, 5, 10**6])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.floats(0.5, 3), st.floats(1, 1e30), st.integers(0, 2**31))
def test_no_update_is_longer_than_the_bound_and_directions_stay(count, bound, strength, seed):
    generator = torch.Generator().manual_seed(seed)
    sent = torch.randn(count, 6, generator=generator)
    stack = {"w": sent + torch.randn(count, 6, generator=generator)}
    stack["w"][0] = sent[0] + (stack["w"][0] - sent[0]) * strength
    scaled, longer = bounded(stack, lambda row: {"w": sent[row]}, bound)
    before, after = (stack["w"] - sent).double(), (scaled["w"] - sent).double()
    limit = bound * before.norm(dim=1).quantile(0.5)
    assert (after.norm(dim=1) <= limit * (1 + 1e-4) + 1e-5).all()
    assert longer == torch.nonzero(before.norm(dim=1) > limit).flatten().tolist()
    for row in set(range(count)) - set(longer):
        assert torch.equal(scaled["w"][row], stack["w"][row])
    for row in longer:
        torch.testing.assert_close(torch.cosine_similarity(before[row], after[row], 0).item(), 1.0, rtol=0, atol=1e-4)


def test_a_bound_that_nobody_reaches_changes_no_bit():
    plain, _ = finish(Simulation(small()))
    wide, events = finish(Simulation(small("guard.norm_bound=1000")))
    assert leaves(plain.server) == leaves(wide.server)
    assert not any(event.scaled_back for event in events)


def test_whose_update_was_scaled_back_is_told():
    simulation = Simulation(small("algorithm.name=fedavg", "guard.norm_bound=3", "adversary.clients=1"))
    _, events = finish(simulation)
    assert [event.scaled_back for event in events] == [list(simulation.adversaries)] * 3


@pytest.mark.parametrize("algorithm", ["local", "fedfomo", "ifca"])
def test_a_bound_needs_one_model_that_was_sent(algorithm):
    with pytest.raises(ConfigError, match=f"{algorithm} does not send one model"):
        Simulation(small(f"algorithm.name={algorithm}", "guard.norm_bound=2")).start()
