"""Plug-ins of the client's training: head_first, tune, offset, ala. Each with its limits bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from cwfed.algorithms import build
from cwfed.algorithms.fedala import OMEGA, FedALA
from cwfed.algorithms.plugins.offset import Offset
from cwfed.core.types import Start
from cwfed.data import Federation, Shard, load
from cwfed.data.sources import SourceSpec
from cwfed.federation.simulation import Simulation
from tests.conftest import finish, leaves, small

TINY = ["data.clients=3", "data.samples=150", "train.rounds=3", "model.options.hidden=4", "run.engine=loop"]
FEW = "algorithm.most_epochs=5"


def run(name, *settings):
    return finish(Simulation(small(f"algorithm.name={name}", *TINY, *settings)))


def server(name, *settings):
    return leaves(run(name, *settings)[0].server)


@pytest.fixture
def a_class_each(monkeypatch):
    """Three clients with a class of their own each."""
    data = load(SourceSpec("digits"))
    by_class = [np.flatnonzero(data.labels == k)[:30] for k in range(3)]
    federation = Federation(data, [Shard(i[:20], i[20:24], i[24:]) for i in by_class])
    monkeypatch.setattr("cwfed.data.share_out", lambda *_: federation)


# --- head first


def test_head_first_over_fedper_is_fedrep():
    assert server("fedper+head_first") == server("fedrep")
    assert server("fedper+head_first", "algorithm.head_epochs=2") == server("fedrep", "algorithm.head_epochs=2")


def test_without_head_epochs_the_body_is_that_of_fedrep_without_them(a_class_each):
    """Clients of 20 samples each: a third of a number three times is that number or its neighbour; then all heads are equal."""
    progress, _ = run("fedavg+head_first", "algorithm.head_epochs=0")
    fedrep, _ = run("fedrep", "algorithm.head_epochs=0")
    for name, w in fedrep.server["model"].items():
        torch.testing.assert_close(progress.server["model"][name], w)


def test_a_mix_of_heads_that_are_never_trained_is_fedbabu_without_tuning(a_class_each):
    """Whatever p~ is, a mix of equal heads is that head (but for rounding), and WDR has nothing to pull at."""
    ours, _ = run("cwfedavg+head_first", "algorithm.head_epochs=0")
    babu, _ = run("fedbabu", "algorithm.tune_epochs=0")
    for name, w in babu.server["model"].items():
        torch.testing.assert_close(ours.server["shared"][name], w)


def test_cwfedavg_with_a_class_per_client_is_fedrep_bit_for_bit(a_class_each):
    """a_i is a unit vector: everybody gets its own head back, over FedAvg's body."""
    ours, _ = run("cwfedavg+head_first", "algorithm.distribution=empirical", "algorithm.wdr=0")
    fedrep, _ = run("fedrep")
    assert leaves(ours.server["shared"]) == leaves(fedrep.server["model"])
    simulation = Simulation(small("algorithm.name=cwfedavg", *TINY))
    for client, kept in fedrep.kept.items():
        head = simulation.algorithm.send(ours.server, client).model
        assert leaves({name: head[name] for name in kept}) == leaves(kept)
    simulation.close()


def test_each_part_is_fixed_while_the_other_is_trained_and_wdr_acts_on_the_head_alone():
    passes = {}
    for wdr in (0, 5):
        simulation = Simulation(small("algorithm.name=cwfedavg+head_first", f"algorithm.wdr={wdr}", *TINY))
        bench, seen = simulation.engine.tasks.worker, []
        make = bench._make_pass

        def watched(*given, make=make, seen=seen, bench=bench):
            done = make(*given)
            seen.append({name: w.detach().clone() for name, w in bench.params.items()})
            return done

        bench._make_pass = watched
        state, visit = simulation.first_state(), simulation.visit(0, {})
        out = {n: torch.empty(1, *w.shape) for n, w in simulation.initial.items()}
        simulation.engine.visit(1, state, [visit], out)
        sent = simulation.algorithm.send(state, 0).model
        head, body = seen
        assert [n for n, w in head.items() if not torch.equal(w, sent[n])] == ["output.weight", "output.bias"]
        assert [n for n, w in body.items() if torch.equal(w, head[n])] == ["output.weight", "output.bias"]
        passes[wdr] = head
        # with the head as it is now, the penalty has no gradient on what the second pass trains
        start = simulation.algorithm.begin(simulation.engine.download(state, visit), None, bench.view(0, {}))
        batch = bench.samples.batch(simulation.federation.shards[0].train[:10])
        output = bench.forward(batch[0])
        penalty = simulation.algorithm.penalty(bench.params, output, batch[1], start)
        names = [n for n in bench.params if not n.startswith("output")]
        if penalty.requires_grad:
            found = torch.autograd.grad(penalty, [bench.params[n] for n in names], allow_unused=True)
            assert all(gradient is None for gradient in found)
        simulation.close()
    assert not torch.equal(passes[0]["output.weight"], passes[5]["output.weight"])


# --- tuning on receipt


def test_no_tuning_is_what_is_beneath_it():
    for base in ("fedavg", "cwfedavg"):
        plain, events = run(base)
        tuned, same = run(f"{base}+tune", "algorithm.tune_epochs=0")
        assert leaves(plain.server) == leaves(tuned.server)
        assert [(e.received, e.trained) for e in events] == [(e.received, e.trained) for e in same]


def test_without_class_wise_layers_it_is_fedavg_with_tuning():
    flat = run("cwfedavg+tune", "algorithm.layers=none", "algorithm.wdr=0")
    fedavg = run("fedavg+tune")
    assert leaves(flat[0].server["shared"]) == leaves(fedavg[0].server["model"])
    assert [e.received for e in flat[1]] == [e.received for e in fedavg[1]]


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_the_received_output_layer_is_tuned_and_measured_then(engine):
    simulation = Simulation(small("algorithm.name=fedavg+tune", *TINY, f"run.engine={engine}", "train.rounds=1"))
    progress, (event,) = finish_open(simulation)
    (model,) = simulation.engine.personal(2, progress.server, [simulation.visit(0, {})])
    moved = [n for n, w in progress.server["model"].items() if not torch.equal(w, model[n])]
    assert moved == ["output.weight", "output.bias"]
    assert event.received.loss < run("fedavg", "train.rounds=1")[1][0].received.loss
    (one,) = simulation.algorithm.passes("receipt", simulation.task, Start({}))
    assert (one.trained, one.epochs, one.steps) == (("output.weight", "output.bias"), 1, None)
    simulation.close()
    (one,) = build({"name": "fedavg+tune", "tune_epochs": 3, "tune_steps": 2}).passes(
        "receipt", simulation.task, Start({})
    )
    assert (one.epochs, one.steps) == (3, 2)


def finish_open(simulation):
    """As `finish`, with an engine that still works."""
    events = []
    for progress, event in simulation.rounds(simulation.start()):
        events.append(event)
    return progress, events


# --- personal offsets


@dataclass(frozen=True)
class Frozen(Offset):
    """An offset that stays 0."""

    plugin = "frozen"

    def adapt(self, model, output):
        model = super().adapt(model, output)
        model.get_submodule(output).offset.requires_grad_(False)
        return model


@pytest.mark.parametrize("base", ["fedavg", "cwfedavg"])
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_an_offset_frozen_at_zero_is_what_is_beneath_it(base, engine):
    plain, events = run(base, f"run.engine={engine}")
    frozen, same = run(f"{base}+{__name__}:Frozen", f"run.engine={engine}")
    assert leaves(plain.server) == leaves(frozen.server)
    assert [(e.trained, e.loss) for e in events] == [(e.trained, e.loss) for e in same]
    # one shared model is measured otherwise than one for each client: the last bits of a loss depend on the CPU
    assert [e.received.right for e in events] == [e.received.right for e in same]
    assert [e.received.loss for e in events] == pytest.approx([e.received.loss for e in same], rel=1e-6)


def test_an_offset_is_trained_kept_and_never_sent():
    progress, events = run("cwfedavg+offset")
    assert all("output.offset" not in kind for kind in (progress.server["basis"], progress.server["shared"]))
    offsets = [kept["output.offset"] for kept in progress.kept.values()]
    assert [list(kept) for kept in progress.kept.values()] == [["output.offset"]] * 3
    assert all(offset.abs().max() > 0 for offset in offsets)
    assert not torch.equal(offsets[0], offsets[1])
    plain = run("cwfedavg")[1]
    assert [(e.up, e.down) for e in events] == [(e.up, e.down) for e in plain]


def test_the_gradient_of_an_offset_by_hand():
    """softmax - [y = k], as of a bias: at z = 0 with three classes and labels 0, 0 it is 1/3 - 1, 1/3, 1/3."""
    network = torch.nn.Sequential()
    network.add_module("out", torch.nn.Linear(2, 3))
    network.output_layer = "out"
    build("fedavg+offset").adapt(network, "out")
    with torch.no_grad():
        network.out.weight.zero_()
        network.out.bias.zero_()
    loss = torch.nn.functional.cross_entropy(network(torch.ones(2, 2)), torch.tensor([0, 0]))
    torch.testing.assert_close(torch.autograd.grad(loss, network.out.offset)[0], torch.tensor([-2 / 3, 1 / 3, 1 / 3]))


# --- a local objective, and norm layers of one's own


@pytest.mark.parametrize("base", ["fedper", "fedrep", "fedbabu", "lg-fedavg"])
def test_a_proximal_term_over_a_body_and_a_head(base):
    more = ["algorithm.tune_epochs=1"] if base == "fedbabu" else []
    assert server(f"{base}+prox", "algorithm.mu=0", *more) == server(base, *more)
    free, held = (run(f"{base}+prox", f"algorithm.mu={mu}", "train.rounds=1", *more)[0] for mu in (0, 15))
    simulation = Simulation(small(f"algorithm.name={base}", *TINY))
    simulation.close()

    def moved(progress):
        return sum(float((w - simulation.initial[n]).norm()) for n, w in progress.server["model"].items())

    assert moved(held) < 0.9 * moved(free)


def test_a_proximal_term_over_fedavg_is_fedprox_and_over_cwfedavg_its_objective():
    assert server("fedavg+prox", "algorithm.mu=0.5") == server("fedprox", "algorithm.mu=0.5")
    inside = 'algorithm.objective={name = "fedprox", mu = 0.5}'
    assert server("cwfedavg+prox", "algorithm.mu=0.5") == server("cwfedavg", inside)


BATCH_NORM = ("model.name=cwfed.testing.problems:with_batch_norm", "model.options={}")


def normed(name, *settings):
    few = [setting for setting in TINY if "model." not in setting]
    return finish(Simulation(small(f"algorithm.name={name}", *few, *BATCH_NORM, *settings)))


def test_norm_layers_that_stay_over_fedavg_are_fedbn():
    ours, events = normed("fedavg+bn")
    fedbn, same = normed("fedbn")
    assert leaves(ours.server) == leaves(fedbn.server)
    assert leaves(ours.kept) == leaves(fedbn.kept)
    assert [(e.received, e.trained) for e in events] == [(e.received, e.trained) for e in same]
    flat, others = normed("cwfedavg+bn", "algorithm.layers=none", "algorithm.wdr=0")
    assert leaves(flat.server["shared"]) == leaves(fedbn.server["model"])
    assert leaves(flat.kept) == leaves(fedbn.kept)
    assert [(e.received, e.trained) for e in others] == [(e.received, e.trained) for e in same]


@pytest.mark.parametrize("base", ["cwfedavg", "fedper", "fedrep", "fedala", "fedas", "per-fedavg"])
def test_norm_layers_that_stay_never_reach_the_server(base):
    """And in a network that has none nothing changes, bit for bit."""
    assert server(f"{base}+bn") == server(base)
    progress, events = normed(
        f"{base}+bn", "algorithm.layers=all" if base == "cwfedavg" else "train.participation=0.7"
    )
    state = progress.server
    names = {*state["shared"], *state["basis"]} if base == "cwfedavg" else set(state["model"])
    norms = {f"2.{n}" for n in ("weight", "bias", "running_mean", "running_var")}
    assert "1.weight" in names
    assert not norms & names
    assert all(norms <= set(kept) for kept in progress.kept.values())
    assert np.isfinite(events[-1].received.loss)


# --- FedALA over others


@dataclass(frozen=True)
class FromZero(FedALA):
    """Omega starts at 0 and hardly moves."""

    plugin = "from_zero"
    rate: float = 1e-30

    def adapt(self, model, output):
        network = super().adapt(model, output)
        for name, omega in network.named_parameters():
            if name.startswith(OMEGA):
                omega.data.zero_()
        return network


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_ala_switched_off_is_what_is_beneath_it(engine):
    assert server("cwfedavg", f"run.engine={engine}") == server(
        "cwfedavg+ala", "algorithm.rate=0", f"run.engine={engine}"
    )


def test_ala_over_fedavg_is_fedala():
    ours, events = run("fedavg+ala", FEW)
    fedala, same = run("fedala", FEW)
    assert leaves(ours.server) == leaves(fedala.server)
    assert leaves(ours.kept) == leaves(fedala.kept)
    flat, others = run("cwfedavg+ala", FEW, "algorithm.layers=none", "algorithm.wdr=0")
    assert leaves(flat.server["shared"]) == leaves(fedala.server["model"])
    assert [e.received for e in events] == [e.received for e in same] == [e.received for e in others]


def test_cwfedavg_that_takes_nothing_of_the_received_head_is_fedper():
    """Omega of 0 and no WDR: the own output layer over FedAvg's body."""
    ours, _ = run(f"cwfedavg+{__name__}:FromZero", "algorithm.wdr=0")
    fedper, _ = run("fedper")
    assert leaves(ours.server["shared"]) == leaves(fedper.server["model"])
    for client, head in fedper.kept.items():
        assert leaves({name: ours.kept[client][name] for name in head}) == leaves(head)


def test_training_does_not_move_omega_not_even_by_weight_decay():
    progress, _ = run("fedprox+ala", "algorithm.rate=0", "train.weight_decay=0.1", "train.rounds=1")
    omegas = [w for kept in progress.kept.values() for name, w in kept.items() if name.startswith(OMEGA)]
    assert len(omegas) == 6
    assert all(torch.equal(omega, torch.ones_like(omega)) for omega in omegas)


def test_one_omega_for_each_class_by_hand():
    """Rows (0, 0), (2, 2) and biases 0, 4 of its own, rows (4, 8), (4, 8) and biases 1, 1 received; omega 1/4 and 1."""
    algorithm = build({"name": "fedavg+ala", "rows": True})
    own = {"out.weight": torch.tensor([[0.0, 0.0], [2.0, 2.0]]), "out.bias": torch.tensor([0.0, 4.0])}
    got = {"out.weight": torch.tensor([[4.0, 8.0], [4.0, 8.0]]), "out.bias": torch.tensor([1.0, 1.0])}
    anchor = {f"{who}.{name}": w for who, kind in (("own", own), ("got", got)) for name, w in kind.items()}
    mixed = algorithm.mixed({OMEGA + "out": torch.tensor([0.25, 1.0])}, Start({}, anchor))
    assert mixed["out.weight"].tolist() == [[1, 2], [4, 8]]
    assert mixed["out.bias"].tolist() == [0.25, 1]


def test_a_client_learns_k_omegas_in_row_form():
    progress, _ = run("cwfedavg+ala", FEW, "algorithm.rows=true", "algorithm.rate=100")
    kept = progress.kept[0]
    assert kept[OMEGA + "output"].shape == (10,)
    assert 0 <= kept[OMEGA + "output"].min() < 1
    assert set(kept) == {"output.weight", "output.bias", OMEGA + "output", "times"}
