"""The real data sets, where they are on this machine: schemas, sizes, and that every model learns on its own."""

from __future__ import annotations

import numpy as np
import pytest

from cwfed.data.sources import SourceSpec, load
from cwfed.federation import config as configs
from cwfed.federation.experiment import deal
from cwfed.reproduce import spec
from cwfed.runs import session


def run(real_data, *settings):
    return session.run(configs.load(None, list(settings)), data_dir=real_data)


@pytest.mark.slow
def test_mnist(real_data):
    found = load(SourceSpec("mnist"), real_data)
    assert found.inputs.shape == (70_000, 28, 28, 1)
    assert np.bincount(found.labels).tolist() == [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]
    summary = run(real_data, "data.name=mnist", "data.samples=3000", "train.rounds=4", "train.lr=0.05")
    assert summary["reported"]["accuracy"] > 0.85


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "classes", "per_class"),
    [
        ("cifar10", (60_000, 32, 32, 3), 10, 6000),
        ("cifar100", (60_000, 32, 32, 3), 100, 600),
        ("tiny_imagenet", (25_000, 64, 64, 3), 200, 125),
    ],
)
def test_images(real_data, name, shape, classes, per_class):
    found = load(SourceSpec(name), real_data)
    assert found.inputs.shape == shape
    assert np.bincount(found.labels).tolist() == [per_class] * classes


@pytest.mark.slow
def test_ag_news_with_fasttext(real_data):
    found = load(SourceSpec("ag_news"), real_data)
    assert found.class_names == ("World", "Sports", "Business", "Sci/Tech")
    assert len(found.words) > 50_000
    summary = run(
        real_data, "data.name=ag_news", "data.samples=8000", "data.partition=dirichlet", "data.clients=5",
        "train.rounds=6", "train.lr=0.5",
    )  # fmt: skip
    assert summary["reported"]["accuracy"] > 0.6


@pytest.mark.slow
def test_cwfedavg_is_ahead_on_real_cifar10(real_data):
    common = ("data.name=cifar10", "data.samples=6000", "train.rounds=8", "train.lr=0.02")
    cw = run(real_data, *common)
    avg = run(real_data, *common, "algorithm.name=fedavg")
    assert cw["reported"]["accuracy"] > avg["reported"]["accuracy"] + 0.1
    assert cw["correlation"] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["local", "average"])
def test_resnet18_on_tiny_imagenet(real_data, policy):
    summary = run(
        real_data, "data.name=tiny_imagenet", "data.samples=400", "data.partition=iid", "data.clients=2",
        "model.name=resnet18", "train.rounds=1", "algorithm.layers=all", f"train.batch_norm={policy}",
    )  # fmt: skip
    assert summary["parameters"] == 11_279_112
    assert 0 <= summary["reported"]["accuracy"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", spec.settings().settings)
def test_every_setting_of_the_paper_can_be_dealt_out(real_data, name):
    config = spec.Setup(name, "paper").config
    federation = deal(config, real_data)
    held = [len(shard.train) + len(shard.test) for shard in federation.shards.values()]
    assert sum(held) == len(federation.data.labels)  # nothing is held out
    assert len(held) == config.data.clients
