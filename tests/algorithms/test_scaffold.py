"""SCAFFOLD: two rounds by hand, its first round is FedAvg, and on quadratics it finds the optimum that FedAvg misses."""

from __future__ import annotations

import random

import pytest
import torch

from cwfed.algorithms import build
from cwfed.algorithms.scaffold import CONTROL, CORRECTION, COUNT, SENT, Scaffold
from cwfed.core.errors import ConfigError
from cwfed.core.types import Output, Task, Uploads
from cwfed.federation.simulation import Simulation
from tests.algorithms.helpers import tiny
from tests.conftest import finish, leaves, small

TASK = Task(4, 2, {"layer": ("w",)}, "layer")


class Client:
    """A client with the one parameter w."""

    parameters = ("w", COUNT)


def begun(state, client, own):
    return Scaffold().begin(Scaffold().send(state, client), own, Client())


def stepped(start, gradient, steps, eta):
    """Plain SGD on a loss of w with this gradient, and on the penalty."""
    params = {name: w.clone().requires_grad_() for name, w in start.params.items()}
    for _ in range(steps):
        penalty = Scaffold().penalty(params, Output(*(torch.zeros(1),) * 3), torch.zeros(1), start)
        found = torch.autograd.grad(penalty, list(params.values()))
        with torch.no_grad():
            plain = {"w": gradient(params["w"]), COUNT: torch.zeros(())}
            for (name, w), g in zip(params.items(), found, strict=True):
                w -= eta * (g + plain[name])
    return {name: w.detach() for name, w in params.items()}


def test_two_rounds_of_one_client_in_four_by_hand():
    """Gradient 3 everywhere, eta = 0.1, two steps from x = 1, nothing to correct: y = 0.4, K eta = 0.2, c_i+ = 3.

    The server: x = 0.4, c = 0 + 1/4 * 3 = 0.75. Gradient 1 in the next round: each step is -0.1 * (1 - 3 + 0.75) = +0.125, so
    y = 0.65; c_i+ = 3 - 0.75 + (0.4 - 0.65) / 0.2 = 1, the plain gradient, and the change that is sent is 1 - 3 = -2.
    """
    state = Scaffold().init(lambda _: {"w": torch.tensor([1.0])}, TASK)
    own = {"w": torch.tensor([1.0]), COUNT: torch.zeros(())}  # before its first round
    for gradient, y, change, c in ((3.0, 0.4, 3.0, 0.75), (1.0, 0.65, -2.0, 0.75 - 0.5)):
        start = begun(state, 0, own)
        trained = stepped(start, lambda w, g=gradient: torch.full_like(w, g), steps=2, eta=0.1)
        assert float(trained["w"]) == pytest.approx(y)
        assert float(trained[COUNT]) == pytest.approx(0.2)
        sent = Scaffold().finish(trained, start, Client())
        assert float(sent[CONTROL + "w"]) == pytest.approx(change, abs=1e-5)
        up = Uploads(
            (0,),
            {"w": trained["w"][None]},
            torch.tensor([10]),
            {name: extra[None] for name, extra in sent.items()},
        )
        state = Scaffold().aggregate(state, up)
        assert float(state["model"]["w"]) == pytest.approx(y)
        assert float(state["control"]["w"]) == pytest.approx(c)
        own = trained | Scaffold().remember(start)
    assert float(Scaffold().control("w", own)) == pytest.approx(1.0)


def test_who_sits_out_keeps_its_control_variate():
    """c_i is from the client's own last round, however many rounds ago: 2 - 0.5 + (5 - 4) / 0.5 = 3.5."""
    own = {
        "w": torch.tensor([4.0]),
        COUNT: torch.tensor(0.5),
        SENT + "w": torch.tensor([5.0]),
        CORRECTION + "w": torch.tensor([1.5]),
    }
    state = {"model": {"w": torch.zeros(1)}, "control": {"w": torch.tensor([0.25])}}
    assert float(begun(state, 0, own).notes[CORRECTION + "w"]) == pytest.approx(3.5 - 0.25)


def test_on_quadratics_its_fixed_point_is_the_optimum_and_fedavgs_is_not():
    """Losses (w - 1)^2 / 2 and 4 (w + 1)^2 / 2: the mean has its optimum where (w - 1) + 4 (w + 1) = 0, at -0.6.

    FedAvg with two steps of 0.1: client 1 keeps 0.81 of its distance to 1, client 2 0.36 of that to -1; its fixed point is
    w = (0.81 w + 0.19 + 0.36 w - 0.64) / 2, so w = -0.45 / 0.83 = -0.5422.
    """
    gradients = (lambda w: w - 1, lambda w: 4 * (w + 1))
    task = Task(2, 2, {"layer": ("w",)}, "layer")
    first = {"w": torch.zeros(1, dtype=torch.float64)}
    for algorithm, expected in (("scaffold", -0.6), ("fedavg", -0.45 / 0.83)):
        method = build(algorithm)
        state = method.init(lambda _: first, task)
        kept = [first | {COUNT: torch.zeros((), dtype=torch.float64)}] * 2
        for _ in range(200):
            models, extras = [], []
            for i, gradient in enumerate(gradients):
                start = begun(state if algorithm == "scaffold" else state | {"control": {}}, i, kept[i])
                if algorithm == "scaffold":
                    trained = stepped(start, gradient, steps=2, eta=0.1)
                    kept[i] = trained | method.remember(start)
                    extras.append(method.finish(trained, start, Client()))
                else:
                    w = state["model"]["w"]
                    for _ in range(2):
                        w = w - 0.1 * gradient(w)
                    trained = {"w": w}
                models.append(trained["w"])
            stack = {name: torch.stack([e[name] for e in extras]) for name in (extras[0] if extras else ())}
            state = method.aggregate(state, Uploads((0, 1), {"w": torch.stack(models)}, torch.tensor([5, 5]), stack))
        assert float(state["model"]["w"]) == pytest.approx(expected, abs=1e-6), algorithm


def test_c_is_the_mean_of_the_c_i_over_all_clients_by_hand():
    """Clients of 6, 2 and 4 samples. Round 1, of 0 and 1, which send +3 and -1: n is 3 * (6 + 2) / 2 = 12, c = (6 * 3 - 2 * 1) / 12.
    Round 2, of 1 and 2, which send +6 and +2: n is 12 now that all are known, c = (16 + 2 * 6 + 4 * 2) / 12 = 3.
    Round 3, of 0 and 2, which send -2 and -4: c = (36 - 6 * 2 - 4 * 4) / 12 = 2 / 3, and the c_i are 1, 5 and -2.
    """
    sizes, c_i = (6, 2, 4), [0.0, 0.0, 0.0]
    method, zero = Scaffold(), {"w": torch.zeros(1, dtype=torch.float64)}
    state = method.init(lambda _: zero, Task(3, 2, {"layer": ("w",)}, "layer"))
    for sent, c in (({0: 3, 1: -1}, 16 / 12), ({1: 6, 2: 2}, 3.0), ({0: -2, 2: -4}, 2 / 3)):
        for client, change in sent.items():
            c_i[client] += change
        changes = {CONTROL + "w": torch.tensor([[float(change)] for change in sent.values()], dtype=torch.float64)}
        models = {"w": torch.zeros(2, 1, dtype=torch.float64)}
        state = method.aggregate(state, Uploads(tuple(sent), models, torch.tensor([sizes[i] for i in sent]), changes))
        assert float(state["control"]["w"]) == pytest.approx(c)
    assert c_i == [1, 5, -2]


def test_clients_of_unequal_size_that_sit_out_find_the_optimum_too():
    """Losses a (w - b)^2 / 2, two of six clients a round: the optimum is sum n a b / sum n a, whoever comes together with whom."""
    sizes, a, b = (10, 1, 1, 4, 2, 1), (1.0, 4.0, 2.0, 0.5, 3.0, 1.5), (1.0, -1.0, 2.0, -3.0, 0.5, 4.0)
    method, first, draws = Scaffold(), {"w": torch.zeros(1, dtype=torch.float64)}, random.Random(0)
    state = method.init(lambda _: first, Task(6, 2, {"layer": ("w",)}, "layer"))
    kept = [first | {COUNT: torch.zeros((), dtype=torch.float64)}] * 6
    for _ in range(1500):
        clients = sorted(draws.sample(range(6), 2))
        models, changes = [], []
        for i in clients:
            start = begun(state, i, kept[i])
            y = start.params["w"]
            for _ in range(2):
                y = y - 0.1 * (a[i] * (y - b[i]) - start.notes[CORRECTION + "w"])
            trained = {"w": y, COUNT: torch.tensor(0.2, dtype=torch.float64)}
            changes.append(method.finish(trained, start, Client())[CONTROL + "w"])
            models.append(y)
            kept[i] = trained | method.remember(start)
        counts = torch.tensor([sizes[i] for i in clients])
        sent = {CONTROL + "w": torch.stack(changes)}
        state = method.aggregate(state, Uploads(tuple(clients), {"w": torch.stack(models)}, counts, sent))
    optimum = sum(n * x * y for n, x, y in zip(sizes, a, b, strict=True)) / sum(
        n * x for n, x in zip(sizes, a, strict=True)
    )
    assert float(state["model"]["w"]) == pytest.approx(optimum, abs=1e-3)


def test_a_long_change_of_c_is_bounded_like_a_long_update(monkeypatch):
    """One client in six sends 100 everywhere: with the norm bound the others go on learning."""
    plain = Scaffold.finish

    def hostile(self, params, start, data):
        found = plain(self, params, start, data)
        return {name: torch.full_like(c, 100.0) for name, c in found.items()} if data.class_counts[9] else found

    settings = ("algorithm.name=scaffold", "run.engine=loop", "train.rounds=8", "guard.norm_bound=2")
    _, honest = finish(Simulation(small(*settings)))
    monkeypatch.setattr(Scaffold, "finish", hostile)
    _, attacked = finish(Simulation(small(*settings)))
    assert attacked[0].scaled_back
    assert not attacked[-1].refused
    assert attacked[-1].received.accuracy > honest[-1].received.accuracy - 0.15
    _, unbounded = finish(Simulation(small(*settings[:-1])))
    assert unbounded[-1].received.accuracy < honest[-1].received.accuracy - 0.3


def test_k_eta_is_counted_under_differential_privacy_and_not_under_a_term_that_would_pull_it_back():
    settings = ("privacy.dp=sample", "privacy.dp_noise=1", "train.rounds=2", "train.batch_size=10", "run.engine=loop")
    simulation = Simulation(small("algorithm.name=scaffold", *settings))
    ended, _ = finish(simulation)
    for client, own in ended.kept.items():
        steps = len(simulation.federation.shards[client].train) // 10
        assert float(own[COUNT]) == pytest.approx(steps * simulation.engine.job.how.lr, rel=1e-4)
    with pytest.raises(ConfigError, match="its number of steps is a tensor of the network"):
        Simulation(small("algorithm.name=scaffold+prox"))


def test_coarse_norms_would_hide_nothing():
    with pytest.raises(ConfigError, match="would hide nothing: scaffold also sends how the output layer moved"):
        Simulation(small("algorithm.name=scaffold", "privacy.norms=coarse"))


def test_all_clients_are_measured_on_one_model():
    state = Scaffold().init(lambda _: {"w": torch.zeros(1)}, TASK)
    models = [Scaffold().personal(Scaffold().send(state, client), None, Client()) for client in range(2)]
    assert models[0] is models[1]
    assert COUNT not in Scaffold().newcomer(state)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_the_first_round_is_fedavg(engine):
    settings = (f"run.engine={engine}", "train.rounds=1", "train.participation=0.7", "train.client_dropout=0.2")
    ours, (event,) = finish(Simulation(tiny("algorithm.name=scaffold", *settings)))
    plain, (expected,) = finish(Simulation(tiny("algorithm.name=fedavg", *settings)))
    assert leaves(Scaffold().newcomer(ours.server)) == leaves(plain.server["model"])
    assert event.received.right == expected.received.right  # vmap measures a model that all share in other batches
    for c in ours.server["control"].values():
        assert c.abs().sum() > 0


def test_a_schedule_is_counted_as_it_is():
    """K eta is read off a number that moves with every step, so c_i is a mean gradient whatever the rate is."""
    settings = ("train.rounds=3", "train.schedule=cosine", "run.engine=loop", "train.epochs=2")
    ended, _ = finish(Simulation(tiny("algorithm.name=scaffold", *settings)))
    simulation = Simulation(tiny("algorithm.name=scaffold", *settings))
    how = simulation.engine.job.how
    for client, own in ended.kept.items():
        n = len(simulation.federation.shards[client].train)
        steps = 2 * (n // min(how.batch_size, n))
        assert float(own[COUNT]) == pytest.approx(steps * how.schedule.rate(how.lr, 3), rel=1e-4)


def test_it_wants_plain_steps():
    for setting in ("train.momentum=0.9", "train.optimizer=adam", "train.clip=1"):
        with pytest.raises(ConfigError, match="scaffold: its control variates are means of plain SGD's gradients"):
            Simulation(tiny("algorithm.name=scaffold", setting))
