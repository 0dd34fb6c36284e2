"""The benchmark: the reference does the same maths, and the real command measures both."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager

import pytest
import torch

from cwfed import benchmark
from cwfed.algorithms import CwFedAvg
from cwfed.benchmark import contestant, workloads
from cwfed.core import mixing
from cwfed.core.shape import InputShape
from cwfed.core.types import Uploads
from cwfed.models import build, task_of
from tests import processes
from tests.conftest import ROOT


def a_reference(layers):
    """Three clients with models of their own."""
    torch.manual_seed(0)
    model = build("mlp", InputShape((6,)), 4, {"hidden": 5})
    task = task_of(model, 3, 4)
    clients = []
    for samples in (20, 30, 50):
        data = [(torch.randn(6), torch.tensor(i % 4)) for i in range(samples)]
        clients.append((data, data[:10]))
    reference = workloads.reference_module().Reference(model, clients, 4, "output", task.select(layers), 0.1, 0.5)
    with torch.no_grad():
        for client in reference.clients:
            for parameter in client.model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return reference, task


@pytest.mark.parametrize("layers", ["output", "all"])
def test_the_reference_aggregates_as_we_do(layers):
    reference, task = a_reference(layers)
    models = [dict(client.model.named_parameters()) for client in reference.clients]
    stack = {name: torch.stack([m[name].detach().clone() for m in models]) for name in models[0]}
    algorithm = CwFedAvg(layers=layers)
    state = algorithm.init(lambda _: {n: w[0] for n, w in stack.items()}, task)
    after = algorithm.aggregate(state, Uploads((0, 1, 2), stack, torch.tensor([20, 30, 50])))
    reference.aggregate()
    for number, client in enumerate(reference.clients):
        ours = algorithm.send(after, number).model
        for name, parameter in client.model.named_parameters():
            torch.testing.assert_close(parameter.detach(), ours[name], rtol=1e-5, atol=1e-6)


def test_the_reference_learns_and_its_norms_follow_the_classes():
    reference, _ = a_reference("output")
    reference.clients[0].train = [(x, torch.tensor(0)) for x, _ in reference.clients[0].train]
    for _ in range(30):
        reference.train(reference.clients[0])
    prior = reference.clients[0].class_distribution(4)
    found = mixing.norm_distribution(reference.clients[0].model.output.weight.detach())
    assert (prior - found).norm() < 0.3
    seconds = reference.round()
    assert sorted(seconds) == ["aggregate", "evaluate", "train"]
    assert 0 <= reference.accuracy <= 1


@pytest.mark.parametrize(
    ("who", "name"),
    [("reference", "mlp"), ("auto", "mlp"), ("reference", "fasttext"), ("auto", "fasttext"), ("auto", "aggregation")],
)
def test_every_side_can_be_measured(who, name, monkeypatch):
    monkeypatch.setattr(workloads, "SAMPLES", 400)
    monkeypatch.setattr("cwfed.engine.vmap.COMPILE_FOR", 10**12)
    workload = next(w for w in workloads.WORKLOADS if w.name == name)
    measure, facts = contestant.prepare(who, workload)
    seconds = measure()
    assert seconds["aggregate"] > 0
    if who == "auto":
        assert facts["engine"] == ("mixing" if name == "aggregation" else "vmap")
    if (who, name) == ("auto", "aggregation"):
        assert seconds["extra_memory"] < 1


def test_the_work_of_a_round_by_hand(monkeypatch):
    """MLP on digits: a linear layer of a x b takes 2ab forward; backward as much for weights, and for inputs but the first."""
    workload = next(w for w in workloads.WORKLOADS if w.name == "mlp")
    simulation = contestant.Simulation(contestant.configs.load(None, [*workload.settings]))
    first, last = 2 * 64 * 128, 2 * 128 * 10
    shards = simulation.federation.shards.values()
    steps = sum(max(1, len(s.train) // 10) for s in shards)
    tests = sum(len(s.test) for s in shards)
    by_hand = steps * 10 * (2 * first + 3 * last) + 2 * tests * (first + last)
    assert contestant.flops_of_a_round(simulation) == by_hand


def test_the_peak_is_asked_for_in_turn_with_the_sides(monkeypatch):
    """A machine's speed changes from minute to minute: the roofline is of the same ones."""
    order = []

    @contextmanager
    def side(who, workload, quick):
        def ask(rounds=None):
            order.append(who)
            return {"engine": who, "why": "", "flops": 10**9} if rounds is None else {"train": 1.0, "evaluate": 1.0}

        yield ask

    def peak():
        order.append("peak")
        return {1: 1.0, 2: 8.0, 3: 2.0}[order.count("peak")]

    monkeypatch.setattr(benchmark, "_side", side)
    monkeypatch.setattr(benchmark, "peak_gflops", peak)
    found = benchmark.bench(["cnn"], quick=True)
    assert order[-6:] == ["reference", "auto", "peak"] * 2
    assert found["machine"]["peak_gflops"] == found["workloads"][0]["peak_gflops"] == 2.0
    assert found["workloads"][0]["roofline"] == {"gflop": 1.0, "seconds": 0.5, "share": 0.25}


def result(ratio=12.0):
    line = {
        "name": "mlp", "title": "MLP [digits]", "precision": "fp32", "goal": 10.0, "floor": 10.0, "ratio": ratio,
        "reference_seconds": 1.2, "seconds": 0.1, "loop_seconds": 0.3, "met": True, "floor_met": True,
        "engine": "vmap", "why": "small", "note": "", "outside": 0.01, "roofline": {"share": 0.5},
    }  # fmt: skip
    gone = dict.fromkeys(("reference_seconds", "seconds", "loop_seconds", "ratio", "engine", "met"))
    refused = {**line, **gone, "name": "cnn-bf16", "precision": "bf16", "note": "not available on this CPU"}
    machine = {"cpu": "a CPU", "instruction_set": "x", "cores": 2, "torch": "2"}
    return {"machine": machine, "quick": True, "workloads": [line, refused]}


def test_the_picture_and_the_table(tmp_path, capsys):
    from cwfed.cli.console import print_bench

    benchmark.picture(result(), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 10_000
    print_bench(result())
    said = capsys.readouterr().out
    assert "12.0 x" in said
    assert "cnn-bf16: not available on this CPU" in said


def test_when_every_workload_is_refused_there_is_no_picture(tmp_path):
    refused = result()
    refused["workloads"] = refused["workloads"][1:]
    benchmark.picture(refused, tmp_path / "bench.png")
    assert not (tmp_path / "bench.png").exists()


def test_unknown_workload_and_a_missing_reference(monkeypatch):
    with pytest.raises(benchmark.ConfigError, match="did you mean mlp"):
        benchmark.bench(["mlpp"])
    monkeypatch.setattr(workloads, "__file__", "/nowhere/a/b/c/workloads.py")
    with pytest.raises(benchmark.ConfigError, match="run it in a clone"):
        benchmark.bench(["mlp"])


def test_a_side_that_dies_is_named(monkeypatch):
    monkeypatch.setattr(benchmark, "WORKLOADS", (workloads.Workload("gone", "gone", (), 1, 1),))
    with pytest.raises(benchmark.RunError, match="measures reference on gone"):
        benchmark.bench(["gone"])


@pytest.mark.slow
def test_the_real_command(tmp_path):
    arguments = ["aggregation", "mlp", "--quick", "--json", "--out", tmp_path]
    done = processes.run([sys.executable, "-m", "cwfed", "bench", *arguments], cwd=ROOT, check=True)
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "bench.json").read_text())
    assert {"cpu", "cores", "torch", "instruction_set"} <= found["machine"].keys()
    for line in found["workloads"]:
        wanted = {"name", "reference_seconds", "seconds", "ratio", "engine", "precision", "goal", "met"}
        assert wanted <= line.keys()
        assert line["ratio"] == line["reference_seconds"] / line["seconds"] > 0
    assert (tmp_path / "bench.png").exists()
