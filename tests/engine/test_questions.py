"""What a batched evaluation asks: every sample once, whoever has how many."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cwfed.core.metrics import LOSS, RIGHT, SAMPLES, Metric, OwnSums
from cwfed.core.metrics import Own as OwnMetric
from cwfed.data import Dataset, Federation, Samples
from cwfed.data.clients import Shard
from cwfed.engine import questions as asking

NONE = np.zeros(0, np.int64)


def federation():
    """Of eight samples one client has five to be tested on and two held out, one has one, one has none."""
    vectors, labels = np.arange(16, dtype=np.float32).reshape(8, 2), np.arange(8) % 2
    data = Dataset("made up", vectors, labels, ("even", "odd"))
    shards = [Shard(NONE, np.array([5, 6]), np.arange(5)), Shard(NONE, NONE, np.array([7])), Shard(NONE, NONE, NONE)]
    return Federation(data, shards), Samples(vectors, labels, torch.device("cpu"))


@pytest.mark.parametrize("at_once", [4, 4096])
def test_every_sample_is_asked_once_in_rows_of_the_mean_number(at_once, monkeypatch):
    monkeypatch.setattr(asking, "MEASURED", at_once)
    asked = asking.questions(*federation(), [0, 1, 2])
    assert (asked.owners, asked.starts) == ([0, 0, 0, 1], [0, 3, 6, 0])  # 8 samples of 3 clients: rows of 3
    inputs, labels = (torch.cat(column, 1) for column in zip(*asked.batches(), strict=True))
    first_words = inputs[:, :, 0].int() // 2  # which sample it is
    assert first_words.tolist() == [[0, 1, 2], [3, 4, 5], [6, 6, 6], [7, 7, 7]]
    right = labels.numpy() == 0
    tables = asked.places.count(labels.numpy(), right, np.ones(labels.shape))
    assert tables[:, SAMPLES].sum(1).tolist() == [5, 2, 1, 0, 0, 0]  # of each client the test, then the held-out data
    assert tables[:, LOSS].sum(1).tolist() == [5, 2, 1, 0, 0, 0]
    assert tables[:, RIGHT].sum(1).tolist() == [3, 1, 0, 0, 0, 0]  # even: 0, 2, 4; 6


@pytest.mark.parametrize("at_once", [4, 4096])
def test_own_metrics_see_every_sample_once(at_once, monkeypatch):
    monkeypatch.setattr(asking, "MEASURED", at_once)
    seen = Metric(lambda logits, labels: torch.stack([logits[:, 0].sum(), torch.tensor(float(len(labels)))]), float)
    own = OwnSums([OwnMetric("seen", seen, (2,))], 6)
    asked, at = asking.questions(*federation(), [0, 1, 2]), 0
    for inputs, labels in asked.batches():
        asking.add_own(own, asked, at, inputs // 2, labels)
        at += labels.shape[1]
    # which samples they are, added, and how many: 0 + 1 + 2 + 3 + 4, 5 + 6, 7
    assert [own.of(part)["seen"].tolist() for part in range(6)] == [[10, 5], [11, 2], [7, 1], [0, 0], [0, 0], [0, 0]]
