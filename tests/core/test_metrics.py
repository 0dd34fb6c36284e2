"""Metrics: by hand, against scikit-learn, on every engine; the user's own; picking and early stopping by them."""

from __future__ import annotations

import json
from dataclasses import replace
from warnings import catch_warnings, simplefilter

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score, log_loss, precision_score, recall_score

from cwfed.core import metrics
from cwfed.core.errors import ConfigError, RunError
from cwfed.core.events import Note, PerClass, PhaseResult, Round, Started
from cwfed.core.metrics import BUILT_IN, PER_CLASS, Metric, OwnSums, Places, Tally
from cwfed.federation.rounds import from_tree, to_tree
from cwfed.federation.simulation import Simulation
from cwfed.report import figures, page, tables
from cwfed.report.finished import collect, read_run
from cwfed.report.groups import Group, Method
from cwfed.runs import checkpoint, session, track
from cwfed.runs.folder import RunFolder
from cwfed.runs.summary import summarise
from tests.conftest import finish, leaves, small, without_seconds, worker_of

LITTLE = ("data.samples=600", "data.clients=4", "model.options.hidden=8")
OWN = f'run.metrics=["{__name__}:top2"]'


def hits(logits, labels):
    """Right answers among the best two, and samples."""
    return torch.stack([(logits.topk(2).indices == labels[:, None]).any(1).sum(), torch.tensor(len(labels))])


top2 = Metric(hits, lambda sums: sums[0] / sums[1])
brier = Metric(
    lambda logits, labels: torch.stack(
        [
            (logits.softmax(1) - torch.nn.functional.one_hot(labels, logits.shape[1])).square().sum(),
            torch.tensor(float(len(labels))),
        ]
    ),
    lambda sums: sums[0] / sums[1],
    lower_is_better=True,
)


# --- by hand


def test_the_metrics_of_six_answers_by_hand():
    """Class 0 has 3 samples and two right, class 1 two and one right, class 2 one and none; 3 has none, 4 is only said."""
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    predicted = torch.tensor([0, 0, 1, 1, 4, 0])
    logits = torch.full((6, 5), -50.0)
    logits[torch.arange(6), predicted] = 50.0  # right: no loss at all; wrong: 100
    table = metrics.per_class(logits, labels).numpy()
    assert table.tolist() == [[3, 2, 1, 0, 0], [2, 1, 0, 0, 0], [3, 2, 0, 0, 1], [100, 100, 100, 0, 0]]
    assert metrics.accuracy(table) == 3 / 6
    assert metrics.balanced_accuracy(table) == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)
    # F1: 2*2/(3+3), 2*1/(2+2), 0, (class 3 is neither there nor said), 0
    assert metrics.macro_f1(table) == pytest.approx((2 / 3 + 1 / 2 + 0 + 0) / 4)
    assert metrics.loss(table) == 300 / 6
    assert np.nan_to_num(metrics.recall(table), nan=-1).tolist() == [2 / 3, 1 / 2, 0, -1, -1]
    assert np.nan_to_num(metrics.class_loss(table), nan=-1).tolist() == [100 / 3, 50, 100, -1, -1]


def test_of_no_samples_nothing_is_known():
    table = np.zeros((4, 3))
    assert [metric.values(table[None]) for metric in BUILT_IN.values()] == [[None]] * 4
    found = metrics.numbers([Tally(0, 0.0, {PER_CLASS: table})], [0])
    assert set(found.over_all.values()) == {None}
    assert found.clients["macro_f1"] == [None]


# --- scikit-learn, the slow twin


@pytest.mark.parametrize("seed", range(8))
def test_the_metrics_are_scikit_learns_also_where_classes_are_absent(seed):
    rng = np.random.default_rng(seed)
    samples, classes = int(rng.integers(1, 40)), int(rng.integers(2, 12))
    logits = torch.from_numpy(rng.normal(size=(samples, classes))).float()
    held = rng.choice(classes, size=max(1, classes // 2), replace=False)  # the others are absent
    labels = torch.from_numpy(rng.choice(held, size=samples))
    predicted = logits.argmax(1)
    table = metrics.per_class(logits, labels).numpy()
    with catch_warnings():
        simplefilter("ignore")  # scikit-learn warns of absent classes
        assert metrics.balanced_accuracy(table) == pytest.approx(balanced_accuracy_score(labels, predicted))
        assert metrics.macro_f1(table) == pytest.approx(f1_score(labels, predicted, average="macro"))
        every = {"average": None, "labels": range(classes), "zero_division": np.nan}
        assert metrics.recall(table) == pytest.approx(recall_score(labels, predicted, **every), nan_ok=True)
        assert metrics.precision(table) == pytest.approx(precision_score(labels, predicted, **every), nan_ok=True)
        assert metrics.f1(table) == pytest.approx(f1_score(labels, predicted, **every), nan_ok=True)
    shares = logits.double().softmax(1).numpy()
    assert metrics.loss(table) == pytest.approx(log_loss(labels, shares, labels=range(classes)), rel=1e-5)


def test_the_numbers_of_a_run_are_scikit_learns():
    """What an event says of the models on receipt, against the same models asked one by one."""
    simulation = Simulation(small(*LITTLE, "data.classes_per_client=4", "run.engine=vmap", "train.rounds=2"))
    *_, (progress, event) = simulation.rounds(simulation.start())
    worker, data = worker_of(simulation), simulation.federation.data
    said, true = [], []
    for client in simulation.evaluated:
        test = simulation.federation.shards[client].test
        worker.load(simulation.final_model(progress, client))
        said.append(worker.answers(test).predicted)
        true.append(data.labels[test])
    simulation.close()
    every, labels = np.concatenate(said), np.concatenate(true)
    found = event.received
    assert found.metrics["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, every))
    assert found.metrics["macro_f1"] == pytest.approx(f1_score(labels, every, average="macro"))
    assert found.classes.predicted == np.bincount(every, minlength=10).tolist()
    assert found.classes.right == np.bincount(labels[labels == every], minlength=10).tolist()
    with catch_warnings():
        simplefilter("ignore")
        for i in range(len(said)):
            assert found.client_metrics["balanced_accuracy"][i] == pytest.approx(
                balanced_accuracy_score(true[i], said[i])
            )
            assert found.client_metrics["macro_f1"][i] == pytest.approx(f1_score(true[i], said[i], average="macro"))


# --- counting


def test_what_is_counted_at_once_is_what_is_counted_part_by_part():
    rng = np.random.default_rng(3)
    labels, part = rng.integers(5, size=60), rng.integers(4, size=60)  # part 3 is not counted
    logits = torch.from_numpy(rng.normal(size=(60, 5))).float()
    predicted = logits.argmax(1).numpy()
    lost = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels), reduction="none").double().numpy()
    tables = Places(labels, part, 3, 5).count(predicted, predicted == labels, lost)
    for i in range(3):
        own = torch.from_numpy(np.flatnonzero(part == i))
        assert tables[i] == pytest.approx(metrics.per_class(logits[own], torch.from_numpy(labels)[own]).numpy())


@pytest.mark.parametrize("name", ["fedavg", "cwfedavg", "local"])
def test_every_engine_counts_the_same(name):
    """Threads to the bit; vmap to the last digits of the losses. Batches are cut where they are for a shared model."""
    more = [*LITTLE, f"algorithm.name={name}", OWN, "data.classes_per_client=3", "train.rounds=2"]
    loop, threads, vmap = (
        finish(Simulation(small(*more, f"run.engine={engine}", "run.workers=3")))[1]
        for engine in ("loop", "threads", "vmap")
    )
    for a, b, c in zip(loop, threads, vmap, strict=True):
        for phase in ("received", "trained"):
            one, two, three = (getattr(event, phase) for event in (a, b, c))
            assert one == two
            assert (one.classes.samples, one.classes.right) == (three.classes.samples, three.classes.right)
            assert one.classes.predicted == three.classes.predicted
            assert one.metrics == pytest.approx(three.metrics)
            assert one.validation_metrics == pytest.approx(three.validation_metrics, rel=1e-4)
            assert one.classes.loss == pytest.approx(three.classes.loss, rel=1e-4)
            for key in ("balanced_accuracy", "macro_f1", "loss", "top2"):
                assert one.client_metrics[key] == pytest.approx(three.client_metrics[key], rel=1e-4)


def test_batches_may_end_anywhere(monkeypatch):
    """An own metric sees every sample of a part once, however parts and batches lie to each other."""
    many = ("data.clients=40", "train.rounds=1", "model.options.hidden=8")
    whole = finish(Simulation(small(OWN, *many, "algorithm.name=fedavg", "run.engine=loop")))[1]
    monkeypatch.setattr("cwfed.engine.loaded_network.EVALUATION_BATCH", 7)
    monkeypatch.setattr("cwfed.engine.questions.MEASURED", 100)
    for engine in ("loop", "vmap"):
        name = "fedavg" if engine == "loop" else "fedavg-ft"
        settings = [OWN, *many, f"algorithm.name={name}", f"run.engine={engine}"]
        cut = finish(Simulation(small(*settings)))[1]
        assert cut[-1].trained.client_metrics["top2"] == whole[-1].trained.client_metrics["top2"]
        assert cut[-1].trained.validation_metrics["top2"] == whole[-1].trained.validation_metrics["top2"]


# --- the user's own


def test_an_own_metric_is_measured_everywhere(tmp_path):
    summary = session.run(small(OWN, *LITTLE), tmp_path / "run")
    assert 0.5 < summary["metrics"]["received"]["top2"]["best"] <= 1
    assert set(summary["per_client"]["metrics"]) == {"balanced_accuracy", "macro_f1", "loss", "top2"}
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["code"] is not None
    record = read_run(tmp_path / "run")
    method = Method("own", [record])
    assert tables.header([method.row])[5:8] == ("balanced accuracy", "macro F1", "top2")
    assert len(tables.cells(method.row, ["balanced_accuracy", "macro_f1", "top2"])) == len(
        tables.header([method.row])
    )
    assert "top2,top2_std" in tables.csv([method.row])
    group = Group("own", [method])
    page.write(tmp_path / "page.html", "own", [group])
    text = (tmp_path / "page.html").read_text()
    assert '<option value="top2">' in text
    assert "data-plot=classes" in text
    assert {"balanced-accuracy", "macro-f1", "classes"} <= figures.everything(group).keys()
    assert method.series("top2").y == [event.received.metrics["top2"] for event in record.rounds]


def means(logits, labels):
    return (logits.argmax(1) == labels).double().mean()[None]


bad_means = Metric(means, lambda sums: sums[0])
bad_shape = Metric(lambda logits, labels: logits[:, 0], lambda sums: sums[0])
bad_sums = Metric(lambda logits, labels: logits.sum(0) / 0, lambda sums: sums[0])
bad_kind = Metric(lambda logits, labels: 3.0, lambda sums: sums)
bad_code = Metric(lambda logits, labels: logits[99], lambda sums: sums)
bad_value = Metric(hits, lambda sums: sums.tolist())
bad_nan = Metric(hits, lambda sums: float("nan"))
bad_size = Metric(lambda logits, labels: torch.zeros(20_000), lambda sums: 0.0)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bad_means", "does not add up: it gives .* for 24 samples, .* for two parts of them; give sums, not means"),
        ("bad_shape", r"does not add up: its sums have the shape \(24,\) for 24 samples and \(9,\) for 9"),
        ("bad_sums", "sums that are not finite numbers"),
        ("bad_kind", "must give its sums as a tensor, it gives a float"),
        ("bad_code", r"cannot be measured \(IndexError"),
        ("bad_value", r"makes no number of its sums \(TypeError"),
        ("bad_nan", "makes nan of its sums"),
        ("bad_size", "has 20000 sums"),
        ("hits", r"must be a cwfed\.Metric\(sums, value\), it is a function"),
        ("nothing", "has no 'nothing'"),
    ],
)
def test_a_metric_that_does_not_add_up_is_an_error_before_round_1(name, why):
    with pytest.raises(ConfigError, match=why) as found:
        Simulation(small(f'run.metrics=["{__name__}:{name}"]'))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("run.pick=balanced", "run.pick = 'balanced' is not a metric of this run: .*balanced_accuracy"),
        ("run.pick=top2", "run.pick = 'top2' is not a metric"),
        ('run.metrics=["recall"]', '"module:name"'),
        ('run.metrics=["a:loss"]', "two metrics are called 'loss'"),
        ('run.metrics=["a:b", "c:b"]', "two metrics are called 'b'"),
        ("run.patience=-1", "run.patience"),
    ],
)
def test_settings_that_are_not_possible(setting, why):
    with pytest.raises(ConfigError, match=why):
        small(setting)


def test_a_metric_that_fails_in_a_run_says_so():
    own = OwnSums([metrics.Own("top2", top2, (2,))], 1)
    with pytest.raises(RunError, match="the metric 'top2' failed"):
        own.add(0, torch.zeros(2, 1), torch.zeros(2, dtype=torch.long))
    assert top2.values(np.zeros((1, 2))) == [None]  # 0 / 0
    zero = Metric(hits, lambda sums: 1 / int(sums[1]))
    assert zero.values(np.array([[0.0, 2.0], [0.0, 0.0]])) == [0.5, None]


# --- picking


STARTED = Started("cwfedavg", "digits", 3, 3, 2, 10, 100, "received", [0, 1], [10, 40])


def round_(number, **fields):
    base = {"accuracy": 0.5, "validation": 0.5, "loss": 1.0, "right": [5, 20]}
    result = PhaseResult(**base | fields)
    return Round(number, [0, 1], [], 1.0, 0.0, [1.0, 1.0], None, None, result, result, 1, 1)


def test_picking_by_each_metric_by_hand():
    rounds = [
        round_(
            1, accuracy=0.9, metrics={"macro_f1": 0.1, "own": 3.0}, validation_metrics={"macro_f1": 0.3, "own": 2.0}
        ),
        round_(
            2, accuracy=0.8, metrics={"macro_f1": 0.2, "own": 2.0}, validation_metrics={"macro_f1": 0.3, "own": 1.0}
        ),
        round_(
            3, accuracy=0.7, metrics={"macro_f1": 0.1, "own": 4.0}, validation_metrics={"macro_f1": None}, loss=0.5
        ),
    ]

    def picked(**fields):
        return summarise([replace(STARTED, **fields), *rounds])["picked_rounds"]["received"]

    assert picked() == {"best": 1, "validated": 1, "last": 3}
    assert picked(pick="macro_f1") == {"best": 2, "validated": 1, "last": 3}  # the first of equals
    assert picked(pick="own") == {"best": 3, "validated": 1, "last": 3}
    assert picked(pick="own", lower_is_better=["own"]) == {"best": 2, "validated": 2, "last": 3}
    assert picked(pick="loss") == {"best": 3, "validated": None, "last": 3}
    summary = summarise([replace(STARTED, pick="macro_f1"), *rounds])
    assert summary["reported"] == {
        "accuracy": 0.8, "phase": "received", "picking": "best", "round": 2, "metric": "macro_f1", "value": 0.2,
    }  # fmt: skip
    assert summary["metrics"]["received"]["macro_f1"] == {"best": 0.2, "validated": 0.1, "last": 0.1}


def test_the_saved_models_are_those_of_the_picked_round(tmp_path):
    """Loss on held-out data picks another round than accuracy does, and its models are what load_model gives."""
    config = small(
        *LITTLE,
        "train.rounds=6",
        "train.lr=0.2",
        "run.pick=loss",
        "algorithm.name=local",
        "data.classes_per_client=4",
    )
    summary = session.run(config, tmp_path / "run")
    losses = {e.round: e.trained.validation_metrics["loss"] for e in read_run(tmp_path / "run").rounds}
    picked = min(losses, key=losses.get)
    assert summary["picked_rounds"]["trained"]["validated"] == picked
    assert json.loads((tmp_path / "run" / "models" / "rounds.json").read_text())["validated"] == picked


def test_the_summary_of_classes_and_clients_by_hand():
    classes = PerClass([4, 0, 2], [3, 0, 1], [4, 1, 1], [2.0, 0.0, None])
    first = round_(1, classes=classes, metrics={"macro_f1": 0.5},
                   client_metrics={"loss": [0.5, 2.0], "macro_f1": [0.5, None]})  # fmt: skip
    summary = summarise([STARTED, first])
    assert summary["per_class"] == {
        "samples": [4, 0, 2], "recall": [0.75, None, 0.5], "precision": [0.75, 0.0, 1.0],
        "f1": [0.75, 0.0, pytest.approx(2 / 3)], "loss": [0.5, None, None],
    }  # fmt: skip
    assert summary["per_client"]["metrics"] == {
        "loss": {"mean": 1.25, "std": 0.75, "worst_decile": 2.0, "values": {"0": 0.5, "1": 2.0}},
        "macro_f1": {"mean": 0.5, "std": 0.0, "worst_decile": 0.5, "values": {"0": 0.5}},
    }


def test_trackers_get_all_metrics():
    event = round_(2, metrics={"macro_f1": 0.25}, validation_metrics={"loss": 0.75},
                   classes=PerClass([2, 0], [1, 0], [2, 0], [1.0, 0.0]))  # fmt: skip
    found = track.scalars(event, 1, 1)
    assert found["macro_f1/received"] == found["macro_f1/trained"] == 0.25
    assert found["validation_loss/received"] == 0.75
    assert (found["recall/received/0"], "recall/received/1" in found) == (0.5, False)
    many = replace(event.received, classes=PerClass([1] * 21, [1] * 21, [1] * 21, [0.0] * 21))
    assert not any(
        name.startswith("recall") for name in track.scalars(replace(event, received=many, trained=None), 1, 1)
    )


# --- early stopping

PATIENT = (
    *LITTLE,
    "train.rounds=12",
    "train.lr=0.1",
    "run.evaluate_every=2",
    "run.patience=2",
    "algorithm.name=fedavg-ft",
    "run.engine=loop",
)


def stops_at(events, patience):
    """By hand: the first evaluated round that is the patience-th in a row without a new best."""
    best, waited = -1.0, 0
    for event in (e for e in events if e.trained):
        best, waited = (event.trained.validation, 0) if event.trained.validation > best else (best, waited + 1)
        if waited == patience:
            return event.round
    return None


@pytest.fixture(scope="module")
def patient(tmp_path_factory):
    """A run that stops early, and its folder."""
    folder = tmp_path_factory.mktemp("patient") / "run"
    return folder, session.run(small(*PATIENT, "run.checkpoint_seconds=0"), folder)


def test_a_run_stops_when_held_out_data_say_so(patient):
    folder, summary = patient
    _, whole = finish(Simulation(small(*PATIENT, "run.patience=0")))
    last = stops_at(whole, 2)
    assert last is not None
    assert last < 12
    record = read_run(folder)
    assert len(record.rounds) == summary["rounds"] == last
    for mine, theirs in zip(record.rounds[:-1], whole, strict=False):
        assert without_seconds(mine) == without_seconds(theirs)
    assert record.rounds[-1].trained == whole[last - 1].trained
    assert record.portrait is not None  # as the last round of any run
    why = (
        f"stopped after round {last} of 12: the accuracy on held-out data has not improved for 2 evaluated rounds "
        "(run.patience)"
    )
    assert summary["stopped"] == record.rounds[-1].stopped == why
    assert summary["notes"].count(why) == 1
    assert collect([folder])[1] == []


def test_a_stopped_run_is_finished(patient):
    folder, summary = patient
    seen = []
    assert session.run(None, folder, resume=True, on_event=seen.append)["rounds"] == summary["rounds"]
    longer = small(*PATIENT, "run.checkpoint_seconds=0", "train.rounds=20")
    assert session.run(longer, folder, resume=True, on_event=seen.append)["rounds"] == summary["rounds"]
    assert not [event for event in seen if isinstance(event, Round)]


@pytest.mark.parametrize("until", [3, 4, "last"])
def test_a_run_with_patience_resumes_exactly(patient, until, tmp_path):
    """Broken off between two evaluations, at one, and when all rounds are done but nothing is finished."""
    _, summary = patient
    until = summary["rounds"] if until == "last" else until

    def stop(event):
        if isinstance(event, Round) and event.round == until:
            raise KeyboardInterrupt

    config = small(*PATIENT, "run.checkpoint_seconds=0", "run.engine=threads", "run.workers=2")
    with pytest.raises(KeyboardInterrupt):
        session.run(config, tmp_path / "run", on_event=stop)
    again = session.run(None, tmp_path / "run", resume=True)
    single = session.run(small(*PATIENT, "run.engine=loop"), tmp_path / "loop")
    ours, theirs = (RunFolder(tmp_path / name).events() for name in ("run", "loop"))
    assert [without_seconds(e) for e in ours[1:]] == [without_seconds(e) for e in theirs[1:]]
    assert again["stopped"] == single["stopped"]
    assert sum(isinstance(e, Note) and "run.patience" in e.message for e in ours) == 1


def test_patience_without_a_folder_says_why(patient):
    seen = []
    summary = session.run(small(*PATIENT), on_event=seen.append)
    assert summary["stopped"] in summary["notes"]
    assert seen[-1] == Note(summary["stopped"])
    assert summary["rounds"] == patient[1]["rounds"]


def test_patience_needs_held_out_data():
    with pytest.raises(
        ConfigError, match=r"run\.patience = 2 stops by held-out data, and none are held out: set data"
    ):
        small("run.patience=2", "data.validation=0")
    with pytest.raises(ConfigError, match="no evaluated client has any"):
        Simulation(small("run.patience=2", "data.validation=0.001", "data.clients=20"))


# --- what earlier versions left


def test_a_checkpoint_of_an_earlier_version_goes_on_with_the_same_numbers(tmp_path):
    """It has three numbers a client: what it lacks is measured again."""
    config = small(*LITTLE, "algorithm.name=local", "train.participation=0.5", "run.engine=loop", "train.rounds=4")
    simulation = Simulation(config)
    rounds = simulation.rounds(simulation.start())
    next(rounds)
    progress, _ = next(rounds)
    tree = to_tree(progress)
    simulation.close()
    assert tree["trained"]
    old = tree | {
        "trained": {
            c: [s["test"]["right"], s["test"]["loss"], s["validation"]["right"]] for c, s in tree["trained"].items()
        }
    }
    checkpoint.save(tmp_path / "old.safetensors", old)
    checkpoint.save(tmp_path / "new.safetensors", tree)
    new, resumed = (
        finish(Simulation(config), from_tree(checkpoint.load(tmp_path / f"{name}.safetensors")))
        for name in ("new", "old")
    )
    assert leaves(to_tree(new[0])) == leaves(to_tree(resumed[0]))
    assert [without_seconds(e) for e in new[1]] == [without_seconds(e) for e in resumed[1]]


def test_a_checkpoint_with_scores_of_another_kind_does_not_fit():
    simulation = Simulation(small(*LITTLE, "algorithm.name=local", "train.rounds=1"))
    ((progress, _),) = simulation.rounds(simulation.start())
    simulation.check_progress(progress)
    score = progress.trained[0]
    bad = replace(score, test=replace(score.test, sums={PER_CLASS: np.zeros((4, 3))}))
    with pytest.raises(RunError, match="something other than"):
        simulation.check_progress(replace(progress, trained={0: bad}))
    simulation.close()


def test_a_run_folder_of_an_earlier_version_is_read_and_reported(tmp_path):
    folder = tmp_path / "run"
    session.run(small(*LITTLE, "algorithm.name=fedavg"), folder)
    new = {"metrics", "validation_metrics", "client_metrics", "pick", "lower_is_better", "stopped"}

    def older(event):
        result = {"received", "trained"}
        return {
            key: older(value) if key in result else value
            for key, value in event.items()
            if key not in new and not (key == "classes" and "right" in event)
        }

    lines = (folder / "events.jsonl").read_text().splitlines()
    (folder / "events.jsonl").write_text("".join(json.dumps(older(json.loads(line))) + "\n" for line in lines))
    summary = json.loads((folder / "summary.json").read_text())
    for key in ("metrics", "per_class", "events_sha256", "sha256"):
        summary.pop(key, None)
    summary["per_client"].pop("metrics")
    (folder / "summary.json").write_text(json.dumps(summary))
    toml = (folder / "config.toml").read_text().splitlines()[1:]
    kept = [line for line in toml if line.partition(" ")[0] not in ("metrics", "pick", "patience")]
    (folder / "config.toml").write_text("\n".join(kept) + "\n")

    record = read_run(folder)
    assert record.rounds[-1].received.metrics == {}
    method = Method("old", [record])
    assert tables.header([method.row]) == tables.HEADER
    page.write(tmp_path / "page.html", "old", [Group("old", [method])])
    drawn = figures.everything(Group("old", [method]))
    assert not {"balanced-accuracy", "macro-f1", "classes"} & drawn.keys()
