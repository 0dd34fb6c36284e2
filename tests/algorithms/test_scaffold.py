"""SCAFFOLD: two rounds by hand, its first round is FedAvg, and on quadratics it finds the optimum that FedAvg misses."""

from __future__ import annotations

import pytest
import torch

from cwfed.algorithms import build
from cwfed.algorithms.scaffold import CONTROL, CORRECTION, COUNT, SENT, Scaffold
from cwfed.core.errors import ConfigError
from cwfed.core.types import Output, Task, Uploads
from cwfed.federation.simulation import Simulation
from tests.algorithms.helpers import tiny
from tests.conftest import finish, leaves

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
    state = {"model": {"w": torch.zeros(1)}, "control": {"w": torch.tensor([0.25])}, "clients": 4}
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


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_the_first_round_is_fedavg(engine):
    settings = (f"run.engine={engine}", "train.rounds=1", "train.participation=0.7", "train.client_dropout=0.2")
    ours, (event,) = finish(Simulation(tiny("algorithm.name=scaffold", *settings)))
    plain, (expected,) = finish(Simulation(tiny("algorithm.name=fedavg", *settings)))
    assert leaves(ours.server["model"]) == leaves(plain.server["model"])
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
