"""One suite that every algorithm passes, whatever it does inside."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cwfed.algorithms import ALGORITHMS, build, describe, name_of
from cwfed.core.types import Form, Uploads, nbytes
from cwfed.data import Dataset, Federation, Shard
from cwfed.federation import open_round
from cwfed.federation.cost import sizes
from cwfed.federation.experiment import Blueprint
from cwfed.federation.guard import form_of, is_finite_state
from cwfed.federation.rounds import close, from_tree, to_tree
from cwfed.federation.simulation import Simulation
from cwfed.models import InputShape, attached
from cwfed.runs import checkpoint, session
from tests.conftest import finish, leaves, small, two_blobs, without_seconds

pytestmark = pytest.mark.parametrize("name", list(ALGORITHMS))


SMALL_THINGS = 8 * 12
"""Bytes that a participant may send and `cwfed cost` does not count: an index, a handful of weights."""


def cost_of(simulation: Simulation, participants: int):
    """What the algorithm says that it costs here."""
    config, shape = simulation.config, simulation.federation.shape
    arguments = (config.model.name, shape, simulation.task.classes, simulation.clients, participants)
    return simulation.algorithm.costs(sizes(simulation.algorithm, *arguments, config.model.options))[0]


def blobs() -> Dataset:
    inputs, labels = two_blobs()
    return Dataset("blobs", inputs, labels.astype(np.int64), ("a", "b", "c", "d"))


def outcome(simulation: Simulation):
    progress, events = finish(simulation)
    return leaves(to_tree(progress)), [without_seconds(e) for e in events]


CHEAPER = {"fedala": ["algorithm.most_epochs=10"], "fedbabu": ["algorithm.tune_epochs=1"]}
"""Settings with which a method does the same in less time."""


def settings_of(name: str, *more: str):
    return small(f"algorithm.name={name}", *CHEAPER.get(name, []), *more)


def test_same_seed_same_bits(name):
    assert outcome(Simulation(settings_of(name))) == outcome(Simulation(settings_of(name)))


def test_another_seed_another_run(name):
    assert outcome(Simulation(settings_of(name))) != outcome(Simulation(settings_of(name, "run.seed=1")))


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_engine_and_workers_do_not_matter(name, model):
    options = [f"model.name={model}", "model.options.hidden=16", "train.rounds=2"]
    loop = outcome(Simulation(settings_of(name, "run.engine=loop", *options)))
    for workers in (1, 3):
        assert (
            outcome(Simulation(settings_of(name, "run.engine=threads", f"run.workers={workers}", *options))) == loop
        )


def test_interrupted_equals_uninterrupted(name, tmp_path):
    config = settings_of(name, "train.rounds=4", "train.participation=0.5", "train.dropout=0.2")
    whole = outcome(Simulation(config))

    simulation = Simulation(config)
    for progress, _ in simulation.rounds(simulation.start()):
        if progress.round == 2:
            break
    simulation.close()
    checkpoint.save(tmp_path / "state.safetensors", to_tree(progress))
    resumed, _ = finish(Simulation(config), from_tree(checkpoint.load(tmp_path / "state.safetensors")))
    assert leaves(to_tree(resumed)) == whole[0]


def test_partial_participation_and_lost_clients(name):
    config = settings_of(name, "train.rounds=6", "train.participation=0.5", "train.dropout=0.3")
    _, events = finish(Simulation(config))
    assert all(len(e.participants) + len(e.dropped) == 3 for e in events)
    assert any(e.dropped for e in events)
    assert all(0 <= e.received.accuracy <= 1 for e in events)


def test_a_round_that_loses_everybody_changes_nothing(name):
    simulation = Simulation(settings_of(name, "train.rounds=1", "train.dropout=0.999999"))
    before = simulation.start()
    progress, (event,) = finish(simulation, before)
    assert (event.participants, event.loss, event.up) == ([], None, 0)
    assert leaves(progress.server) == leaves(before.server)


def test_single_class_clients_and_a_class_nobody_has(name, monkeypatch):
    data = blobs()
    by_class = [np.flatnonzero(data.labels == k) for k in range(3)]  # class 3 is held by nobody
    federation = Federation(data, [Shard(i[:40], i[40:45], i[45:60]) for i in by_class])
    monkeypatch.setattr("cwfed.data.share_out", lambda *_: federation)
    progress, events = finish(Simulation(settings_of(name, "data.clients=3")))
    assert all(tensor.isfinite().all() for tensor in tensors(progress.server))
    assert np.isfinite(events[-1].received.loss)


def tensors(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    return [t for value in values for t in tensors(value)]


def test_a_client_that_never_took_part_has_a_model(name):
    simulation = Simulation(settings_of(name, "data.newcomers=2"))
    progress = simulation.start()
    for progress, event in simulation.rounds(progress):
        assert not set(event.participants) & set(simulation.newcomers)
    model = simulation.final_model(progress, simulation.newcomers[0])
    joined = simulation.welcome(progress)
    simulation.close()
    network = {n: w.shape for n, w in simulation.fresh(0).items() if not attached(simulation.template, n)}
    assert {n: w.shape for n, w in model.items()} == network
    assert 0 <= joined.histogram <= 1


def test_traffic_is_what_cwfed_cost_says(name):
    """2 Sigma, (1 + M) Sigma for FedFomo, (1 + k) Sigma for IFCA: measured from what the messages hold."""
    simulation = Simulation(settings_of(name, "train.rounds=3"))
    cost = cost_of(simulation, participants=6)
    _, events = finish(simulation)
    for event in events[1:]:  # in round 1 there may be nothing to send yet
        assert event.down == 4 * cost.down
        assert 0 <= event.up - 4 * cost.up <= 6 * SMALL_THINGS
    half = Simulation(settings_of(name, "train.rounds=3", "train.participation=0.5"))
    _, events = finish(half)
    for i, event in enumerate(events):
        heard = len({c for earlier in events[:i] for c in earlier.participants})
        most = 4 * cost_of(half, participants=3).down
        assert event.down == (most * heard // 6 if name == "fedfomo" else most)  # others' models, once they are there
        assert event.up == events[0].up


def test_when_nobody_moves_nothing_moves(name):
    """Mixing rows sum to 1: uploads equal to what was sent leave what is sent as it was."""
    simulation = Simulation(settings_of(name, "train.rounds=2", "train.lr=1e-40"))
    before = simulation.start()
    after, _ = finish(simulation, before)
    prototypes = simulation.task.output_weight if name == "fednh" else None
    for client in range(3):
        now = simulation.algorithm.send(after.server, client).models
        for sent, was in zip(now, [*simulation.algorithm.send(before.server, client).models, *now], strict=False):
            for n, w in sent.items():
                if n != prototypes:
                    torch.testing.assert_close(w, was[n])


@pytest.mark.parametrize("policy", ["local", "average"])
def test_works_with_batch_norm(name, policy):
    options = [
        "model.name=tests.engine.test_engines:with_batch_norm",
        "model.options={}",
        f"train.batch_norm={policy}",
    ]
    _, events = finish(Simulation(settings_of(name, *options, "train.participation=0.7")))
    assert np.isfinite(events[-1].received.loss)
    assert np.isfinite(events[-1].trained.loss)


def test_server_memory_is_what_cwfed_cost_says(name):
    simulation = Simulation(settings_of(name, "data.clients=12"))
    progress, _ = finish(simulation)
    kept = sum(t.numel() for t in tensors(progress.server))
    said = cost_of(simulation, participants=12).server
    said += nbytes(simulation.fresh(0)) // 4 if name == "local" else 0  # the model that its clients start from
    slack = 12 * 12 + 12 + 10 * 10 + 12  # small matrices: attention, affinity, recipe, clusters
    assert abs(kept - said) <= slack


def test_aggregating_does_not_change_the_state_it_is_given(name):
    simulation = Simulation(settings_of(name, "train.rounds=2"))
    progress = simulation.start()
    kept = []
    for progress, _ in simulation.rounds(progress):
        kept.append((progress, leaves(to_tree(progress))))
    simulation.close()
    assert all(leaves(to_tree(progress)) == then for progress, then in kept)


def test_learns_a_separable_problem(name, monkeypatch):
    monkeypatch.setattr("cwfed.data.load", lambda *_: blobs())
    config = settings_of(name, "data.clients=4", "data.partition=dirichlet", "data.alpha=0.5", "train.rounds=25")
    summary = session.run(config)
    assert summary["reported"]["accuracy"] > 0.97


def test_its_config_table_builds_it_again(name):
    algorithm = build(name)
    assert name_of(algorithm) == name
    assert build(describe(algorithm, name)) == algorithm


# --- the guard


class Watched:
    """What a simulation's server was given, round by round."""

    def __init__(self, simulation: Simulation, monkeypatch) -> None:
        self.uploads = []
        cls = type(simulation.algorithm)
        aggregate = cls.aggregate

        def watch(algorithm, state, up):
            self.uploads.append(up)
            return aggregate(algorithm, state, up)

        monkeypatch.setattr(cls, "aggregate", watch)


def uploads_of(simulation: Simulation, monkeypatch):
    watched = Watched(simulation, monkeypatch)
    finish(simulation)
    monkeypatch.undo()
    return watched.uploads


SENDING_MORE = {"fedfomo": ["algorithm.downloads=2"], "cwfedavg": ["algorithm.distribution=empirical"]}


@pytest.mark.parametrize("more", [False, True])
def test_the_guard_knows_what_an_honest_upload_looks_like(name, more, monkeypatch):
    """`beside` is exactly what `finish` sends: nothing of an honest run is refused, and nothing is missing."""
    simulation = Simulation(settings_of(name, *SENDING_MORE.get(name, []) if more else []))
    guard = simulation.guard
    rounds = uploads_of(simulation, monkeypatch)
    assert len(rounds) == 3
    for up in rounds:
        assert up.clients == tuple(range(6))
        for row, count in enumerate(up.counts.tolist()):
            model, beside = ({n: w[row] for n, w in kind.items()} for kind in (up.models, up.extras))
            assert form_of(beside) == {n: Form(form.dtype, form.shape) for n, form in guard.beside.items()}
            assert guard.problem(model, beside, count) == ""


def test_the_guard_refuses_everything_else(name, monkeypatch):
    simulation = Simulation(settings_of(name, *SENDING_MORE.get(name, []), "train.rounds=1"))
    guard = simulation.guard
    (up,) = uploads_of(simulation, monkeypatch)
    count = int(up.counts[0])
    model, beside = ({n: w[0] for n, w in kind.items()} for kind in (up.models, up.extras))
    for samples in (0, -1, 2.5, 10**12, float("nan"), float("inf")):
        assert "training samples" in guard.problem(model, beside, samples)
    for kind, others in ((model, lambda bad: (bad, beside)), (beside, lambda bad: (model, bad))):
        for n, w in kind.items():
            bad = [
                {k: v for k, v in kind.items() if k != n},
                kind | {"stowaway": w},
                kind | {n: torch.stack([w, w])},
                kind | {n: w.to(torch.float16)},
            ]
            if w.is_floating_point():
                bad += [kind | {n: torch.full_like(w, value)} for value in (torch.nan, torch.inf, -torch.inf, 3e38)]
            if n == "class_counts":
                bad += [kind | {n: w * factor} for factor in (0, 0.5, 2)]
            assert all(guard.problem(*others(one), count) for one in bad), n
    assert guard.problem(model, beside, count) == ""


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
            model, beside = ({n: upload(f, *chosen) for n, f in kind.items()} for kind in (guard.model, guard.beside))
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


def few_words() -> Dataset:
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=240)
    tokens = 1 + 5 * labels[:, None] + rng.integers(5, size=(240, 8))  # every class has words of its own
    words = tuple(f"w{i}" for i in range(16))
    return Dataset("words", tokens.astype(np.int32), labels.astype(np.int64), ("a", "b", "c"), words)


@pytest.mark.parametrize("partition", ["pathological", "dirichlet", "iid"])
def test_runs_with_fasttext_on_every_partition(name, partition, monkeypatch):
    monkeypatch.setattr("cwfed.data.load", lambda *_: few_words())
    more = ["model.name=fasttext", f"data.partition={partition}", "data.alpha=0.5", "train.participation=0.7"]
    _, events = finish(Simulation(settings_of(name, *more)))
    assert np.isfinite(events[-1].received.loss)


@pytest.mark.slow
def test_runs_with_resnet18(name):
    more = ["model.name=resnet18", "model.options={}", "data.clients=2", "data.samples=120", "train.rounds=2"]
    _, events = finish(Simulation(settings_of(name, *more, "data.partition=iid")))
    assert np.isfinite(events[-1].received.loss)
