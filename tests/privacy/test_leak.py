"""What an upload says about its sender's classes, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import rankdata, spearmanr
from sklearn.metrics import roc_auc_score

from cwfed.core.types import Task
from cwfed.privacy import leak

TASK = Task(2, 4, {"out": ("out.weight", "out.bias")}, "out")


def test_measures_by_hand():
    counts = np.array([[6, 2, 0, 0], [1, 1, 1, 1]])
    estimate = np.array([[0.5, 0.1, 0.3, 0.1], [0.4, 0.3, 0.2, 0.1]])
    found = leak.measure(counts, {"an estimate": estimate})["an estimate"]
    # client 0: p = .75 .25 0 0; differences .25 .15 .3 .1 = .8, half of it .4; client 1: .15 .05 .05 .15 = .4, .2
    assert found.error == [0.4, 0.2]
    assert found.samples == pytest.approx((8 * 0.4 + 4 * 0.2) / 2)
    # client 0: absent .3 and .1 against present .5 and .1: .3 < .5; .1 < .5; .3 > .1; .1 = .1 counts half: 2.5 of 4
    assert found.auc == [0.625, None]  # client 1 has all classes
    # ranks of p: 4 3 1.5 1.5, of p~: 4 1.5 3 1.5; less 2.5: 1.5 .5 -1 -1 and 1.5 -1 .5 -1: 2.25 -.5 -.5 +1 = 2.25 of 4.5
    assert found.rank == [0.5, None]  # client 1's p does not vary
    # 1/2K = .125: of the two absent classes .1 is found; of the six present ones .1 and .1 are mistaken
    assert (found.found, found.mistaken) == (0.5, pytest.approx(2 / 6))


def test_ranks_and_rank_correlation_are_scipys():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 5, (20, 12)).astype(float), rng.random((20, 12)).round(1)
    assert leak.ranks(a).tolist() == rankdata(a, axis=1).tolist()
    for one, other, found in zip(a, b, leak.rank_correlation(leak.ranks(a), leak.ranks(b)), strict=True):
        assert found == pytest.approx(spearmanr(one, other).statistic)
    assert leak.ranks(np.ones((2, 1))).tolist() == [[1.0], [1.0]]
    assert np.isnan(leak.rank_correlation(np.ones((1, 3)), np.ones((1, 3)))).all()


def test_separation_is_sklearns_area_under_the_curve():
    rng = np.random.default_rng(0)
    estimate, absent = rng.random((20, 12)).round(1), rng.random((20, 12)) < 0.5
    for one, lacking, found in zip(estimate, absent, leak.separation(leak.ranks(estimate), absent), strict=True):
        assert found == pytest.approx(roc_auc_score(~lacking, one))
    assert np.isnan(leak.separation(np.ones((2, 3)), np.array([[True] * 3, [False] * 3]))).all()


def test_lengths_of_row_updates_by_hand():
    """Rows that moved by 3, 4; 0, 0; 0, 0; 5, 12: lengths 5, 0, 0, 13 of 18."""
    sent = {"out.weight": torch.ones(1, 4, 2), "out.bias": torch.zeros(1, 4)}
    moved = torch.tensor([[[3.0, 4.0], [0, 0], [0, 0], [5, 12]]])
    uploaded = {"out.weight": sent["out.weight"] + moved, "out.bias": torch.zeros(1, 4)}
    found = leak.estimates(uploaded, sent, {}, TASK)["lengths"]
    torch.testing.assert_close(found, torch.tensor([[5 / 18, 0, 0, 13 / 18]], dtype=torch.float64))
    assert "lengths" not in leak.estimates(uploaded, None, {}, TASK)


def test_a_perfect_estimate_leaks_all_and_a_uniform_one_nothing():
    counts = np.array([[5, 3, 0, 0]])
    found = leak.measure(counts, {"perfect": counts / 8, "uniform": np.full((1, 4), 0.25)})
    perfect, uniform = found["perfect"], found["uniform"]
    assert (perfect.error, perfect.rank, perfect.auc, perfect.found, perfect.mistaken) == ([0], [1], [1], 1, 0)
    assert (uniform.error, uniform.rank, uniform.auc, uniform.found, uniform.mistaken) == ([0.5], [None], [0.5], 0, 0)


def test_several_estimates_are_measured_as_each_alone():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 4, (6, 5)) + np.eye(6, 5, dtype=int)
    counts[5, 0] += 1
    found = {name: rng.dirichlet(np.ones(5), 6).round(2) for name in ("norms", "change", "lengths")}
    together = leak.measure(counts, found)
    assert together == {name: leak.measure(counts, {name: one})[name] for name, one in found.items()}
    assert leak.measure(counts, {}) == {}


def test_estimates_by_hand():
    weight = torch.tensor([[[3.0, 4.0], [0.0, 0.0], [0.0, 5.0], [0.0, 0.0]]])
    uploaded = {"out.weight": weight, "out.bias": torch.tensor([[1.0, 0.0, 0.5, -0.5]]), "body": torch.zeros(1, 3)}
    sent = {"out.weight": torch.zeros_like(weight), "out.bias": torch.tensor([[0.0, 0.5, 0.5, 0.0]])}
    found = leak.estimates(uploaded, sent, {}, TASK)
    assert found["norms"].tolist() == [[0.5, 0.0, 0.5, 0.0]]
    # changes 1 -.5 0 -.5; above the least 1.5 0 .5 0
    assert found["change"].tolist() == [[0.75, 0.0, 0.25, 0.0]]
    del uploaded["out.bias"], sent["out.bias"]  # row sums 7 0 5 0
    assert leak.estimates(uploaded, sent, {}, TASK)["change"][0].tolist() == pytest.approx([7 / 12, 0, 5 / 12, 0])
    assert list(leak.estimates(uploaded, None, {}, TASK)) == ["norms"]
    counts = {"class_counts": torch.tensor([[3.0, 1.0, 0.0, 0.0]])}
    assert leak.estimates({"body": torch.zeros(1, 3)}, None, counts, TASK)["sent"].tolist() == [[0.75, 0.25, 0, 0]]


def test_no_change_says_nothing():
    assert leak.above_least(torch.ones(1, 4)).tolist() == [[0.25] * 4]
