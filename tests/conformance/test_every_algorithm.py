"""One suite that every algorithm passes, whatever it does inside: `cwfed.testing`, and what only we test."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cwfed.algorithms import ALGORITHMS, build, name_of
from cwfed.core.types import Uploads, nbytes
from cwfed.federation import open_round
from cwfed.federation.experiment import Blueprint
from cwfed.federation.guard import is_finite_state
from cwfed.federation.rounds import close, to_tree
from cwfed.federation.simulation import Simulation
from cwfed.models import InputShape
from cwfed.testing import conformance
from cwfed.testing.conformance import finish, leaves, without_seconds
from tests.conftest import small

every_algorithm = pytest.mark.parametrize("name", list(ALGORITHMS))

CHEAPER = {
    "fedala": ["algorithm.most_epochs=10"],
    "fedbabu": ["algorithm.tune_epochs=1"],
    "pfedme": ["algorithm.steps=2"],
}
"""Settings with which a method does the same in less time."""
SENDING_MORE = {"fedfomo": ["algorithm.downloads=2"], "cwfedavg": ["algorithm.distribution=empirical"]}
STILL = {"fedas": ["algorithm.rate=0"]}  # it has a pass with a learning rate of its own
"""Settings with which a method does not move where the learning rate is next to nothing."""


def settings_of(name: str, *more: str):
    return small("data.samples=300", f"algorithm.name={name}", *CHEAPER.get(name, []), *more)


class TestEveryAlgorithm(conformance.Suite):
    @pytest.fixture(autouse=True, params=list(ALGORITHMS))
    def _each(self, request):
        name = self.algorithm = request.param
        self.settings, self.still = CHEAPER.get(name, []), STILL.get(name, [])
        self.sends_others_models = name == "fedfomo"

    def moves_anyway(self, simulation):
        return {simulation.task.output_weight} if self.algorithm == "fednh" else set()  # its prototypes

    def kept_besides(self, simulation):
        return nbytes(simulation.fresh(0)) // 4 if self.algorithm == "local" else 0  # what its clients start from

    def test_it_is_found_by_its_name(self):
        assert name_of(build(self.algorithm)) == self.algorithm

    def test_the_guard_knows_what_an_honest_upload_looks_like(self):
        super().test_the_guard_knows_what_an_honest_upload_looks_like()
        if more := SENDING_MORE.get(self.algorithm):
            self.settings = [*self.settings, *more]
            super().test_the_guard_knows_what_an_honest_upload_looks_like()

    def test_the_guard_refuses_everything_else(self):
        self.settings = [*self.settings, *SENDING_MORE.get(self.algorithm, [])]
        super().test_the_guard_refuses_everything_else()


# --- the guard

CLIENTS = 4
INSIDE = 1 - 1e-6
"""A bound that float32 rounds up is beyond itself."""
MOST = torch.finfo(torch.float32).max
EXTREMES = [0.0, 1e-45, 1.0, 1e9, 1e18, MOST]
VALUES = st.one_of(st.sampled_from([*EXTREMES, *(-value for value in EXTREMES), math.inf]), st.floats(width=32))
UPLOADS = st.tuples(
    st.booleans(),
    st.sampled_from([1, 7, 10**9]),
    VALUES,
    VALUES,
    st.sampled_from([0.0, 1e-45, 1e18, MOST]),
    st.integers(0, 2),
)
"""Whether class counts are honest; samples; the value of all numbers, and another one at a place of each row; class counts; the place."""
VARIANTS = {
    "cfl": [["algorithm.warm_up=0", "algorithm.eps1=1e30", "algorithm.eps2=0"]],  # every cluster splits at once
    "cwfedavg": [
        ["algorithm.distribution=empirical"],
        ["algorithm.robust=median"],
        ["algorithm.robust=trimmed", "algorithm.class_cap=0.25"],
    ],
    "fedfomo": [["algorithm.downloads=2"]],
}


def upload(form, honest, samples, value, other, count, place):
    """One tensor of such an upload; an honest one is as extreme as the guard lets it be."""
    if not form.dtype.is_floating_point:
        return torch.full(form.shape, min(place, int(form.high)) if honest else place, dtype=form.dtype)
    if form.counts_samples:
        return torch.full(form.shape, count) if not honest else torch.eye(*form.shape)[place] * samples
    tensor = torch.full(form.shape, value, dtype=form.dtype)
    if tensor.dim():
        tensor[..., place % tensor.shape[-1]] = other
    return tensor.clamp(form.low * INSIDE, form.high * INSIDE)


@every_algorithm
@settings(max_examples=25, deadline=None)
@given(rounds=st.tuples(*[st.tuples(*[UPLOADS] * CLIENTS)] * 2), variant=st.integers(0, 3))
@example(rounds=[[(False, 1, 2.0, 2.0, MOST, 0)] * CLIENTS] * 2, variant=0)
@example(rounds=[[(False, 1, 2.0, 2.0, 0.0, 0)] * CLIENTS] * 2, variant=1)
@example(rounds=[[(True, 10**9, MOST, -MOST, 0.0, 0)] * CLIENTS] * 2, variant=0)
def test_no_uploads_that_pass_the_guard_give_a_state_or_a_model_that_is_not_finite(name, rounds, variant):
    """Two rounds of what hypothesis chooses. What passes the guard gives finite numbers, and nobody is refused later."""
    variants = [[], *VARIANTS.get(name, [])]
    blueprint = blueprint_of(name, tuple(variants[variant % len(variants)]))
    algorithm, guard = blueprint.algorithm, blueprint.guard
    state = blueprint.first_state()
    for uploads in rounds:
        sent = []
        for client, chosen in enumerate(uploads):
            model, beside = (
                {n: upload(f, *chosen) for n, f in kind.items()} for kind in (guard.model, guard.extras_spec)
            )
            is_honest, samples, *values = chosen
            problem = guard.problem(model, beside, samples)
            assert not (problem and is_honest and not any(map(math.isnan, values))), "it is within all bounds"
            if not problem:
                sent.append((client, model, beside, samples))
        if not sent:
            continue
        clients, models, besides, samples = zip(*sent, strict=True)
        stack, extras = ({n: torch.stack([one[n] for one in kind]) for n in kind[0]} for kind in (models, besides))
        assert guard.problems(stack, besides, samples) == {}
        up = Uploads(clients, stack, torch.tensor(samples), extras)
        closed = close(algorithm, state, up, lambda c: {}, blueprint.config.guard)
        assert (closed.participants, closed.refused) == (list(clients), {})
        state = closed.server
        handed_out = [algorithm.send(state, client) for client in range(blueprint.clients)]
        assert is_finite_state([state, [[*sent.models, sent.notes] for sent in handed_out]])
        assert is_finite_state(algorithm.newcomer(state, [1.0] * blueprint.classes))


@cache
def blueprint_of(name, more):
    config = settings_of(name, "model.options.hidden=3", f"data.clients={CLIENTS}", *more)
    return Blueprint(config, InputShape((4,)), 3, CLIENTS)


@every_algorithm
def test_a_refused_client_is_like_one_that_was_lost(name, monkeypatch):
    """The same state, the same models kept, the same numbers; only the traffic differs: what is bad was sent too."""
    batch_norm = [
        "model.name=tests.engine.test_engines:with_batch_norm",
        "model.options={}",
        "train.batch_norm=local",
    ]
    config = settings_of(name, *batch_norm, "train.rounds=3")
    bad = {(2, 1), (2, 4), (3, 0)}  # rounds and clients
    monkeypatch.setattr(open_round, "is_lost", lambda config, number, client: (number, client) in bad)
    lost, lost_events = finish(Simulation(config))
    monkeypatch.undo()

    def refuse(opened, updates, models):
        found = {u.client: "bad" for u in updates if (opened.number, u.client) in bad}
        for row, u in enumerate(updates):
            if u.client in found:
                for w in models.values():
                    w[row] = torch.nan
        return found

    monkeypatch.setattr(open_round.OpenRound, "problems", refuse)
    refused, events = finish(Simulation(config))
    assert leaves(to_tree(refused)) == leaves(to_tree(lost))
    for event, other in zip(events, lost_events, strict=True):
        assert {(event.round, int(c)) for c in event.refused} == {(event.round, c) for c in other.dropped}
        seen, there = without_seconds(event), without_seconds(other)
        for differs in ("refused", "dropped", "up", "down"):
            seen.pop(differs)
            there.pop(differs)
        assert seen == there
        assert event.up * len(event.participants) == other.up * 6


@every_algorithm
@pytest.mark.slow
def test_runs_with_resnet18(name):
    more = ["model.name=resnet18", "model.options={}", "data.clients=2", "data.samples=120", "train.rounds=2"]
    _, events = finish(Simulation(settings_of(name, *more, "data.partition=iid")))
    assert np.isfinite(events[-1].received.loss)
