"""The vmapped engine gives what the loop gives, but for rounding."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from cwfed import engine
from cwfed.algorithms import ALGORITHMS, FedAvg
from cwfed.core import losses
from cwfed.core.errors import ConfigError, RunError
from cwfed.core.types import Pass, Start
from cwfed.data import Dataset
from cwfed.engine import traced, vmap
from cwfed.federation.rounds import to_tree
from cwfed.federation.simulation import Simulation
from tests import processes
from tests.conftest import all_digits, finish, leaves, worker_of


def numbers(tree):
    """All tensors of a state."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [tensor for part in tree for tensor in numbers(part)]
    return [tree] if isinstance(tree, torch.Tensor) else []


def assert_like_the_loop(*settings, rounds=4, check=lambda simulation: None):
    """States agree to float precision after several rounds, and so do all accuracies.

    With the paper's learning rate: at a large one WDR, whose gradient has length 1 however close p~ is to p, jumps to
    and fro around its minimum, and every difference grows.
    """
    outcomes = []
    for name in ("loop", "vmap"):
        simulation = Simulation(
            all_digits("train.lr=0.005", *settings, f"run.engine={name}", f"train.rounds={rounds}")
        )
        if name == "vmap":
            check(simulation)
        outcomes.append(finish(simulation))
    (a, events), (b, other_events) = outcomes
    ours, theirs = numbers(to_tree(a)), numbers(to_tree(b))
    assert len(ours) == len(theirs)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-4, atol=2e-5)
    for x, y in zip(events, other_events, strict=True):
        assert (x.received.right, x.trained.right) == (y.received.right, y.trained.right)
        assert (x.received.validation, x.trained.validation) == (y.received.validation, y.trained.validation)
        assert (x.down, x.up, x.participants) == (y.down, y.up, y.participants)
        assert x.loss == pytest.approx(y.loss, rel=1e-5)
        assert x.penalty == pytest.approx(y.penalty, rel=1e-4, abs=1e-6)
        assert x.received.loss == pytest.approx(y.received.loss, rel=1e-4)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_like_the_loop(name):
    assert_like_the_loop(f"algorithm.name={name}", "data.samples=400", rounds=3)


@pytest.mark.parametrize(
    "settings",
    [
        ("train.participation=0.5", "train.client_dropout=0.2", "data.clients=12"),
        ("train.epochs=3",),
        ("train.batch_size=40", "data.clients=20"),  # most clients are smaller than a batch
        ("algorithm.layers=all", "data.partition=dirichlet", "data.alpha=0.3"),
        ("algorithm.objective={name='fedprox', mu=0.1}",),
        ("algorithm.objective={name='feduv'}",),
        ("data.newcomers=2", "run.evaluate_clients=3"),
    ],
)
def test_every_setting_like_the_loop(settings):
    assert_like_the_loop("data.samples=900", *settings, rounds=3)


def with_batch_norm(shape, classes):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, classes))
    model.output_layer = "4"
    return model


@pytest.mark.parametrize("policy", ["average", "local"])
def test_running_statistics_like_the_loop(policy):
    assert_like_the_loop(f"model.name={__name__}:with_batch_norm", "model.options={}", f"train.batch_norm={policy}")


def words():
    """Sentences of 40 words whose classes have words of their own."""
    rng = np.random.default_rng(0)
    labels = np.arange(400) % 4
    tokens = rng.integers(2, 22, (400, 12)) + 20 * labels[:, None]
    tokens[:, 8:][rng.random((400, 4)) < 0.5] = 0
    return Dataset("words", tokens.astype(np.int32), labels, tuple("abcd"), tuple(f"w{i}" for i in range(2000)))


TEXT = (f"data.name={__name__}:words", "model.name=fasttext", "model.options={}")


@pytest.mark.parametrize("algorithm", ["cwfedavg", "fednh", "ifca"])
def test_text_like_the_loop_by_the_rows_looked_up(algorithm, monkeypatch):
    moved = []

    def watch(simulation):
        move = vmap.Table.move
        monkeypatch.setattr(vmap.Table, "move", lambda table, *given: (moved.append(1), move(table, *given)))

    assert_like_the_loop(*TEXT, f"algorithm.name={algorithm}", "data.classes_per_client=2", check=watch)
    assert moved


@pytest.mark.parametrize("algorithm", ["fedprox", "fedamp"])
def test_a_penalty_on_the_whole_embedding_makes_it_dense(algorithm, monkeypatch):
    monkeypatch.setattr(vmap.Table, "move", None)
    assert_like_the_loop(*TEXT, f"algorithm.name={algorithm}", "data.classes_per_client=2")


class Scaled(nn.Embedding):
    """Not torch's embedding: it does something of its own."""

    def forward(self, tokens):
        return 5 * super().forward(tokens)


def text_model(embedding):
    class Text(nn.Module):
        output_layer = "output"

        def __init__(self, words, classes):
            super().__init__()
            self.embedding = embedding(words)
            self.output = nn.Linear(8, classes)

        def forward(self, tokens):
            return self.output(self.embedding(tokens).mean(1))

    return lambda shape, classes: Text(shape.vocabulary, classes)


def frozen_embedding(words):
    embedding = nn.Embedding(words, 8, sparse=True)
    embedding.weight.requires_grad_(False)
    return embedding


scaled = text_model(lambda words: Scaled(words, 8, sparse=True))
frozen = text_model(frozen_embedding)


@pytest.mark.parametrize("model", ["scaled", "frozen"])
def test_embeddings_of_another_kind_stay_what_they_are(model):
    settings = (TEXT[0], f"model.name={__name__}:{model}", "model.options={}", "data.classes_per_client=2")
    assert_like_the_loop(*settings, "train.lr=0.05", "algorithm.wdr=0", rounds=2)


@dataclasses.dataclass(frozen=True)
class Uneven(FedAvg):
    """Large clients are pulled, small ones are not; and their notes have the same shape but other names."""

    def begin(self, got, own, data):
        large = data.class_counts.sum() > 100
        notes = {"strong" if large else "weak": torch.ones(3)}
        return Start(got.model, got.model if large else {}, notes)

    def penalty(self, params, output, labels, start):
        if "weak" in start.notes:
            return 0.1 * start.notes["weak"].sum() * output.weight.square().sum()
        return losses.proximal(params, start.anchor) + start.notes["strong"].sum() * output.weight.square().sum()


def test_starts_of_different_kinds_are_kept_apart(monkeypatch):
    sizes = [len(s.train) > 100 for s in Simulation(all_digits()).federation.shards.values()]
    assert any(sizes)
    assert not all(sizes)
    monkeypatch.setattr(traced, "TRACE_AFTER", 2)
    monkeypatch.setattr(traced, "FIRST_TRACE_AFTER", 2)
    assert_like_the_loop(f"algorithm.name={__name__}:Uneven")


@dataclasses.dataclass(frozen=True)
class Late(FedAvg):
    """Its proximal term, on the embedding too, begins in round 2."""

    def begin(self, got, own, data):
        moved = got.model["output.bias"].abs().sum() != Late.first.setdefault(
            "sum", got.model["output.bias"].abs().sum()
        )
        return Start(got.model, got.model if moved else {})

    def penalty(self, params, output, labels, start):
        return 10 * losses.proximal(params, start.anchor) if start.anchor else output.logits.new_zeros(())


Late.first = {}


def test_a_penalty_on_the_embedding_that_begins_late():
    Late.first.clear()
    assert_like_the_loop(*TEXT, f"algorithm.name={__name__}:Late", "data.classes_per_client=2", "train.lr=0.02")


def test_clients_without_any_test_sample():
    settings = ["data.clients=300", "data.classes_per_client=1", "data.validation=0", "train.batch_size=2"]
    config = all_digits(
        *settings, "train.participation=4", "run.evaluate_clients=30", "run.engine=vmap", "train.rounds=12"
    )
    _, events = finish(Simulation(config))
    assert len(events) == 12


def test_personal_models_are_made_a_few_at_a_time(monkeypatch):
    """However many clients are measured."""
    monkeypatch.setattr("cwfed.engine.tasks.REMEMBERED", 0)
    monkeypatch.setattr(vmap, "TOGETHER", 5)
    simulation = Simulation(
        all_digits("data.clients=40", "algorithm.layers=all", "run.engine=vmap", "train.batch_size=5")
    )
    alive, most = [], 0
    send = type(simulation.algorithm).send

    def counted(self, state, client):
        nonlocal most
        made = send(self, state, client)
        alive.append(weakref.ref(made.model["fc.weight"]))
        most = max(most, sum(ref() is not None for ref in alive))
        return made

    monkeypatch.setattr(type(simulation.algorithm), "send", counted)
    simulation._measure_received(simulation.start())
    assert most <= 11


@pytest.mark.parametrize("name", ["loop", "vmap"])
def test_a_closed_engine_lets_go_of_its_network_at_once(name):
    simulation = Simulation(all_digits(f"run.engine={name}"))
    network = weakref.ref(worker_of(simulation).model)
    finish(simulation)
    assert network() is None


def test_untouched_words_keep_their_bits():
    simulation = Simulation(all_digits(*TEXT, "run.engine=vmap", "data.classes_per_client=2", "algorithm.name=local"))
    progress, _ = finish(simulation)
    before = simulation.fresh(0)["embedding.weight"]
    for kept in progress.kept.values():
        after = kept["embedding.weight"]
        assert torch.equal(after[100:], before[100:])
        assert not torch.equal(after[2:100], before[2:100])
        assert after[0].abs().max() == 0  # padding


def test_tracing_does_not_change_the_bits(monkeypatch):
    def outcome():
        simulation = Simulation(all_digits("run.engine=vmap", "train.rounds=4"))
        functions = [simulation.engine._step(Pass()), simulation.engine._judge]
        progress, events = finish(simulation)
        lines = [len(function._lines) for function in functions]
        return lines, leaves(to_tree(progress)), [(e.loss, e.received, e.trained) for e in events]

    for name in ("TRACE_AFTER", "FIRST_TRACE_AFTER"):
        monkeypatch.setattr(traced, name, 10**9)
    lines, *untraced = outcome()
    assert lines == [0, 0]
    for name in ("TRACE_AFTER", "FIRST_TRACE_AFTER"):
        monkeypatch.setattr(traced, name, 2)
    lines, *found = outcome()
    assert min(lines) > 0
    assert found == untraced


def test_tracing_keeps_running_statistics(monkeypatch):
    monkeypatch.setattr(traced, "TRACE_AFTER", 2)
    monkeypatch.setattr(traced, "FIRST_TRACE_AFTER", 2)
    assert_like_the_loop(f"model.name={__name__}:with_batch_norm", "model.options={}")


@pytest.mark.parametrize("name", ["per-fedavg", "apfl"])
def test_steps_inside_a_loss_and_tensors_that_move_once_can_be_traced(name, monkeypatch):
    monkeypatch.setattr(traced, "TRACE_AFTER", 2)
    monkeypatch.setattr(traced, "FIRST_TRACE_AFTER", 2)
    few = ("data.samples=200", "data.clients=3", f"model.name={__name__}:with_batch_norm", "model.options={}")
    assert_like_the_loop(f"algorithm.name={name}", *few, rounds=2)


def test_few_clients_at_a_time_give_the_same(monkeypatch):
    monkeypatch.setattr(vmap, "TOGETHER", 2)
    assert_like_the_loop()


@pytest.mark.slow
def test_compiled_like_the_loop():
    def compiles(simulation):
        assert simulation.engine.compile

    assert_like_the_loop("run.compile=always", check=compiles)


def test_a_long_run_is_compiled_and_a_short_one_is_not():
    short = Simulation(all_digits("run.engine=vmap"))
    long = Simulation(all_digits("run.engine=vmap", "train.rounds=1000000"))
    never = Simulation(all_digits("run.engine=vmap", "train.rounds=1000000", "run.compile=never"))
    others = Simulation(all_digits("run.engine=vmap", "train.rounds=1000000", "train.participation=0.5"))
    assert [s.engine.compile for s in (short, long, never, others)] == [False, True, False, False]


def test_running_statistics_cannot_be_compiled():
    settings = (f"model.name={__name__}:with_batch_norm", "model.options={}", "run.engine=vmap")
    with pytest.raises(ConfigError, match="running statistics"):
        Simulation(all_digits(*settings, "run.compile=always"))
    assert not Simulation(all_digits(*settings, "train.rounds=1000000")).engine.compile


def test_compiling_without_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler"):
        Simulation(all_digits("run.engine=vmap", "run.compile=always"))
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler"):
        Simulation(all_digits("run.compile=always"))
    assert not Simulation(all_digits("run.engine=vmap", "train.rounds=1000000")).engine.compile


def test_what_the_compiler_refuses_is_not_run_uncompiled(monkeypatch):
    """It would have other bits than where the compiler works, and the run's folder would not say so."""

    def refuse(*_):
        raise OSError("no space left for the compiler")

    monkeypatch.setattr("torch._inductor.compile", refuse)
    with pytest.raises(RunError, match="no space left for the compiler"):
        finish(Simulation(all_digits("run.engine=vmap", "run.compile=always")))
    monkeypatch.setattr(vmap, "COMPILE_FOR", 1)
    with pytest.raises(RunError, match=r'set run\.compile = "never": no space left'):
        finish(Simulation(all_digits("run.engine=vmap")))


# --- what cannot be vmapped


def with_dropout(shape, classes):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, classes))
    model.output_layer = "3"
    return model


class Undecided(nn.Module):
    """Its path depends on the data."""

    output_layer = "output"

    def __init__(self, shape, classes):
        super().__init__()
        self.output = nn.Linear(64, classes)

    def forward(self, x):
        x = x.flatten(1)
        return self.output(x if x.sum() > 0 else -x)


class Shifted(nn.Module):
    """It looks up something else than its inputs."""

    output_layer = "output"

    def __init__(self, shape, classes):
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary + 1, 8, sparse=True)
        self.output = nn.Linear(8, classes)

    def forward(self, tokens):
        return self.output(self.embedding(tokens + 1).mean(1))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ([f"model.name={__name__}:with_dropout"], "vmap"),
        ([f"model.name={__name__}:Undecided"], "data-dependent control flow"),
        ([*TEXT[:1], f"model.name={__name__}:Shifted"], "something other than its inputs"),
    ],
)
def test_models_that_cannot_be_vmapped(settings, reason):
    settings = [*settings, "model.options={}", "data.classes_per_client=2"]
    with pytest.raises(ConfigError, match=r'use "threads": .*') as error:
        Simulation(all_digits(*settings, "run.engine=vmap"))
    assert reason in str(error.value)
    chosen = Simulation(all_digits(*settings, "run.workers=2"))
    assert chosen.engine.name == "loop"
    assert reason in chosen.engine.why
    finish(chosen)


class Moody(FedAvg):
    def penalty(self, params, output, labels, start):
        return output.logits.new_zeros(()) if output.logits.sum() > 0 else output.logits.mean()


def test_penalties_that_cannot_be_vmapped():
    name = f"algorithm.name={__name__}:Moody"
    with pytest.raises(RunError, match=r'cannot be vmapped, use run.engine = "threads"'):
        finish(Simulation(all_digits(name, "run.engine=vmap")))
    by_loop, _ = finish(Simulation(all_digits(name, "run.engine=loop")))
    simulation = Simulation(all_digits(name))
    assert simulation.engine.name == "vmap"
    by_auto, _ = finish(simulation)
    assert leaves(to_tree(by_auto)) == leaves(to_tree(by_loop))
    assert "cannot be vmapped" in simulation.engine.why


def test_global_randomness_is_refused():
    with pytest.raises((ConfigError, RunError), match=r"random"):
        finish(Simulation(all_digits(f"model.name={__name__}:drawing", "model.options={}", "run.engine=vmap")))


def drawing(shape, classes):
    class Drawing(nn.Sequential):
        output_layer = "1"

        def forward(self, x):
            return super().forward(nn.functional.dropout(x, 0.5, self.training))

    return Drawing(nn.Flatten(), nn.Linear(64, classes))


# --- what "auto" picks


@pytest.mark.parametrize(
    ("settings", "name", "why"),
    [
        (["model.name=mlp", "data.clients=20"], "vmap", "mostly overhead"),
        (["model.name=cnn", "model.options={}", "data.clients=20", "run.workers=2"], "threads", "there are 2"),
        (
            ["model.name=mlp", "data.clients=3", "data.partition=iid", "run.workers=2"],
            "loop",
            "too short for threads",
        ),
        (["model.name=mlp", "data.clients=20", "train.participation=2"], "loop", "too short for threads"),
        (["model.name=cnn", "model.options={}", "data.clients=20", "run.workers=1"], "loop", "one worker"),
        ([*TEXT, "data.classes_per_client=2"], "vmap", "mostly overhead"),
    ],
)
def test_auto_picks_by_model_and_clients(settings, name, why):
    simulation = Simulation(all_digits(*settings))
    assert simulation.engine.name == name
    assert why in simulation.engine.why
    assert simulation.started().engine.startswith(f"{name}: ")


def test_auto_does_not_depend_on_the_number_of_workers():
    names = {Simulation(all_digits("data.clients=20", f"run.workers={w}")).engine.name for w in (1, 2, 8)}
    assert names == {"vmap"}


def test_a_gpu_is_kept_busy_by_vmap():
    simulation = Simulation(all_digits("run.engine=loop", "data.clients=20"))
    samples = worker_of(simulation).samples
    samples.device = torch.device("meta")  # any that is not the CPU
    job = replace(simulation.engine.job, samples=samples)
    for participants, found in ((20, "vmap"), (2, "loop")):
        assert engine._pick(job, engine.Choice("auto", participants=participants), 2)[0] == found


def test_the_work_of_a_forward_pass_by_hand():
    """Two operations a weight and sample, and for a convolution a pixel."""
    simulation = Simulation(all_digits("run.engine=loop", "model.name=cnn", "model.options={}"))
    samples = worker_of(simulation).samples
    pixels, fc, output = 64 * 32 * 25 + 16 * 64 * 800, 256 * 512, 512 * 10
    assert engine._forward_work(simulation.template, samples, 10) == 2 * 10 * (pixels + fc + output)


def test_the_start_of_a_run_does_not_load_torchs_compiler():
    """It takes longer than all the rest."""
    code = (
        "import sys; from cwfed.federation import config; from cwfed.federation.simulation import Simulation;"
        "s = Simulation(config.load(None, ['train.rounds=1'])); list(s.rounds(s.start())); s.close();"
        "assert 'torch._dynamo' not in sys.modules and 'sympy' not in sys.modules"
    )
    processes.run([sys.executable, "-c", code], check=True)
