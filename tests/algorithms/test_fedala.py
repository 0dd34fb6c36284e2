"""FedALA: what is learnt on receipt, when, and its limiting cases bit for bit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from cwfed.algorithms import build
from cwfed.algorithms.fedala import OMEGA, TIMES, FedALA
from cwfed.core.errors import ConfigError
from cwfed.core.types import Batch, Output, Start
from cwfed.federation.rounds import to_tree
from cwfed.federation.simulation import Simulation
from tests.conftest import finish, leaves, small, worker_of

SOME = ("train.participation=0.7", "train.client_dropout=0.2")


@pytest.mark.parametrize("off", ["algorithm.rate=0", "algorithm.top_layers=0"])
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_switched_off_it_is_fedavg(off, engine):
    fedavg, plain = finish(Simulation(small("algorithm.name=fedavg", f"run.engine={engine}", *SOME)))
    fedala, events = finish(Simulation(small("algorithm.name=fedala", off, f"run.engine={engine}", *SOME)))
    assert leaves(fedala.server) == leaves(fedavg.server)
    assert [(e.received, e.trained, e.loss) for e in events] == [(e.received, e.trained, e.loss) for e in plain]


def test_omega_of_one_is_the_received_layer_bit_for_bit():
    fedala = FedALA()
    torch.manual_seed(0)
    own, got = torch.randn(50), torch.randn(50)
    start = Start({}, {"own.w": own, "got.w": got})
    assert torch.equal(fedala.mixed({OMEGA + "w": torch.ones(50)}, start)["w"], got)
    assert torch.equal(fedala.mixed({OMEGA + "w": torch.zeros(50)}, start)["w"], own)
    assert not torch.equal(own + (got - own) * torch.ones(50), got), "why it is lerp"


@dataclass(frozen=True)
class FromZero(FedALA):
    """FedALA whose omega starts at 0 and hardly moves."""

    rate: float = 1e-30

    def adapt(self, model, output):
        network = super().adapt(model, output)
        for name, omega in network.named_parameters():
            if name.startswith(OMEGA):
                omega.data.zero_()
        return network


def test_omega_of_zero_is_fedper():
    """The own output layer, whatever is received, over the received body. (A first round starts from the received one.)"""
    fedper, plain = finish(Simulation(small("algorithm.name=fedper", "run.engine=loop")))
    fedala, events = finish(Simulation(small(f"algorithm.name={__name__}:FromZero", "run.engine=loop")))
    body = fedper.server["model"]
    assert leaves({n: fedala.server["model"][n] for n in body}) == leaves(body)
    for client, head in fedper.kept.items():
        assert leaves({n: fedala.kept[client][n] for n in head}) == leaves(head)
    assert [e.received for e in events] == [e.received for e in plain], "the same models are measured"


def linear(params, inputs, statistics=""):
    return Output(inputs @ params["w"].T, inputs, params["w"])


def test_the_gradient_of_omega_by_hand():
    """d CE / d omega = d CE / d theta^ * (theta - theta_i), element by element."""
    fedala = FedALA()
    omega = torch.tensor([[0.5], [0.5]], requires_grad=True)
    own, got = torch.tensor([[0.0], [2.0]]), torch.tensor([[2.0], [0.0]])  # theta^ = (1, 1): equal logits
    start = Start({}, {"own.w": own, "got.w": got})
    batch = Batch(torch.ones(1, 1), torch.tensor([0]))
    found = fedala.loss(linear, {"w": torch.zeros(2, 1), OMEGA + "w": omega}, batch, start, "omega")
    (gradient,) = torch.autograd.grad(found.loss + found.penalty, omega)
    assert gradient.flatten().tolist() == [-0.5 * 2, 0.5 * -2]


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_omega_stays_between_zero_and_one_and_moves_from_the_second_time_on(engine):
    simulation = Simulation(
        small("algorithm.name=fedala", "algorithm.rate=100", f"run.engine={engine}", "train.rounds=4")
    )
    omegas = []
    for progress, _ in simulation.rounds(simulation.start()):
        kept = progress.kept[0]
        assert float(kept[TIMES]) == progress.round
        omegas.append(kept[OMEGA + "output.weight"])
        assert 0 <= omegas[-1].min() <= omegas[-1].max() <= 1
    simulation.close()
    assert torch.equal(omegas[0], torch.ones_like(omegas[0])), "not in the first round"
    assert not torch.equal(omegas[1], omegas[0])


def test_omega_is_learnt_on_from_where_it_was():
    """With a rate of next to nothing, round 2 mixes with the omega that the client kept: here a quarter."""
    simulation = Simulation(small("algorithm.name=fedala", "algorithm.rate=1e-30", "run.engine=loop"))
    progress, _ = next(simulation.rounds(simulation.start()))
    own = {n: torch.full_like(w, 0.25) if n.startswith(OMEGA) else w for n, w in progress.kept[1].items()}
    (model,) = simulation.engine.personal(2, progress.server, [simulation.visit(1, own)])
    simulation.close()
    got = progress.server["model"]
    for name in ("output.weight", "output.bias"):
        assert torch.equal(model[name], torch.lerp(own[name], got[name], torch.full_like(got[name], 0.25)))
        assert not torch.equal(own[name], got[name])
    assert torch.equal(model["fc.weight"], got["fc.weight"])


def test_the_first_time_it_learns_until_the_losses_stand_still():
    task = Simulation(small("algorithm.name=fedala"))
    task.close()
    fedala = FedALA(most_epochs=7)
    first, later = (fedala.passes("receipt", task.task, Start({}, {}, {TIMES: torch.tensor(t)})) for t in (1.0, 2.0))
    assert [(one.epochs, one.until) for one in (*first, *later)] == [(7, (10, 0.1)), (1, None)]
    assert fedala.passes("receipt", task.task, Start({}, {}, {TIMES: torch.tensor(0.0)})) == ()


def test_a_pass_ends_when_its_losses_stand_still():
    simulation = Simulation(
        small("algorithm.name=fedala", "run.engine=loop", "algorithm.still=1000", "train.rounds=2")
    )
    seen = []
    train = worker_of(simulation).gradients
    worker_of(simulation).gradients = lambda a, b, s, stage, *rest: (
        seen.append(stage),
        train(a, b, s, stage, *rest),
    )[1]
    simulation.evaluated = simulation.evaluated[:1]
    finish(simulation)
    steps = [seen.count("omega")]
    # ten epochs on 80 % of the data (incomplete batches too) for each of six clients in round 2; the one that is measured
    # does the same after round 1, and an epoch after round 2, once for its score and once for its portrait
    samples = [round(0.8 * len(s.train)) for s in simulation.federation.shards.values()]
    per_epoch = [n // 10 + (n % 10 > 1) for n in samples]
    assert steps[0] == 10 * sum(per_epoch) + (10 + 1 + 1) * per_epoch[simulation.evaluated[0]]


def test_measuring_does_not_move_omega():
    """Evaluated in every round or in the last only: the same clients, to the bit."""
    often, _ = finish(Simulation(small("algorithm.name=fedala", "train.rounds=4", *SOME)))
    rarely, _ = finish(Simulation(small("algorithm.name=fedala", "train.rounds=4", "run.evaluate_every=4", *SOME)))
    assert leaves(to_tree(often)) == leaves(to_tree(rarely))


def test_what_was_measured_is_what_the_next_round_starts_from():
    simulation = Simulation(small("algorithm.name=fedala", "run.engine=loop", "train.rounds=3"))
    *_, (after, _) = simulation.rounds(simulation.start())
    visit = simulation.visit(1, after.kept[1])
    (measured,) = simulation.engine.personal(4, after.server, [visit])
    worker = worker_of(simulation)
    got = simulation.engine.download(after.server, visit)
    start = simulation.algorithm.begin(got, visit.own, worker.view(1, {}))
    begun = simulation.engine.tasks.received(4, visit, start)
    assert leaves(begun.params) == leaves(measured)
    simulation.close()


@pytest.mark.parametrize("wrong", ["top_layers=-1", "share=0", "share=1.5", "rate=-1", "most_epochs=0"])
def test_impossible_settings(wrong):
    with pytest.raises(ConfigError, match="fedala: top_layers, rate and still must not be negative"):
        small("algorithm.name=fedala", f"algorithm.{wrong}")


def test_learning_omega_moves_no_running_statistics():
    batch_norm = ("model.name=tests.engine.test_engines:with_batch_norm", "model.options={}", "run.engine=loop")
    simulation = Simulation(small("algorithm.name=fedala", "train.rounds=2", *batch_norm))
    *_, (after, _) = simulation.rounds(simulation.start())
    (model,) = simulation.engine.personal(3, after.server, [simulation.visit(0, after.kept[0])])
    simulation.close()
    received = after.server["model"]
    assert torch.equal(model["2.running_mean"], received["2.running_mean"])
    assert not torch.equal(model["4.weight"], received["4.weight"])


def test_over_a_balanced_loss_its_weights_are_learned_on_that():
    """Logits 0, 0 and a log-prior of (0, ln 3): CE of class 0 is ln 4 and not ln 2."""
    start = Start({}, notes={"log_prior": torch.tensor([0.0, 3.0]).clamp_min(1).log()})

    def network(params, inputs, statistics=""):
        return Output(torch.zeros(1, 2), torch.zeros(1, 1), torch.zeros(2, 1))

    for name, expected in (("fedavg+ala+balanced", 4.0), ("fedavg+ala", 2.0)):
        found = build(name).loss(network, {}, Batch(torch.zeros(1, 1), torch.tensor([0])), start, "omega")
        assert float(found.loss) == pytest.approx(math.log(expected))
        assert float(found.penalty) == 0
