"""Differential privacy against the server: noise that it cannot make again, nothing that is not in the account, and the account."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="the extra flower is not installed")

from flwr.app import ArrayRecord, ConfigRecord
from opacus.accountants import RDPAccountant

from cwfed.core.errors import RunError
from cwfed.core.events import Round
from cwfed.flower import PersonalisedStrategy, site, wire
from cwfed.flower.account import FILE, Account
from cwfed.privacy import dp
from cwfed.privacy.dp import SamplePrivacy
from cwfed.privacy.noise import Seeded
from cwfed.runs.folder import RunFolder
from tests.conftest import small
from tests.flower.helpers import Loopback, carry_out, plan_of

DP = ["privacy.dp=sample", "privacy.dp_histogram=10.0", "train.lr=0.01"]
CLIENTS = 3


def federation(folder, *settings, **node):
    config = small("run.engine=loop", f"data.clients={CLIENTS}", *settings)
    plan = plan_of(config, CLIENTS)
    grid = Loopback(plan, folder)
    for number in range(CLIENTS):
        grid.join(number, **node)
    return plan, grid


def asked(plan, grid):
    """A server that has sent round 1, and its messages."""
    strategy = PersonalisedStrategy(plan)
    strategy.gather(grid)
    return strategy, strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid)


def answers(grid, messages):
    """The models of the answers by node, and their metrics."""
    replies = sorted(grid.send_and_receive(messages), key=lambda reply: reply.metadata.src_node_id)
    models = [wire.from_record(wire.arrays(reply.content, "model"), "it") for reply in replies]
    return models, [dict(reply.content.metric_records["metrics"]) for reply in replies]


def apart(first, second):
    """The largest difference of two lists of models."""
    return max(float((a[n] - b[n]).abs().max()) for a, b in zip(first, second, strict=True) for n in a)


# --- noise


@pytest.mark.parametrize("settings", [DP, ["privacy.norms=noise"]], ids=["dp", "dial"])
def test_the_server_cannot_make_a_nodes_noise_again(settings, tmp_path, monkeypatch):
    """It has the plan, and with the plan's seed a twin of the node: before, its upload was the node's to the bit."""
    plan, grid = federation(tmp_path, *settings)
    _, messages = asked(plan, grid)
    (first, _), (again, _) = answers(grid, messages), answers(grid, messages)
    monkeypatch.setattr(site, "node_noise", lambda *_: Seeded(plan.config.run.seed))
    twin, _ = answers(grid, messages)
    assert apart(twin, answers(grid, messages)[0]) == 0
    least = 1e-3
    assert all(apart([a], [b]) > least for a, b in zip(first, again, strict=True))
    assert all(apart([a], [b]) > least for a, b in zip(first, twin, strict=True))


def test_what_the_twin_does_not_know_is_as_much_as_the_noise(tmp_path, monkeypatch):
    """FedAvg, noise 1, clip 1, batches of 10, rate 0.01: a step's noise has deviation 0.01 * 1 / 10, and so has the rest."""
    plan, grid = federation(tmp_path, "algorithm.name=fedavg", "privacy.dp=sample", "train.lr=0.01")
    _, messages = asked(plan, grid)
    (mine, metrics) = answers(grid, messages)
    monkeypatch.setattr(site, "node_noise", lambda *_: Seeded(plan.config.run.seed))
    twin, _ = answers(grid, messages)
    for ours, guessed, told in zip(mine, twin, metrics, strict=True):
        steps = dp.steps_of_a_round(told["samples"], 10, 1)
        left = torch.cat([(ours[n] - guessed[n]).flatten() for n in ours])
        assert float(left.std()) > 0.9 * 0.001 * (2 * steps) ** 0.5  # of the difference of two such noises


# --- nothing but what is accounted


def test_no_exact_loss_and_no_exact_histogram_leave_a_private_node(tmp_path):
    plan, grid = federation(tmp_path, *DP, histogram=True)
    strategy, messages = asked(plan, grid)
    assert all(hello.histogram == () for hello in strategy.members.hellos.values())
    _, metrics = answers(grid, messages)
    assert all(set(told) <= {"samples", "penalty", "epsilon"} | measured(told) for told in metrics)
    plan, grid = federation(tmp_path / "open", histogram=True)
    strategy, messages = asked(plan, grid)
    assert all(any(hello.histogram) for hello in strategy.members.hellos.values())
    assert all("loss" in told for told in answers(grid, messages)[1])


def measured(told):
    """What is said of test and validation samples, which are not trained on."""
    return {name for name in told if name.startswith("trained-")}


def test_rounds_of_a_private_federation_have_no_loss_and_go_on(tmp_path):
    plan, grid = federation(tmp_path, *DP)
    _, events = carry_out(PersonalisedStrategy(plan), grid)
    rounds = [event for event in events if isinstance(event, Round)]
    assert [(event.loss, event.client_loss, len(event.participants)) for event in rounds] == [(None, [], 3)] * 3


# --- the account


HOW = SamplePrivacy(1.0, 1.1, 1e-5, 0.5)


def opacus(*history):
    accountant = RDPAccountant()
    accountant.history = list(history)
    return accountant.get_epsilon(1e-5)


def test_the_account_is_opacus_own_over_restarts(tmp_path):
    assert Account(tmp_path, HOW).charge(0.1, 20, "data", 3) == pytest.approx(opacus((1.1, 0.1, 20)) + 0.5)
    assert Account(tmp_path, HOW).charge(0.1, 20, "data", 3) == pytest.approx(opacus((1.1, 0.1, 40)) + 0.5)
    more = SamplePrivacy(1.0, 2.0, 1e-5, 0.0)  # another run of the same node
    expected = opacus((1.1, 0.1, 40), (2.0, 0.2, 5)) + 0.5
    assert Account(tmp_path, more).charge(0.2, 5, "data", 3) == pytest.approx(expected)
    book = json.loads((tmp_path / FILE).read_text())
    assert book["epsilon"] == pytest.approx(expected)
    assert book["trained"] == [[1.1, 0.1, 40], [2.0, 0.2, 5]]


def test_a_histogram_is_spent_once_for_the_same_data_and_anew_for_others(tmp_path):
    account = Account(tmp_path, HOW)
    before = account.charge(0.1, 1, "data", 3)
    noise = account.noise_of("data")(3)
    assert np.array_equal(noise, Account(tmp_path, HOW).noise_of("data")(3))
    other = account.charge(0.1, 1, "other data", 3)
    assert other > before + 0.5
    assert not np.array_equal(noise, account.noise_of("other data")(3))
    assert np.array_equal(noise, account.noise_of("data")(3))
    assert account.charge(0.1, 1, "data", 3) < other + 0.5


def test_nothing_is_trained_beyond_the_budget(tmp_path):
    first = Account(tmp_path, HOW).charge(0.1, 20, "data", 3)
    content = (tmp_path / FILE).read_bytes()
    for budget in (Account(tmp_path, HOW, first + 0.01), Account(tmp_path, HOW, 0, first + 0.01)):
        with pytest.raises(RunError, match=r"the privacy budget is spent: this round would bring epsilon to \d"):
            budget.charge(0.1, 20, "data", 3)
        assert (tmp_path / FILE).read_bytes() == content
    with pytest.raises(RunError, match="guarantees nothing"):
        Account(tmp_path, SamplePrivacy(1.0, 0.0, 1e-5, 0.0), 100).charge(0.1, 20, "data", 3)


def test_a_plan_with_another_delta_does_not_stretch_a_nodes_own_budget(tmp_path):
    lax = SamplePrivacy(1.0, 1.1, 0.5, 0.0)
    at_our_delta = opacus((1.1, 0.1, 20))
    with pytest.raises(RunError, match=r"delta 1e-05\), and dp_budget in its node config"):
        Account(tmp_path, lax, own_budget=at_our_delta - 0.01).charge(0.1, 20, "data", 3)
    assert Account(tmp_path, lax, own_budget=at_our_delta + 0.01).charge(0.1, 20, "data", 3) < at_our_delta / 2


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"trained": 3, "histograms": {}}', '{"trained": [], '])
def test_a_damaged_account_is_not_begun_anew(content, tmp_path):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(RunError, match=FILE):
        Account(tmp_path, HOW).charge(0.1, 20, "data", 3)
    assert (tmp_path / FILE).read_text() == content


def test_a_changed_account_is_noticed(tmp_path):
    Account(tmp_path, HOW).charge(0.1, 20, "data", 3)
    path = tmp_path / FILE
    path.write_text(path.read_text().replace("20", "10", 1))
    with pytest.raises(RunError, match="do not match their checksum"):
        Account(tmp_path, HOW).charge(0.1, 20, "data", 3)


def test_trainings_at_the_same_time_are_all_entered(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: Account(tmp_path, HOW).charge(0.1, 1, "data", 3), range(12)))
    assert json.loads((tmp_path / FILE).read_text())["trained"] == [[1.1, 0.1, 12]]


def test_the_account_is_on_disk_before_anything_is_sent(tmp_path, monkeypatch):
    """A node that dies while it trains has paid; asked again, it pays again, because its noise is new."""
    plan, grid = federation(tmp_path, *DP)
    _, messages = asked(plan, grid)

    class Killed(Exception):
        pass

    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("cwfed.engine.private.PrivateWorker.gradients", die)
        with pytest.raises(Killed):
            grid.send_and_receive(messages[:1])
    (book,) = (path for path in (tmp_path / "state").rglob(FILE))
    ((_, rate, steps),) = json.loads(book.read_text())["trained"]
    _, (told,) = answers(grid, messages[:1])
    assert told["epsilon"] == pytest.approx(opacus((1.0, rate, 2 * steps)) + 10)


def test_a_federation_tells_epsilon_to_operators_and_in_its_summary(tmp_path, caplog):
    plan, grid = federation(tmp_path, *DP)
    with caplog.at_level(logging.WARNING, "cwfed.flower"):
        PersonalisedStrategy(plan).start(grid, out=tmp_path / "server")
    lines = [record.getMessage() for record in caplog.records if "epsilon" in record.getMessage()]
    assert len(lines) == 3 * CLIENTS
    assert lines[0].startswith("round 1: epsilon 1")
    spent = RunFolder(tmp_path / "server").summary()["privacy"]
    books = [json.loads(path.read_text())["epsilon"] for path in sorted((tmp_path / "state").rglob(FILE))]
    assert list(spent["per_client"].values()) == books
    assert spent["epsilon"] == max(books)
    assert "its own account" in spent["known"]


def test_who_has_spent_its_budget_takes_no_further_part_and_says_why(tmp_path):
    """Four rounds, and a budget that two of them fit into; a server that was started anew knows what was told before."""
    plan, grid = federation(tmp_path / "free", *DP, "train.rounds=2")
    PersonalisedStrategy(plan).start(grid, out=tmp_path / "server")
    enough = RunFolder(tmp_path / "server").summary()["privacy"]
    budget = f"privacy.dp_budget={enough['epsilon'] + 0.001}"
    plan, grid = federation(tmp_path / "tight", *DP, "train.rounds=4", budget)
    reached, events = carry_out(PersonalisedStrategy(plan), grid)
    rounds = [event for event in events if isinstance(event, Round)]
    assert [len(event.participants) for event in rounds[:2]] == [CLIENTS, CLIENTS]
    assert "privacy budget is spent" in next(iter(rounds[2].refused.values()))
    again = PersonalisedStrategy(plan)
    again.resume(reached)
    assert again._spent() == rounds[-1].spent
    assert max(rounds[-1].spent.epsilon.values()) <= enough["epsilon"] + 0.001


def test_a_node_with_a_budget_insists_on_differential_privacy(tmp_path):
    plan, grid = federation(tmp_path, dp_budget=3.0)
    with pytest.raises(RunError, match="trains without differential privacy"):
        carry_out(PersonalisedStrategy(plan), grid)
