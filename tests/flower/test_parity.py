"""The simulator and a federation give the same bits: every algorithm, through the real apps and node folders."""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="the extra flower is not installed")

from safetensors.torch import load_file

import cwfed
from cwfed.algorithms import ALGORITHMS, FedAvg
from cwfed.core.errors import ConfigError, RunError
from cwfed.core.events import Round
from cwfed.core.metrics import Metric, Own
from cwfed.federation import config as configs
from cwfed.federation.experiment import deal
from cwfed.federation.open_round import OpenRound
from cwfed.federation.rounds import SPOILS, from_tree, phase_result, to_tree
from cwfed.federation.simulation import Simulation
from cwfed.flower import PersonalisedStrategy, post, wire
from cwfed.flower.members import Hello
from cwfed.flower.ray_backend import SimulatedRun
from cwfed.flower.replies import read_score
from cwfed.flower.wire import BadMessage
from cwfed.privacy.noise import Seeded
from cwfed.report import drawing, figures, page
from cwfed.report.finished import read_run
from cwfed.report.groups import group as group_runs
from cwfed.runs import checkpoint, session
from cwfed.runs.folder import RunFolder
from tests.conftest import EARLY, finish, leaves, small
from tests.flower.helpers import Loopback, carry_out, plan_of

SEEN_BY_NO_SERVER = {
    "correlation": None,
    "distance": None,
    "portrait": None,
    "leaks": {},
    "spent": None,
    "seconds": {},
    "down_to_measure": 0,
}


WITHOUT_HISTOGRAMS = {"metrics": {}, "validation_metrics": {}, "client_metrics": {}, "classes": None}
"""Then metrics over all are means of the clients'."""


def as_a_server_sees_it(event: Round, unseen=WITHOUT_HISTOGRAMS) -> Round:
    plainly = {
        phase: found and replace(found, clients=None, samples=None, **unseen)
        for phase in ("received", "trained")
        for found in [getattr(event, phase)]
    }
    return replace(event, **SEEN_BY_NO_SERVER, **plainly)


def settings(name: str, *more: str):
    return small(f"algorithm.name={name}", "run.engine=loop", "train.rounds=4", "data.samples=300", *more)


def federate(config, folder, **federation):
    plan = plan_of(config, config.data.clients, clients=config.data.clients, **federation)
    grid = Loopback(plan, folder)
    for client in range(config.data.clients):
        grid.join(client)
    return plan, grid


def assert_same_bits(config, folder, hear=lambda _: None, **untold):
    plan, grid = federate(config, folder)
    grid.change = lambda _, reply: hear(reply) or reply
    reached, events = carry_out(PersonalisedStrategy(plan), grid)
    simulated, expected = finish(Simulation(config))
    assert leaves(reached.server) == leaves(simulated.server)
    rounds = [as_a_server_sees_it(e) for e in events if isinstance(e, Round)]
    assert rounds == [replace(as_a_server_sees_it(e), **untold) for e in expected]


@pytest.mark.parametrize("name", [*ALGORITHMS, "cwfedavg+head_first+offset+prior", "fedavg+balanced+owners"])
def test_a_federation_gives_the_simulators_bits(name, tmp_path):
    config = settings(name, "train.participation=0.5", "train.client_dropout=0.2", "run.evaluate_every=2")
    assert_same_bits(config, tmp_path)


@pytest.mark.parametrize("name", ["cwfedavg", "ifca", "fednh"])
def test_a_federation_between_processes_gives_the_simulators_bits(name, tmp_path, monkeypatch):
    """There messages travel in pieces."""
    monkeypatch.setattr(post, "HttpGrid", Loopback)
    monkeypatch.setattr(wire, "PIECE", 1000)
    rung, heard = [], []
    monkeypatch.setattr(post.bell, "ring", rung.append)
    config = settings(name, "train.rounds=2")
    assert_same_bits(config, tmp_path, heard.append)
    kinds = {
        kind: {wire.is_wrapped(m.content) for m in heard if m.metadata.message_type == kind}
        for kind in ("query", "train", "evaluate")
    }
    assert kinds == {"query": {False}, "train": {True}, "evaluate": {False}}, "what has numbers, and nothing else"
    assert set(rung) == {"messages"}
    assert len(rung) >= 4, "after each round of messages"


def hits(logits, labels):
    """Right answers among the best three, and samples."""
    return torch.stack([(logits.topk(3).indices == labels[:, None]).any(1).sum(), torch.tensor(len(labels))])


top3 = Metric(hits, lambda sums: sums[0] / sums[1])


@pytest.mark.parametrize("name", ["cwfedavg", "fedavg-ft"])
def test_with_histograms_told_all_metrics_and_the_last_round_are_the_simulators(name, tmp_path):
    few = ("data.samples=400", "data.clients=3", "model.options.hidden=8", "train.rounds=8", "train.lr=1.0")
    config = settings(name, *few, "run.patience=1", "run.pick=macro_f1", f'run.metrics=["{__name__}:top3"]')
    plan, grid = federate(config, tmp_path, keep="last")
    for client in range(config.data.clients):
        grid.join(client, histogram=True)
    _, events = carry_out(PersonalisedStrategy(plan), grid)
    rounds = [as_a_server_sees_it(e, {}) for e in events if isinstance(e, Round)]
    _, expected = finish(Simulation(config))
    assert rounds == [as_a_server_sees_it(e, {}) for e in expected]
    assert 2 < len(rounds) < 8
    assert "run.patience" in rounds[-1].stopped
    assert "top3" in rounds[-1].received.client_metrics
    saved = [path.parent.parent.parent.name for path in (tmp_path / "state").rglob("models/index.json")]
    assert sorted(saved) == [f"client-{c:03d}" for c in range(config.data.clients)]  # where it stopped


def test_without_histograms_metrics_are_means_of_the_clients(tmp_path):
    config = settings("fedavg", "train.rounds=1", "data.clients=3", f'run.metrics=["{__name__}:top3"]')
    plan, grid = federate(config, tmp_path)
    said = []
    grid.change = lambda _, answer: said.append(set(answer.content["metrics"])) or answer
    _, (*_, event) = carry_out(PersonalisedStrategy(plan), grid)
    _, (expected,) = finish(Simulation(config))
    assert any("received-test-macro_f1" in keys for keys in said)
    assert not any("sums" in key for keys in said for key in keys)
    for mine, theirs in ((event.received, expected.received), (event.trained, expected.trained)):
        assert mine.classes is None
        assert mine.client_metrics["macro_f1"] == theirs.client_metrics["macro_f1"]
        assert mine.client_metrics["top3"] == theirs.client_metrics["top3"]
        values, samples = np.array(theirs.client_metrics["macro_f1"]), np.array(mine.samples)
        assert mine.metrics["macro_f1"] == pytest.approx((values * samples).sum() / samples.sum())
        assert mine.metrics["top3"] == pytest.approx(theirs.metrics["top3"])  # a share of samples: the mean is exact


@pytest.mark.parametrize(
    ("key", "lie", "why"),
    [
        ("trained-test-sums-per class", [1.0], "must have 40 numbers"),
        ("trained-test-sums-per class", [float("nan")] * 40, "not possible"),
        ("trained-test-sums-per class", [1e101] * 40, "not possible"),
        ("trained-test-sums-per class", [0.5] * 40, "do not fit"),
        ("trained-test-sums-per class", [0.0] * 40, "do not fit"),
        ("trained-held-out-sums-per class", [10**400] * 40, "not possible"),
        ("trained-test-macro_f1", 1.5, "not possible"),
        ("trained-held-out-loss", -1.0, "not possible"),
        ("trained-held-out-loss", 1.7e308, "not possible"),
        ("trained-test-balanced_accuracy", [0.5], "not possible"),
        ("trained-test-top3", float("inf"), "not possible"),
    ],
)
def test_impossible_measurements_are_refused(key, lie, why):
    hello = Hello(1, "a", "1", "1.0", 10, "1x8x8", 0, "x", "", samples=30, test=5, validation=2)
    honest = {"trained-right": 3, "trained-loss": 1.5, "trained-validation": 2, "trained-test-sums-top3": [4.0, 5.0]}
    told = {"metrics": {**honest, key: lie}}
    content = SimpleNamespace(metric_records=told)
    own = (Own("top3", top3, (2,)),)
    assert read_score(hello, "trained", SimpleNamespace(metric_records={"metrics": honest}), own).test_right == 3
    with pytest.raises(BadMessage, match=why):
        read_score(hello, "trained", content, own)


def test_a_loss_that_is_very_large_is_a_measurement():
    """What an honest node finds of a model that others have spoilt: losses are computed in float32, so up to 3e38 a sample."""
    hello = Hello(1, "a", "1", "1.0", 2, "1x8x8", 0, "x", "", samples=30, test=5, validation=0)
    table = np.array(
        [[5.0, 0.0], [3.0, 0.0], [5.0, 0.0], [1.5e39, 0.0]]
    )  # samples, right, predicted, loss of each class
    told = {"trained-right": 3, "trained-loss": 1.5e39, "trained-validation": 0}
    told |= {"trained-test-sums-per class": table.ravel().tolist()}
    found = read_score(hello, "trained", SimpleNamespace(metric_records={"metrics": told}))
    assert phase_result([found], [5], [0]).loss == 3e38


@pytest.mark.parametrize(
    "privacy",
    [
        ["privacy.norms=noise"],
        ["privacy.dp=sample", "privacy.dp_histogram=10.0", "train.lr=0.01"],
        ["guard.norm_bound=0.5"],
    ],
    ids=["dial", "dp", "bound"],
)
def test_clients_blur_their_uploads_and_servers_bound_them_as_in_the_simulator(privacy, tmp_path, monkeypatch):
    """But for the noise, which is a node's own: here it is the simulator's, so that the rest can be compared."""
    config = settings("cwfedavg", *privacy)
    monkeypatch.setattr("cwfed.flower.site.node_noise", lambda *_: Seeded(config.run.seed))
    assert_same_bits(config, tmp_path, **({"loss": None, "client_loss": []} if config.privacy.dp != "off" else {}))


@dataclass(frozen=True)
class Divides(FedAvg):
    """A user's algorithm that divides by what it is sent."""

    def aggregate(self, state, up):
        lengths = up.models["output.weight"][:, 0].norm(dim=1)
        return super().aggregate(state, up) | {"scale": (1 / lengths).mean()}


def test_who_makes_the_state_infinite_is_refused_on_both_sides(tmp_path):
    """One client sends a row of zeros: fine by itself, and nothing that this algorithm can aggregate."""
    config = settings(f"{__name__}:Divides", "adversary.clients=1", "adversary.strength=0")
    simulation = Simulation(config)
    ((bad, adversary),) = simulation.adversaries.items()
    simulated, expected = finish(simulation)
    plan, grid = federate(config, tmp_path)
    nodes = list(grid.nodes)

    def tamper(node, reply):
        if node == nodes[bad] and "model" in reply.content:
            trained = wire.from_record(reply.content.array_records["model"], "it")
            reply.content["model"] = wire.to_record(adversary.tamper(trained, "output.weight"))
        return reply

    grid.change = tamper
    reached, events = carry_out(PersonalisedStrategy(plan), grid)
    assert leaves(reached.server) == leaves(simulated.server)
    rounds = [event for event in events if isinstance(event, Round)]
    assert [e.refused for e in rounds] == [e.refused for e in expected] == [{str(bad): SPOILS}] * 4
    assert [e.participants for e in rounds] == [e.participants for e in expected]


def test_clients_smaller_than_a_batch_take_part_in_both(tmp_path):
    config = settings("cwfedavg", "data.samples=200", "data.partition=dirichlet", "train.batch_size=30")
    sizes = [len(shard.train) for shard in deal(config).shards.values()]
    assert min(sizes) < 30 < max(sizes)
    assert_same_bits(config, tmp_path)


def refuse(opened, updates, models):
    """A server that refuses a client in round 2."""
    return {1: "as told"} if opened.number == 2 else {}


@pytest.mark.parametrize(
    ("answer", "chosen"),
    [
        ("refused", ["algorithm.name=fedfomo"]),
        ("late", ["algorithm.name=fedavg-ft", "run.evaluate_every=2"]),
        ("refused", ["algorithm.name=fedavg-ft", "guard.least=6"]),  # then nobody's counts
        (
            "late",
            ["model.name=resnet18", "model.options={width=4}", "data.samples=90", "data.clients=3", "train.rounds=3"],
        ),
    ],
    ids=["its model", "measured later", "a round that was skipped", "running statistics"],
)
def test_a_client_that_was_refused_or_late_goes_on_from_its_old_state(answer, chosen, tmp_path, monkeypatch):
    config = small("run.engine=loop", "train.rounds=4", "train.batch_norm=local", *chosen)
    plan, grid = federate(config, tmp_path)

    def change(node, reply):
        told = grid.told[int(reply.metadata.reply_to_message_id)]
        about = told.content.config_records.get("told", {})
        if told.metadata.message_type != "train" or (about["client"], about["round"]) != (1, 2):
            return reply
        reply.content["metrics"]["loss"] = float("nan")
        return reply if answer == "refused" else None

    grid.change = change
    reached, events = carry_out(PersonalisedStrategy(plan), grid)
    monkeypatch.setattr(OpenRound, "problems", refuse)
    simulated, expected = finish(Simulation(config))
    assert leaves(reached.server) == leaves(simulated.server)
    rounds = [as_a_server_sees_it(e) for e in events if isinstance(e, Round)]
    assert [e.client_loss for e in rounds] == [e.client_loss for e in expected]
    assert [e.participants for e in rounds] == [e.participants for e in expected]
    for phase in ("received", "trained"):
        assert [getattr(e, phase) for e in rounds] == [getattr(as_a_server_sees_it(e), phase) for e in expected]


@pytest.mark.parametrize("name", ["cwfedavg", "fedavg-ft", "fedfomo"])
def test_a_server_that_was_killed_goes_on_with_the_same_bits(name, tmp_path):
    """What clients keep is on their disks; the server's checkpoint of round 2 is all it has."""
    config = settings(name)
    plan, grid = federate(config, tmp_path / "whole")
    whole, _ = carry_out(PersonalisedStrategy(plan), grid)

    plan, grid = federate(config, tmp_path / "killed")
    saved = None
    for progress, event in PersonalisedStrategy(plan).rounds(grid, PersonalisedStrategy(plan).first()):
        if isinstance(event, Round) and event.round == 2:
            saved = to_tree(progress)
        if isinstance(event, Round) and event.round == 3:
            break  # killed before the checkpoint of round 3: the clients have trained in it already
    checkpoint.save(tmp_path / "server.safetensors", saved)
    resumed, _ = carry_out(
        PersonalisedStrategy(plan), grid, from_tree(checkpoint.load(tmp_path / "server.safetensors"))
    )
    assert leaves(resumed.server) == leaves(whole.server)


def test_running_statistics_stay_with_the_client(tmp_path):
    options = ["data.clients=3", "data.samples=200", "train.batch_norm=local", "train.rounds=2", "train.lr=0.05"]
    config = configs.load(None, ["model.name=resnet18", "model.options.width=4", "run.engine=loop", *options])
    plan, grid = federate(config, tmp_path)
    reached, events = carry_out(PersonalisedStrategy(plan), grid)
    simulated, expected = finish(Simulation(config))
    assert leaves(reached.server) == leaves(simulated.server)
    assert events[-1].received.accuracy == expected[-1].received.accuracy


def test_the_personal_model_is_on_the_clients_disk_and_loads(tmp_path):
    config = settings("cwfedavg")
    plan, grid = federate(config, tmp_path)
    reached, _ = carry_out(PersonalisedStrategy(plan), grid)
    summary = session.run(config, tmp_path / "run")
    assert summary["rounds"] == 4
    index = json.loads((tmp_path / "run" / "models" / "index.json").read_text())
    for client in range(config.data.clients):
        folder = tmp_path / "state" / f"client-{client:03d}" / reached.peers["run"]
        theirs = load_file(folder / "models" / f"client-{client:05d}.safetensors")
        ours = load_file(tmp_path / "run" / "models" / index[str(client)])
        assert all(torch.equal(theirs[name], ours[name]) for name in ours)
        assert cwfed.load_model(folder, client=client).class_names == tuple("0123456789")


def test_another_federation_with_the_same_settings_begins_anew_and_leaves_the_models_of_the_first(tmp_path):
    """On the same nodes, with the same state folders: what is kept belongs to one federation."""
    plan, grid = federate(settings("fedavg-ft"), tmp_path)
    first, _ = carry_out(PersonalisedStrategy(plan), grid)
    state = tmp_path / "state"
    models = {path: path.read_bytes() for path in state.rglob("models/*")}
    assert len(models) == 2 * 6
    strategy = PersonalisedStrategy(plan)
    for _, event in strategy.rounds(grid, strategy.first()):
        if isinstance(event, Round) and event.round == 1:
            break  # a short trial
    assert {path: path.read_bytes() for path in models} == models
    again, _ = carry_out(PersonalisedStrategy(plan), grid)
    assert leaves(again.server) == leaves(first.server)
    assert len(list((state / "client-000").iterdir())) == 3


@pytest.mark.parametrize("more", [[], ["guard.least=6", "train.client_dropout=0.5"]], ids=["a run", "nobody counts"])
def test_who_has_all_data_completes_the_events_to_the_simulators(more, tmp_path):
    """As on Ray, without Ray: leaks, the correlation with the true distributions, the portrait at the end."""
    config = settings("cwfedavg", "train.rounds=2", *more)
    plan, grid = federate(config, tmp_path)
    for client in range(config.data.clients):
        grid.join(client, histogram=True)
    run = SimulatedRun(Simulation(config), PersonalisedStrategy(plan), grid, tmp_path / "clients")
    found = [event for _, event in run.rounds(run.start())]
    run.close()
    _, expected = finish(Simulation(config))
    for event, other in zip(found, expected, strict=True):
        assert replace(event, seconds={}, down_to_measure=0, at="") == replace(other, seconds={})
    assert expected[-1].portrait is not None
    assert bool(expected[-1].leaks) is not bool(more)


@pytest.mark.federation
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # Ray's
@pytest.mark.parametrize("name", ["fedavg", "cwfedavg", "fedrep", "fednh", "ifca", "fedfomo"])
def test_flowers_simulation_engine_gives_the_simulators_bits(name, tmp_path):
    """The real thing: Ray's actors, `cwfed run --backend flower`; the folder is the simulator's, but for times."""
    few = ("data.clients=11", "data.newcomers=1", "train.participation=0.8", "train.client_dropout=0.1")
    config = settings(name, *few, "train.rounds=2", "run.evaluate_every=2", "data.samples=500")
    session.run(config, tmp_path / "ours")
    cwfed.run(config, tmp_path / "flower", backend="flower")
    ours, theirs = (
        [json.loads(line) for line in (tmp_path / side / "events.jsonl").read_text().splitlines()]
        for side in ("ours", "flower")
    )
    for mine, its in zip(ours, theirs, strict=True):
        different = {key for key in mine if mine[key] != its[key]}
        assert different <= {"seconds", "engine", "down_to_measure"}
    ours, theirs = (saved_models(tmp_path / side / "models") for side in ("ours", "flower"))
    assert ours == theirs


def saved_models(folder):
    """The files of the last round and of the round that validation picked."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.federation
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # Ray's
def test_on_flower_too_the_models_that_validation_picked_are_saved(tmp_path):
    """In an algorithm whose clients keep their models: by the end they have thrown those of that round away."""
    config = small(*EARLY, "algorithm.name=fedavg-ft", "data.clients=4", "run.engine=loop")
    summary = session.run(config, tmp_path / "ours")
    assert summary["picked_rounds"]["trained"]["validated"] <= 4
    cwfed.run(config, tmp_path / "flower", backend="flower")
    assert (tmp_path / "flower" / "models" / "validated" / "index.json").exists()
    assert saved_models(tmp_path / "flower" / "models") == saved_models(tmp_path / "ours" / "models")


def test_the_servers_folder_has_metrics_and_checkpoints_and_can_be_reported(tmp_path):
    plan, grid = federate(settings("cwfedavg"), tmp_path)
    result = PersonalisedStrategy(plan).start(grid, out=tmp_path / "server")
    assert set(result.evaluate_metrics_clientapp) == {1, 2, 3, 4}
    files = {path.name for path in (tmp_path / "server").iterdir() if not path.name.startswith(".")}
    assert files == {"config.toml", "manifest.json", "events.jsonl", "summary.json", "checkpoints"}
    assert RunFolder(tmp_path / "server").checkpoints.rounds() == [4, 3, 2, 1, 0]
    assert stat.S_IMODE((tmp_path / "server").stat().st_mode) == 0o700, "the models can be made from the checkpoints"

    record = read_run(tmp_path / "server")
    assert record.histogram.size == 0
    (group,) = group_runs([record])
    assert group.title == "federation, samples of 1x8x8, 10 classes, mlp"
    page.write(tmp_path / "report.html", group.title, [group])
    drawing.save(figures.overview(group), tmp_path / "overview")

    with pytest.raises(ConfigError, match=r"the rounds are train\.rounds"):
        PersonalisedStrategy(plan).start(grid, num_rounds=7, out=tmp_path / "server")
    with pytest.raises(RunError, match="holds a finished run of 4 rounds"):
        PersonalisedStrategy(plan).start(grid, out=tmp_path / "server")
    longer = settings("cwfedavg", "train.rounds=5")
    PersonalisedStrategy(federate(longer, tmp_path)[0]).start(grid, out=tmp_path / "server")
    simulated, _ = finish(Simulation(longer))
    tree, _ = RunFolder(tmp_path / "server").checkpoints.newest()
    assert leaves(tree["server"]) == leaves(simulated.server)
