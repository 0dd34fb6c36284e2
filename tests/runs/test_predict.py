from __future__ import annotations

import csv
import random
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import cwfed
from cwfed.core.errors import DataError, RunError
from cwfed.data.sources import digits
from cwfed.federation.experiment import deal
from cwfed.federation.simulation import Simulation
from cwfed.runs import saved_models
from cwfed.runs.folder import RunFolder
from tests.conftest import EARLY, small
from tests.runs.test_session import interrupt_after


def test_a_personal_model_loads_in_two_lines_and_predicts_as_in_the_run(tmp_path):
    cwfed.run(small("train.rounds=5"), tmp_path / "run")
    model = cwfed.load_model(tmp_path / "run", client=3)
    simulation = Simulation(small())
    test = simulation.federation.shards[3].test
    data = simulation.federation.data
    simulation.close()
    accuracy = (model.predict(data.inputs[test]) == data.labels[test]).mean()
    np.testing.assert_allclose(model.probabilities(data.inputs[test]).sum(1), 1, rtol=1e-5)
    rounds = {event.round: event for event in RunFolder(tmp_path / "run").events() if event.kind == "round"}
    assert accuracy == rounds[model.round].received.right[3] / len(test)


@pytest.mark.parametrize("algorithm", ["cwfedavg", "fedavg-ft", "local"])
def test_the_model_of_the_round_that_validation_picked_is_loaded(tmp_path, algorithm):
    """As good as the summary says that round was, in either phase; the last round's is there too."""
    config = small(*EARLY, f"algorithm.name={algorithm}")
    summary = cwfed.run(config, tmp_path / "run")
    phase = summary["reported"]["phase"]
    assert summary["picked_rounds"][phase]["validated"] < 8
    federation = deal(config)
    for pick in ("validated", "last"):
        right = total = 0
        for client, shard in federation.shards.items():
            model = cwfed.load_model(tmp_path / "run", client, pick=pick)
            assert (model.pick, model.round) == (pick, summary["picked_rounds"][phase][pick])
            right += (model.predict(federation.data.inputs[shard.test]) == federation.data.labels[shard.test]).sum()
            total += len(shard.test)
        assert right / total == summary["accuracy"][phase][pick]
    default = cwfed.load_model(tmp_path / "run", 0)
    assert default.pick == "validated"
    assert "picked by validation" in repr(default)
    newcomer, at_the_end = (cwfed.load_model(tmp_path / "run", pick=pick) for pick in (None, "last"))
    assert (newcomer.round, at_the_end.round) == (summary["picked_rounds"][phase]["validated"], 8)


@pytest.mark.parametrize("algorithm", ["fedproto", "fedpac", "fedcp", "gpfl"])
def test_a_network_that_the_method_has_changed_predicts_as_in_the_run(tmp_path, algorithm):
    config = small(f"algorithm.name={algorithm}", "train.rounds=2", "train.participation=0.7")
    cwfed.run(config, tmp_path / "run")
    (*_, last) = (event for event in RunFolder(tmp_path / "run").events() if event.kind == "round")
    federation = deal(config)
    for client, shard in federation.shards.items():
        model = cwfed.load_model(tmp_path / "run", client, pick="last")
        right = (model.predict(federation.data.inputs[shard.test]) == federation.data.labels[shard.test]).sum()
        assert right == last.received.right[client]
    for counts in (None, [3.0] * 5 + [0.0] * 5):
        newcomer = cwfed.load_model(tmp_path / "run", class_counts=counts)
        assert np.isfinite(newcomer.probabilities(federation.data.inputs[:9])).all()


def test_without_validation_the_last_models_are_loaded(tmp_path):
    cwfed.run(small("data.validation=0"), tmp_path / "run")
    model = cwfed.load_model(tmp_path / "run", 0)
    assert (model.pick, model.round) == ("last", 3)
    for client in (0, None):
        with pytest.raises(RunError, match="validation picked"):
            cwfed.load_model(tmp_path / "run", client, pick="validated")
    with pytest.raises(RunError, match='"validated" or "last"'):
        cwfed.load_model(tmp_path / "run", 0, pick="best")


def test_models_of_earlier_versions_are_the_last(tmp_path):
    cwfed.run(small(*EARLY), tmp_path / "run")
    (tmp_path / "run" / "models" / "rounds.json").unlink()
    shutil.rmtree(tmp_path / "run" / "models" / "validated")
    model = cwfed.load_model(tmp_path / "run", 0)
    assert (model.pick, model.round) == ("last", 8)


def test_newcomers_get_models_from_the_run_folder(tmp_path):
    cwfed.run(small("train.rounds=20"), tmp_path / "run")
    data = digits()
    blank = cwfed.load_model(tmp_path / "run")
    with_histogram, without = [], []
    for pair in ((0, 1), (2, 3), (4, 5)):  # six clients hold these
        mine = np.isin(data.labels, pair)
        knows = cwfed.load_model(tmp_path / "run", class_counts=[9 * (k in pair) for k in range(10)])
        with_histogram.append((knows.predict(data.inputs[mine]) == data.labels[mine]).mean())
        without.append((blank.predict(data.inputs[mine]) == data.labels[mine]).mean())
    assert min(with_histogram) > 0.9
    assert np.mean(with_histogram) > np.mean(without) + 0.1


def test_text_models_take_texts(tmp_path):
    rng = random.Random(0)
    topics = {"sport": ["goal", "match", "team"], "money": ["stock", "bank", "price"]}
    with (tmp_path / "news.csv").open("w", newline="") as file:
        rows = [(" ".join(rng.choices(words, k=5)), k) for k, words in topics.items() for _ in range(80)]
        csv.writer(file).writerows([("text", "label"), *rows])
    config = cwfed.load_config(
        settings=["data.name=csv", f"data.path={tmp_path / 'news.csv'}", "data.partition=iid", "data.clients=4",
                  "train.rounds=15", "train.lr=0.5", "algorithm.name=fedavg"]
    )  # fmt: skip
    summary = cwfed.run(config, tmp_path / "run")
    assert summary["reported"]["accuracy"] > 0.95
    model = cwfed.load_model(tmp_path / "run", client=0)
    said = model.predict(["the team won the match", "bank stock price unheardof"])
    assert [model.class_names[k] for k in said] == ["sport", "money"]


def test_what_cannot_be_loaded(tmp_path):
    with pytest.raises(RunError, match="holds no run"):
        cwfed.load_model(tmp_path, client=0)
    with pytest.raises(KeyboardInterrupt):
        cwfed.run(small(), tmp_path / "begun", on_event=interrupt_after(1))
    with pytest.raises(RunError, match="is not finished, and models are saved at the end"):
        cwfed.load_model(tmp_path / "begun", client=0)
    cwfed.run(small("run.save_models=none"), tmp_path / "none")
    with pytest.raises(RunError, match=r'run\.save_models = "none"\): cwfed run --resume --set run\.save_models=all'):
        cwfed.load_model(tmp_path / "none", client=0)
    cwfed.run(small(), tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone" / "models")
    with pytest.raises(RunError, match=r"or their folder was removed\): .*--out \S*gone writes them"):
        cwfed.load_model(tmp_path / "gone", client=0)
    cwfed.run(small(), tmp_path / "run")
    with pytest.raises(RunError, match="no model of client 99: its clients are 0 to 5"):
        cwfed.load_model(tmp_path / "run", client=99)
    with pytest.raises(RunError, match="not both"):
        cwfed.load_model(tmp_path / "run", client=0, class_counts=[1] * 10)
    with pytest.raises(DataError, match="do not fit the model"):
        cwfed.load_model(tmp_path / "run", client=0).predict(np.zeros((2, 3, 3, 1), np.float32))
    with pytest.raises(DataError, match="inputs do not fit the model"):
        cwfed.load_model(tmp_path / "run", client=0).predict([[1.0], [2.0, 3.0]])
    path = tmp_path / "run" / "models" / "client-00002.safetensors"
    save_file({n: w for n, w in load_file(path).items() if n != "output.weight"}, path)
    with pytest.raises(RunError, match=r"output\.weight differs"):
        cwfed.load_model(tmp_path / "run", client=2, pick="last")
    (tmp_path / "run" / "models" / "client-00001.safetensors").write_bytes(b"nonsense")
    with pytest.raises(RunError, match="damaged"):
        cwfed.load_model(tmp_path / "run", client=1, pick="last")


def test_the_folder_of_a_federation_s_node_says_whose_model_it_has(tmp_path):
    RunFolder(tmp_path).save_models(iter([(7, {"w": torch.zeros(2)})]))
    with pytest.raises(RunError, match="no model of client 0: there is that of 7"):
        saved_models.read(RunFolder(tmp_path).models, 0, None, 1)
