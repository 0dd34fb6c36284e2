"""What the guard refuses, in words; what happens to a round whose updates are refused; how long updates may be."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cwfed import session
from cwfed.algorithms.fedavg import FedAvg, Local
from cwfed.console import print_summary
from cwfed.errors import ConfigError, RunError
from cwfed.events import Round
from cwfed.folder import RunFolder
from cwfed.guard import Guard, bounded, form_of, misfit
from cwfed.rounds import to_tree
from cwfed.simulation import Simulation
from cwfed.types import Form
from tests.algorithms.helpers import task
from tests.conftest import finish, leaves, small

GOOD = {"w": torch.ones(2, 3), "b": torch.zeros(())}
GUARD = Guard(form_of(GOOD), {"counts": Form(torch.float32, (2,), 0, 10)}, most_samples=1000)
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
        (Form(torch.float32, (), 0), -1.0, False),  # bounded on one side only
        (Form(torch.float32, (), 0), 1e9, True),
        (Form(torch.float32, (), high=3), 4.0, False),
        (Form(torch.float32, (), high=3), 3.0, True),
        (Form(torch.float32, (), 2, 2), 2.0, True),
    ],
)
def test_bounds_of_what_comes_beside(form, value, fine):
    assert (misfit({"x": torch.tensor(value)}, {"x": form}, "it") == "") == fine


def test_an_empty_tensor_has_nothing_out_of_bounds():
    assert misfit({"x": torch.zeros(0)}, {"x": Form(torch.float32, (0,), 0, 1)}, "it") == ""


def test_a_round_of_nobody_has_no_problem():
    assert GUARD.problems({"w": torch.zeros(0, 2, 3), "b": torch.zeros(0)}, [], []) == {}


def test_methods_that_upload_no_model_are_judged_by_what_comes_beside():
    assert Guard({}, GUARD.beside).problems({}, [BESIDE, {}], [1, 1]) == {
        1: "what comes beside the model lacks counts"
    }


def test_a_guard_knows_what_its_algorithm_uploads():
    assert Guard.of(FedAvg(), GOOD, task(3)) == Guard(form_of(GOOD), {}, 10**9)
    assert Guard.of(Local(), GOOD, task(3), 5) == Guard({}, {}, 5)


def test_large_finite_numbers_are_not_mistaken_for_infinity():
    """Their sum overflows; a closer look shows that every one of them is a number."""
    large = GOOD | {"w": torch.full((2, 3), 3e38)}
    assert large["w"].sum().isinf()
    assert GUARD.problem(large, BESIDE, 5) == ""
    stack = {name: torch.stack([w, GOOD[name]]) for name, w in large.items()}
    assert GUARD.problems(stack, [BESIDE, BESIDE], [5, 5]) == {}


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
