"""What `cwfed.run` gives and takes in Python: histories, tables, models; objects; listeners that stop; rounds one at a time."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import cwfed
from cwfed.core.errors import ConfigError, DataError, RunError
from cwfed.core.events import Note, PhaseResult, Round, Started
from cwfed.runs import bars, history, session
from cwfed.runs.folder import RunFolder
from tests import processes
from tests.conftest import all_digits, two_blobs, without_seconds
from tests.runs.test_session import final_bits


def phase(accuracy, right, **more):
    return PhaseResult(accuracy=accuracy, validation=None, loss=1.5, right=right, **more)


def round_(number, received=None, trained=None):
    return Round(
        round=number,
        participants=[0, 2],
        dropped=[1],
        loss=0.5,
        penalty=None,
        client_loss=[0.4, 0.6],
        correlation=None,
        distance=None,
        received=received,
        trained=trained,
        down=10,
        up=20,
        seconds={"train": 1.0, "send": 0.5},
    )


STARTED = Started("fedavg", "toy", 0, 2, 3, 2, 7, "received", [0, 2], [4, 0], names=["ann", "cem"])


# --- tables


def test_the_history_has_a_row_per_round_and_phase_by_hand():
    found = phase(0.75, [3, 0], metrics={"macro_f1": 0.7})
    table = history.history([STARTED, round_(1), Note("x"), round_(2, received=found)])
    assert [(row.round, row.phase, row.accuracy) for row in table] == [
        (1, "received", None), (1, "trained", None), (2, "received", 0.75), (2, "trained", None),
    ]  # fmt: skip
    assert (table[2].loss, table[2].train_loss, table[2].seconds) == (1.5, 0.5, 1.5)
    assert (table[2].participants, table[2].dropped, table[2].down, table[2].up) == (2, 1, 10, 20)
    assert table.where(phase="received").column("accuracy") == [None, 0.75]
    assert table.column("macro_f1") == [None, None, 0.7, None]
    assert [len(table[1:]), len(list(table))] == [3, 4]
    assert "macro_f1" in repr(table)
    with pytest.raises(cwfed.CwfedError, match="no column 'acuracy': did you mean accuracy"):
        table.column("acuracy")


def test_clients_by_hand():
    found = phase(0.75, [3, 0], client_metrics={"macro_f1": [0.6, None]})
    table = history.clients([STARTED, round_(1), round_(2, received=found)], 2)
    assert [(row.client, row.name, row.samples, row.accuracy) for row in table] == [
        (0, "ann", 4, 0.75),
        (2, "cem", 0, None),
    ]
    assert table.column("macro_f1") == [0.6, None]
    with pytest.raises(RunError, match="round 1 was not evaluated; the last evaluated ones: 2"):
        history.clients([STARTED, round_(1), round_(2, received=found)], 1)


def test_tables_as_pandas(monkeypatch):
    table = history.history([STARTED, round_(1, phase(0.5, [2, 0]), phase(0.75, [3, 0]))])
    frame = table.to_pandas()
    assert frame[["round", "phase", "accuracy"]].values.tolist() == [[1, "received", 0.5], [1, "trained", 0.75]]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(cwfed.CwfedError, match="needs pandas: pip install pandas"):
        table.to_pandas()


# --- the result


SMALL = all_digits("train.rounds=3")


def test_a_result_is_its_summary_with_more():
    result = cwfed.run(SMALL)
    assert isinstance(result, cwfed.Summary)
    assert result.reported.round == result["reported"]["round"]
    assert "happened" not in result.to_dict()
    assert [row.round for row in result.history] == [1, 1, 2, 2, 3, 3]
    best = result.history.where(phase="received", round=result.picked_rounds.received.best)
    assert best.column("accuracy") == [result.accuracy.received.best]
    rows = result.client_table().where(phase="received")
    assert {str(row.client): row.accuracy for row in rows} == result.per_client.accuracies
    assert result.folder is None
    assert repr(result).startswith("<Result of cwfedavg on digits, 3 rounds, seed 0: best received ")


def test_models_are_the_same_with_and_without_a_folder(tmp_path):
    inputs = cwfed.load_data("digits").inputs[:20]
    for algorithm in ("cwfedavg", "ditto"):
        memory = cwfed.run(SMALL, algorithm=algorithm)
        folder = cwfed.run(SMALL, tmp_path / algorithm, algorithm=algorithm)
        assert len(memory.models) == len(folder.models) == 6
        for pick in ("validated", "last"):
            here, there = memory.model(2, pick=pick), folder.model(2, pick=pick)
            assert (here.round, here.pick) == (there.round, there.pick)
            assert np.allclose(here.probabilities(inputs), there.probabilities(inputs), atol=1e-6)
        counts = [3, 0, 0, 1, 0, 0, 0, 0, 0, 0]
        for more in ({}, {"class_counts": counts}):
            ours, theirs = memory.model(**more), folder.model(**more)
            assert np.allclose(ours.probabilities(inputs), theirs.probabilities(inputs), atol=1e-6)
        assert [row.accuracy for row in folder.history] == [row.accuracy for row in memory.history]
    with pytest.raises(RunError, match="there is no client 6: the clients are 0 to 5"):
        memory.model(6)
    with pytest.raises(KeyError):
        memory.models[6]
    with pytest.raises(RunError, match="not both"):
        memory.model(1, class_counts=counts)
    assert cwfed.run(out=tmp_path / "ditto", resume=True).history.column("accuracy") == folder.history.column(
        "accuracy"
    )


@pytest.mark.parametrize("algorithm", ["fedavg", "gpfl"])
def test_a_newcomer_s_histogram_may_be_an_array_and_must_be_one_of_these_classes(algorithm, tmp_path):
    """In memory an array was a traceback; numbers of other classes were one, or were not looked at."""
    config = all_digits("train.rounds=1", "data.samples=400")
    for result in (
        cwfed.run(config, algorithm=algorithm),
        cwfed.run(config, tmp_path / algorithm, algorithm=algorithm),
    ):
        for counts in (np.arange(10), torch.arange(10), [*range(10)]):
            result.model(class_counts=counts)
        for counts in ([1, 2], [], [0] * 10, [-1] * 10):
            with pytest.raises(ConfigError, match="a label histogram here is 10 numbers >= 0"):
                result.model(class_counts=counts)


def test_models_that_are_not_kept_are_one_sentence():
    result = cwfed.run(all_digits("train.rounds=1", "run.save_models=none"))
    with pytest.raises(RunError, match=r'the models were not kept: run.save_models = "none"'):
        result.model(0)


# --- objects


def test_arrays_in_place_of_files(tmp_path):
    inputs, labels = two_blobs()
    settings = all_digits("train.rounds=2", "data.partition=dirichlet", "data.alpha=1")
    result = cwfed.run(settings, tmp_path / "run", data=(inputs, labels))
    assert (result.dataset, result.clients) == ("arrays", 6)
    same = cwfed.run(settings, data=cwfed.Dataset.from_arrays(torch.from_numpy(inputs), labels))
    assert list(map(without_seconds, same.events)) == list(map(without_seconds, result.events))
    more = all_digits("train.rounds=3", "data.partition=dirichlet", "data.alpha=1")
    assert cwfed.run(more, tmp_path / "run", data=(inputs, labels), resume=True).rounds == 3
    assert cwfed.run(out=tmp_path / "run", data=(inputs, labels), resume=True).rounds == 3
    with pytest.raises(ConfigError, match=r"were given in Python: give them again, as cwfed.run"):
        session.run(
            RunFolder(tmp_path / "run").config().model_copy(update={"train": all_digits("train.rounds=4").train}),
            tmp_path / "run",
            resume=True,
        )
    further = all_digits("train.rounds=4", "data.partition=dirichlet", "data.alpha=1")
    with pytest.raises(RunError, match="was made with another data"):
        cwfed.run(further, tmp_path / "run", data=(inputs + 1, labels), resume=True)


def test_data_of_torch_and_data_that_come_split():
    inputs, labels = two_blobs()
    pairs = torch.utils.data.TensorDataset(torch.from_numpy(inputs), torch.from_numpy(labels))
    assert cwfed.run(all_digits("train.rounds=1", "data.partition=iid"), data=pairs).dataset == "TensorDataset"
    parts = {
        name: ((inputs[a : a + 80], labels[a : a + 80]), (inputs[a + 80 : a + 100], labels[a + 80 : a + 100]))
        for name, a in (("ann", 0), ("ben", 100))
    }
    result = cwfed.run(all_digits("train.rounds=1"), data=cwfed.Dataset.from_clients(parts))
    assert [(row.name, row.samples) for row in result.client_table().where(phase="trained")] == [
        ("ann", 20),
        ("ben", 20),
    ]
    with pytest.raises(
        DataError, match=r"data = str is neither a cwfed.Dataset.*are settings, data.path and data.name"
    ):
        cwfed.run(SMALL, data="digits")
    table = pytest.importorskip("pandas").DataFrame({"x": [1.0], "y": [0]})
    with pytest.raises(DataError, match=r"data = DataFrame is neither .*data=\(table\[features\]\.to_numpy"):
        cwfed.run(SMALL, data=table)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(2, 3), torch.arange(2)))
    with pytest.raises(DataError, match=r"data = DataLoader is neither .* data=loader.dataset"):
        cwfed.run(SMALL, data=loader)


def test_who_holds_what_of_data_in_memory():
    dealt = cwfed.deal(
        {"data": {"partition": "column"}}, data=cwfed.Dataset.from_arrays(*two_blobs(40), clients=["x", "y"] * 20)
    )
    assert dealt.names == ("x", "y")
    assert dealt.histogram().sum(1).tolist() == [20, 20]


def test_an_algorithm_and_a_model_without_a_registry(tmp_path):
    """Both defined inside a function: nothing could import them."""

    @dataclass(frozen=True)
    class Half(cwfed.FedAvg):
        factor: float = 1.0

        def begin(self, got, own, data):
            return cwfed.Start({name: self.factor * w for name, w in got.model.items()})

    def thin(shape, classes):
        return network(shape.dims, classes)

    same = cwfed.run(SMALL, algorithm="fedavg", model=thin)
    one = cwfed.run(SMALL, algorithm=Half(), model=thin)
    assert [row.accuracy for row in one.history] == [row.accuracy for row in same.history]
    other = cwfed.run(SMALL, tmp_path / "run", algorithm=Half(factor=0.5), model=thin)
    assert [row.accuracy for row in other.history] != [row.accuracy for row in same.history]
    assert RunFolder(tmp_path / "run").config().algorithm["factor"] == 0.5
    assert other.model(1).predict(np.zeros((2, 8, 8, 1), np.float32)).shape == (2,)
    assert cwfed.run(out=tmp_path / "run", algorithm=Half(factor=0.5), model=thin, resume=True).rounds == 3
    with pytest.raises(RunError, match=r"holds another experiment: algorithm.factor is 0.5 there and 1.0 here"):
        cwfed.run(out=tmp_path / "run", algorithm=Half, model=thin, resume=True)


def network(dims, classes):
    made = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(dims)), classes))
    made.output_layer = "1"
    return made


def test_a_module_begins_with_the_weights_that_it_has():
    module = network((1, 8, 8), 10)
    with torch.no_grad():
        module[1].weight.zero_()
    simulation = cwfed.Simulation(session.Given(model=module).named_in(SMALL))
    assert not simulation.initial["1.weight"].any()
    simulation.close()
    result = cwfed.run(all_digits("train.rounds=1", "run.seed=4"), model=module, algorithm="fedavg")
    assert result.model(0).network[1].weight.any()
    assert not module[1].weight.any()  # the user's own is not trained
    with pytest.raises(
        ConfigError, match=r"ifca begins with several random models, and the model .* is the same each time"
    ):
        cwfed.run(all_digits("train.rounds=1"), model=module, algorithm="ifca")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"algorithm": 3}, "an algorithm is a name, a table or something that derives from cwfed.FedAvg, not 3"),
        ({"algorithm": "fedvag"}, "did you mean fedavg"),
        ({"model": 3}, r"a function of \(shape, classes\), not 3"),
        ({"model": nn.Linear(2, 2)}, "does not name its output layer"),
        (
            {"model": nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3))},
            'for example model.output_layer = "2"',
        ),
        ({"on_event": 3}, "on_event takes a function of one event, or several of them, not 3"),
    ],
)
def test_objects_that_are_something_else_get_one_sentence(given, says):
    with pytest.raises(ConfigError, match=says):
        cwfed.run(SMALL, **given)


def test_flower_s_clients_are_elsewhere():
    with pytest.raises(ConfigError, match="objects cannot be given to this backend"):
        session.run(SMALL, backend=lambda *_: None, given=session.Given(algorithm="fedavg"))


# --- stopping


def stop_after(number):
    def listener(event):
        if isinstance(event, Round) and event.round == number:
            raise cwfed.StopRun("good enough")

    return listener


def test_a_listener_stops_a_run_which_is_resumed_to_the_same_bits(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    cwfed.run(SMALL, whole)
    seen = []
    result = cwfed.run(SMALL, cut, on_event=[seen.append, stop_after(2)])
    assert (result.rounds, result.stopped) == (2, "good enough")
    assert [event.round for event in seen if isinstance(event, Round)] == [1, 2]
    assert result.model(0, pick="last").round == 2
    assert not (cut / "summary.json").exists()
    cwfed.run(out=cut, resume=True)
    assert final_bits(cut) == final_bits(whole)


def test_without_a_folder_a_stopped_run_has_its_result():
    result = cwfed.run(SMALL, on_event=stop_after(1))
    assert (result.rounds, result.stopped, len(result.history)) == (1, "good enough", 2)
    whole = cwfed.run(SMALL, on_event=stop_after(3))  # in the last round there is nothing left to stop
    assert (whole.rounds, whole.stopped) == (3, "")


def test_stopped_before_anything_was_measured_is_one_sentence(tmp_path):
    def at_once(event):
        raise cwfed.StopRun("no")

    with pytest.raises(RunError, match=r"stopped before its first evaluated round \(no\)"):
        cwfed.run(SMALL, on_event=at_once)
    with pytest.raises(RunError, match="stopped before its first evaluated round"):
        cwfed.run(SMALL, tmp_path / "run", on_event=at_once)
    assert cwfed.run(SMALL, tmp_path / "run", resume=True).rounds == 3


def test_a_listener_that_fails_leaves_a_checkpoint(tmp_path):
    def broken(event):
        if isinstance(event, Round) and event.round == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cwfed.run(SMALL, tmp_path / "run", on_event=broken)
    assert sorted(RunFolder(tmp_path / "run").checkpoints.rounds()) == [2]
    seen = []
    cwfed.run(out=tmp_path / "run", resume=True, on_event=seen.append)
    assert [event.round for event in seen if isinstance(event, Round)] == [3]


# --- one round at a time


def test_rounds_by_hand_are_those_of_a_run(tmp_path):
    seen = []
    rounds = cwfed.rounds(SMALL, on_event=seen.append)
    assert [event.round for event in rounds] == [1, 2, 3]
    assert isinstance(seen[0], Started)
    whole = cwfed.run(SMALL)
    assert list(map(without_seconds, rounds.result().events)) == list(map(without_seconds, whole.events))


def test_a_loop_may_be_left_and_taken_up_again(tmp_path):
    cwfed.run(SMALL, tmp_path / "whole")
    with cwfed.rounds(SMALL, tmp_path / "cut") as rounds:
        assert next(rounds).round == 1
        with pytest.raises(RunError, match="in use by another process"):
            cwfed.run(out=tmp_path / "cut", resume=True)
    assert [event.round for event in cwfed.rounds(out=tmp_path / "cut", resume=True)] == [2, 3]
    assert final_bits(tmp_path / "cut") == final_bits(tmp_path / "whole")


LEFT = """
import cwfed
for event in (rounds := cwfed.rounds({config!r}, {out!r})):
    break
"""


def test_a_script_that_leaves_the_loop_ends_without_a_word(tmp_path):
    config = {"data": {"clients": 4}, "train": {"rounds": 3, "lr": 0.05}, "run": {"engine": "threads"}}
    script = LEFT.format(config=config, out=str(tmp_path / "cut"))
    done = processes.run([sys.executable, "-c", script])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [event.round for event in cwfed.rounds(out=tmp_path / "cut", resume=True)] == [2, 3]


def test_the_result_of_the_rounds_that_are_done():
    rounds = cwfed.rounds(SMALL)
    with pytest.raises(RunError, match="no round was carried out yet"):
        rounds.result()
    next(rounds)
    assert (rounds.result().rounds, rounds.result().stopped) == (1, "stopped after round 1")
    assert list(rounds) == []  # no more are carried out
    closed = cwfed.rounds(SMALL)
    next(closed)
    closed.close()
    with pytest.raises(RunError, match="closed before their result was asked for"):
        closed.result()


def test_the_last_round_finishes_the_run(tmp_path):
    rounds = cwfed.rounds(SMALL, tmp_path / "run")
    for event in rounds:
        if event.round == 3:
            break
    assert rounds.result().stopped == ""
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_listener_stops_rounds_too():
    rounds = cwfed.rounds(SMALL, on_event=stop_after(2))
    assert [event.round for event in rounds] == [1, 2]
    assert rounds.result().stopped == "good enough"


# --- progress


def test_no_bar_where_nobody_looks(capsys):
    cwfed.run(all_digits("train.rounds=1"))
    cwfed.run(all_digits("train.rounds=1"), progress=False)
    assert capsys.readouterr() == ("", "")
    cwfed.run(all_digits("train.rounds=1"), progress=True)
    assert capsys.readouterr().err.startswith("round 1: received ")


def test_what_a_notebook_shows():
    shown = bars.Shown()
    for event in (STARTED, round_(1, phase(0.5, [2, 0]), phase(0.75, [3, 0]))):
        shown.tell(event)
    assert repr(shown) == "fedavg on toy [##########..........] round 1 of 2 received 50.0%, trained 75.0%"
    assert '<progress value="1" max="2"></progress>' in shown._repr_html_()


def test_a_terminal_shows_a_bar(monkeypatch):
    from rich.console import Console

    console = Console(force_terminal=True, width=120, record=True)
    monkeypatch.setattr(bars, "err", console)
    with bars.watching(None) as listener:
        for event in (STARTED, Note("look"), round_(1, phase(0.5, [2, 0]), phase(0.75, [3, 0]))):
            listener(event)
    text = console.export_text()
    assert "fedavg on toy" in text
    assert "1/2" in text
    assert "note: look" in text
