"""bf16: what is cast and what is not, and what CPUs that cannot do it get."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cwfed.core.errors import ConfigError
from cwfed.core.types import Pass, Start
from cwfed.engine import precision
from cwfed.engine.worker import LocalTraining
from cwfed.federation.rounds import to_tree
from cwfed.federation.simulation import Simulation
from tests.conftest import finish, leaves, small, worker_of


@pytest.fixture
def bf16():
    """Where the CPU cannot, the reason."""
    try:
        precision.require_bf16(torch.device("cpu"))
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture
def no_check(monkeypatch):
    """Small products work on every CPU, if slowly."""
    monkeypatch.setattr("cwfed.federation.simulation.require_bf16", lambda device: "")


CNN = ("model.name=cnn", "model.options={}", "train.precision=bf16", "run.engine=loop")


def test_the_output_layer_and_what_travels_stay_float32(bf16):
    simulation = Simulation(small(*CNN))
    worker = worker_of(simulation)
    dtypes = {name: p.dtype for name, p in worker.model.named_parameters()}
    assert {dtypes[f"{layer}.weight"] for layer in ("conv1", "conv2", "fc")} == {torch.bfloat16}
    assert dtypes["output.weight"] == dtypes["output.bias"] == torch.float32
    assert {p.dtype for p in worker.params.values()} == {torch.float32}
    progress, _ = finish(simulation)
    assert {w.dtype for w in progress.server["shared"].values()} == {torch.float32}


def test_one_step_moves_the_masters_by_the_bf16_gradient(bf16):
    """master - lr * gradient of the bf16 network, to the bit; the network follows its masters."""
    simulation = Simulation(small(*CNN, "algorithm.name=fedavg", "train.batch_size=10"))
    worker, start = worker_of(simulation), simulation.fresh(0)
    how = LocalTraining(0, 0.1, len(simulation.federation.shards[0].train), 1, "bf16")
    worker.load(start)
    worker.train(simulation.algorithm, "training", (Pass(),), Start(start), 0, 1, how)
    after = worker.complete()

    worker.load(start)
    worker.model.train()
    inputs, labels = worker.samples.batch(simulation.federation.shards[0].train)
    inputs, labels = inputs[_order(simulation, how)], labels[_order(simulation, how)]
    weights = list(worker.model.parameters())
    gradients = torch.autograd.grad(F.cross_entropy(worker.forward(inputs).logits, labels), weights)
    for (name, before), gradient in zip(worker.complete().items(), gradients, strict=True):
        assert torch.equal(after[name], before.sub(gradient, alpha=0.1)), name


def _order(simulation, how):
    from cwfed.core.rng import stream
    from cwfed.engine.worker import batches

    samples = len(simulation.federation.shards[0].train)
    return batches(samples, how, Pass(), stream(how.seed, "shuffle", 1, 0))[0]


def test_the_penalty_sees_the_float32_masters(bf16):
    """A strong proximal term holds the weights where rounding to bf16 would already move them."""
    simulation = Simulation(
        small(*CNN, "algorithm.name=fedprox", "algorithm.mu=1.0", "train.lr=0.001", "train.rounds=1")
    )
    progress, events = finish(simulation)
    assert events[0].penalty < 1e-3
    moved = progress.server["model"]["fc.weight"] - simulation.fresh(0)["fc.weight"]
    assert 0 < moved.abs().max() < 1e-2


def test_bf16_learns_what_fp32_learns_and_repeats_itself(bf16):
    def accuracy(*settings):
        progress, events = finish(Simulation(small(*CNN[:2], *settings, "train.rounds=6")))
        return leaves(to_tree(progress)), (events[-1].loss, events[-1].received.loss, events[-1].trained.loss)

    exact, plain = accuracy("run.engine=loop")
    first, rounded = accuracy("train.precision=bf16", "run.engine=loop")
    again, _ = accuracy("train.precision=bf16", "run.engine=threads", "run.workers=2")
    assert first == again
    assert first != exact
    assert rounded == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize("algorithm", ["fedcp", "gpfl", "fedpac", "fedrep", "fedrod", "feddbe", "fedbabu"])
def test_methods_that_change_the_output_layer_or_train_parts_work_in_bf16(no_check, algorithm):
    """What is in the output layer stays float32 with it; a pass on the body alone finds the body's bf16 copies."""
    settings = ("train.precision=bf16", "run.engine=loop", "train.rounds=2", "data.clients=2", "data.samples=200")
    simulation = Simulation(small(f"algorithm.name={algorithm}", *settings))
    network = worker_of(simulation).model
    assert {p.dtype for p in network.output.parameters()} == {torch.float32}
    assert {p.dtype for p in network.fc.parameters()} == {torch.bfloat16}
    progress, _ = finish(simulation)
    assert not torch.equal(progress.server["model"]["fc.weight"], simulation.initial["fc.weight"])


def test_batch_norm_and_embeddings_work_in_bf16(bf16):
    norm = "model.name=tests.engine.test_vmap:with_batch_norm"
    text = [
        "data.name=tests.engine.test_vmap:words",
        "model.name=fasttext",
        "data.classes_per_client=2",
        "data.samples=0",
    ]
    for settings in ([norm], text):
        progress, events = finish(Simulation(small("model.options={}", "train.precision=bf16", *settings)))
        assert events[-1].received.accuracy > 0.1
        assert all(w.dtype == torch.float32 for w in progress.server["shared"].values() if w.is_floating_point())


def with_attention(shape, classes):
    class Attentive(nn.Module):
        output_layer = "output"

        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.output = nn.Linear(8, classes)

        def forward(self, x):
            x = x.flatten(1).view(len(x), 8, 8)
            return self.output(self.attention(x, x, x)[0].mean(1))

    return Attentive()


def with_tied_weights(shape, classes):
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    second.weight = first.weight
    model = nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.Linear(64, classes))
    model.output_layer = "4"
    return model


def test_a_model_that_bf16_does_not_fit_is_refused(no_check):
    settings = ("model.options={}", "train.precision=bf16", "run.engine=loop")
    with pytest.raises(ConfigError, match='"bf16" cannot be used with this model'):
        Simulation(small(f"model.name={__name__}:with_attention", *settings))


def test_shared_weights_have_one_float32_master(bf16):
    settings = ("model.options={}", "train.precision=bf16", "run.engine=loop")
    simulation = Simulation(small(f"model.name={__name__}:with_tied_weights", *settings))
    assert {p.dtype for p in worker_of(simulation).params.values()} == {torch.float32}
    finish(simulation)


def test_vmap_is_fp32_only(no_check):
    with pytest.raises(ConfigError, match=r"vmap.*fp32 only"):
        Simulation(small("train.precision=bf16", "run.engine=vmap"))
    assert Simulation(small("train.precision=bf16", "data.clients=20")).engine.name != "vmap"


# --- CPUs that cannot


@pytest.mark.parametrize(
    ("speed", "sentence"),
    [
        (0.011, "not available on this CPU: it has no bf16 instructions, and a bf16 matrix product takes 91 times"),
        (None, "would end this process here"),
    ],
)
def test_bf16_where_it_cannot_be_done(monkeypatch, speed, sentence):
    monkeypatch.setattr(precision, "bf16_speed", lambda: speed)
    with pytest.raises(ConfigError, match=sentence):
        Simulation(small("train.precision=bf16"))


def test_bf16_where_it_is_no_gain_is_said(monkeypatch):
    monkeypatch.setattr(precision, "bf16_speed", lambda: 0.5)
    assert precision.require_bf16(torch.device("cpu")).startswith("bf16 is slower than fp32 on this CPU: 0.50 x")
    monkeypatch.setattr(precision, "bf16_speed", lambda: 4.0)
    assert precision.require_bf16(torch.device("cpu")) == ""


def test_an_illegal_instruction_kills_the_trial_and_not_us(monkeypatch):
    monkeypatch.setattr(precision, "_compare_products", lambda: os.kill(os.getpid(), signal.SIGILL))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert precision.bf16_speed() is None
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ


def test_without_amx_a_second_trial_may_succeed(monkeypatch):
    def without_amx():
        if os.environ.get("ONEDNN_MAX_CPU_ISA") != "AVX512_CORE_BF16":
            os.kill(os.getpid(), signal.SIGILL)
        return 0.5

    monkeypatch.setattr(precision, "_compare_products", without_amx)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "to be restored")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    assert precision.bf16_speed() == 0.5
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"


def test_a_trial_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(precision, "_compare_products", signal.pause)
    monkeypatch.setattr(precision, "PATIENCE", 0.2)
    assert precision._try_in_child() is None
