"""The server's maths against hand-worked numbers and a slow, obvious twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cwfed.core import mixing
from cwfed.core.errors import ConfigError


def two_step(models, shares, prior, personal):
    """The paper's two aggregations, written as its sums: the oracle of the lean form."""
    participants, classes = prior.shape
    class_models = []
    for j in range(classes):
        weights = [float(shares[i] * prior[i, j]) for i in range(participants)]
        if sum(weights) == 0:
            weights = [float(shares[i]) for i in range(participants)]
        class_models.append(sum(w / sum(weights) * models[i] for i, w in enumerate(weights)))
    return [sum(float(row[j]) * class_models[j] for j in range(classes)) for row in personal]


@st.composite
def problems(draw):
    """Shapes from hypothesis, numbers from a seed; some classes that nobody has."""
    participants, classes, clients, size = (draw(st.integers(1, n)) for n in (7, 6, 5, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    prior = rng.dirichlet(np.full(classes, draw(st.sampled_from([0.05, 0.5, 5.0]))), participants)
    if classes > 1 and draw(st.booleans()):
        prior[:, 0] = 0
        prior[:, -1] += 1e-3
        prior /= prior.sum(1, keepdims=True)
    personal = rng.dirichlet(np.ones(classes), clients)
    counts = rng.integers(1, 1000, participants)
    models = rng.normal(size=(participants, size))
    return tuple(map(torch.from_numpy, (models, counts, prior, personal)))


@settings(max_examples=200, deadline=None)
@given(problems())
def test_the_lean_form_is_the_two_step_form(problem):
    models, counts, prior, personal = problem
    shares = mixing.sample_weights(counts)
    q = mixing.class_weights(shares, prior)
    lean = mixing.mix(personal @ q.T, {"w": models})["w"]
    slow = two_step(models, shares, prior, personal)
    for row, expected in zip(lean, slow, strict=True):
        torch.testing.assert_close(row, expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_all_weights_sum_to_one(problem):
    _, counts, prior, personal = problem
    shares = mixing.sample_weights(counts)
    q = mixing.class_weights(shares, prior)
    a = personal @ q.T
    for sums in (shares.sum()[None], q.sum(0), a.sum(1)):
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=1e-12, atol=1e-12)
    assert (q >= 0).all()
    assert (a >= 0).all()


def test_class_weights_by_hand():
    # n = 30, 10 -> p = 3/4, 1/4. Class 0: 3/4*1/2 = 3/8 and 1/4*1 = 2/8 -> 3/5, 2/5. Class 1: only client 0.
    shares = mixing.sample_weights(torch.tensor([30, 10]))
    q = mixing.class_weights(shares, torch.tensor([[0.5, 0.5], [1.0, 0.0]], dtype=torch.float64))
    expected = torch.tensor([[0.6, 1.0], [0.4, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(q, expected)


def test_with_true_distributions_the_weights_are_the_counts_of_the_class():
    # q_ij = n_ij / sum_i n_ij, as the paper says below its Equation 6
    counts = torch.tensor([[2.0, 8.0], [6.0, 4.0], [0.0, 5.0]], dtype=torch.float64)
    q = mixing.class_weights(mixing.sample_weights(counts.sum(1)), counts / counts.sum(1, keepdim=True))
    torch.testing.assert_close(q, counts / counts.sum(0))


def test_a_class_that_nobody_has_is_made_by_everybody():
    shares = torch.tensor([0.25, 0.75], dtype=torch.float64)
    q = mixing.class_weights(shares, torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(q[:, 1], shares)


def test_average_by_hand():
    # 1/4 * (2, 4) + 3/4 * (6, 0) = (5, 1)
    stack = {"w": torch.tensor([[2.0, 4.0], [6.0, 0.0]])}
    out = mixing.average(stack, mixing.sample_weights(torch.tensor([1, 3])))
    assert out["w"].tolist() == [5.0, 1.0]


@pytest.mark.parametrize("columns", [1, 10, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_averages_are_each_one_to_the_bit(columns, dtype, monkeypatch):
    monkeypatch.setattr(mixing, "COLUMNS", 64)
    generator = torch.Generator().manual_seed(columns)
    stack = {"w": torch.randn(7, columns, 3, generator=generator, dtype=dtype), "b": torch.ones(7)}
    weights = torch.rand(5, 7, generator=generator, dtype=torch.float64)
    together = mixing.averages(stack, weights)
    assert len(together) == 5
    for made, row in zip(together, weights, strict=True):
        alone = mixing.average(stack, row)
        assert (made["w"].shape, made["b"].shape) == ((columns, 3), ())
        assert all(torch.equal(made[name], alone[name]) for name in stack)
        expected = torch.einsum("c,cij->ij", row, stack["w"].double()).to(dtype)
        torch.testing.assert_close(made["w"], expected, rtol=1e-5, atol=1e-5)
    assert mixing.averages({}, weights) == [{}] * 5


def test_a_stack_and_its_models():
    stack = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(2.0)}
    assert [{n: t.tolist() for n, t in model.items()} for model in mixing.unstacked(stack)] == [
        {"a": [0.0, 1.0, 2.0], "b": 0.0},
        {"a": [3.0, 4.0, 5.0], "b": 1.0},
    ]


def test_mix_keeps_names_shapes_and_dtypes():
    stack = {"a": torch.ones(3, 2, 2), "b": torch.ones(3, 4, dtype=torch.float64)}
    out = mixing.mix(torch.full((5, 3), 1 / 3, dtype=torch.float64), stack)
    assert {n: (tuple(t.shape), t.dtype) for n, t in out.items()} == {
        "a": ((5, 2, 2), torch.float32),
        "b": ((5, 4), torch.float64),
    }


def test_norm_distribution_by_hand():
    # norms 5, 0, 15 -> 1/4, 0, 3/4
    weight = torch.tensor([[3.0, 4.0], [0.0, 0.0], [9.0, 12.0]])
    assert mixing.norm_distribution(weight).tolist() == [0.25, 0.0, 0.75]


def test_norm_distribution_of_a_whole_stack():
    # norms 5, 15 and 2, 2 and 0, 0: each model for itself
    stack = torch.tensor([[[3.0, 4.0], [9.0, 12.0]], [[2.0, 0.0], [0.0, -2.0]], [[0.0, 0.0], [0.0, 0.0]]])
    assert mixing.norm_distribution(stack).tolist() == [[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]]


def test_gram_and_squared_distances_by_hand():
    # models (1, 2 | 3), (0, 1 | -1), (1, 2 | 3): inner products 14, 0 + 2 - 3 = -1, 2; distances 1 + 1 + 16 = 18
    stack = {"a": torch.tensor([[[1.0], [2.0]], [[0.0], [1.0]], [[1.0], [2.0]]]), "b": torch.tensor([3.0, -1.0, 3.0])}
    assert mixing.gram(stack).tolist() == [[14, -1, 14], [-1, 2, -1], [14, -1, 14]]
    assert mixing.gram(stack).dtype == torch.float64
    expected = torch.tensor([[0, 18, 0], [18, 0, 18], [0, 18, 0]], dtype=torch.float64)
    torch.testing.assert_close(mixing.squared_distances(stack), expected)


def test_squared_distances_are_never_negative():
    """Two pairs of models that differ in the last bit of three numbers: rounding is larger than their distance."""
    for seed in range(40):
        models = torch.randn(2, 50, generator=torch.Generator().manual_seed(seed))[[0, 0, 1, 1]]
        models[1::2, :3] = torch.nextafter(models[1::2, :3], torch.tensor(9.0))
        assert (mixing.squared_distances({"w": models}) >= 0).all()


def test_an_output_layer_of_zeros_says_nothing():
    weight = torch.zeros(4, 3, requires_grad=True)
    p = mixing.norm_distribution(weight)
    assert p.tolist() == [0.25] * 4
    (gradient,) = torch.autograd.grad(p[0], weight)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e15])
def test_norm_distribution_does_not_depend_on_scale(scale):
    weight = torch.tensor([[3.0, 4.0], [6.0, 8.0]]) * scale
    torch.testing.assert_close(mixing.norm_distribution(weight), torch.tensor([1 / 3, 2 / 3]))


def test_unmix_finds_the_shares_by_hand():
    parts = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[0.0, 2.0], [0.0, 0.0]]], dtype=torch.float64)
    mixed = torch.tensor([[[0.25, 1.5], [0.0, 0.0]], [[3.0, 0.0], [4.0, 0.0]]], dtype=torch.float64)
    shares, is_mixture = mixing.unmix(mixed, parts)
    torch.testing.assert_close(shares, torch.tensor([[0.25, 0.75], [3.0, 0.0]], dtype=torch.float64))
    assert is_mixture.tolist() == [True, False]  # of the second, 4 of a length of 5 are left over


def test_unmix_is_not_taken_in_by_what_is_merely_near():
    start, noise = torch.randn(50, dtype=torch.float64), torch.randn(4, 50, dtype=torch.float64)
    parts = start + 1e-3 * noise[:3]
    near = (start + 1e-3 * noise[3])[None]
    assert mixing.unmix(near, parts)[1].tolist() == [False]
    true = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64) @ parts
    shares, is_mixture = mixing.unmix(true.float().double(), parts)  # a model is float32
    assert is_mixture.tolist() == [True]
    torch.testing.assert_close(shares, torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64), atol=1e-3, rtol=0)
    assert mixing.unmix(true, start.expand(3, -1))[1].tolist() == [False]  # equal parts say nothing


def test_unmix_where_a_number_is_the_same_in_all_parts():
    parts = torch.tensor([[1.0, 2.0, 0.1, 5.0], [3.0, -1.0, 0.7, 5.0]], dtype=torch.float64)
    mixed = (torch.tensor([[0.3, 0.7]], dtype=torch.float64) @ parts).float().double()  # a model is float32
    shares, is_mixture = mixing.unmix(mixed, parts)
    assert is_mixture.tolist() == [True]
    torch.testing.assert_close(shares, torch.tensor([[0.3, 0.7]], dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_unmix_of_one_part(scale):
    """Nothing lies apart from a single part: only what is left over, as a share of its length, says what is a mixture."""
    part = scale * torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    aside = scale * torch.tensor([4.0, -3.0], dtype=torch.float64)
    mixed = torch.cat([2 * part, part + 1e-6 * aside, part.flip(1), part + 1e-3 * aside])
    shares, is_mixture = mixing.unmix(mixed, part)
    torch.testing.assert_close(shares[0], torch.tensor([2.0], dtype=torch.float64))
    assert is_mixture.tolist() == [True, True, False, False]


def test_unmix_has_no_answer_where_many_would_do():
    assert mixing.unmix(torch.ones(1, 2, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64)) is None
    shares, _ = mixing.unmix(torch.tensor([[3.0, 5.0]]), torch.eye(2))  # as many parts as numbers: one answer
    torch.testing.assert_close(shares, torch.tensor([[3.0, 5.0]]))


# --- a cap on one participant's share of a class


def test_the_cap_by_hand():
    # class 0: 0.7 is cut to 0.5; the 0.2 above it go to the others as 2 : 1. Class 1 is below the cap and stays.
    q = torch.tensor([[0.7, 0.2], [0.2, 0.3], [0.1, 0.5]], dtype=torch.float64)
    expected = torch.tensor([[0.5, 0.2], [1 / 3, 0.3], [1 / 6, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(mixing.capped(q, 0.5), expected)
    # cap 0.35: the second would get 0.65 * 2/3 = 0.433, so it is cut too and the third has the rest
    torch.testing.assert_close(mixing.capped(q, 0.35)[:, 0], torch.tensor([0.35, 0.35, 0.3], dtype=torch.float64))
    # cap 0.2 of three participants leaves 0.4 of the class to nobody: all are equal
    torch.testing.assert_close(mixing.capped(q, 0.2), torch.full_like(q, 1 / 3))
    # a class that one participant has alone: what it loses goes to the others equally
    alone = torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64)
    torch.testing.assert_close(mixing.capped(alone, 0.6), torch.tensor([[0.6], [0.2], [0.2]], dtype=torch.float64))
    # beside it, what nobody is above stays to the last bit: also a class that nobody has
    beside = torch.tensor([[0.1, 0.0], [0.2, 0.0], [0.3, 0.0]], dtype=torch.float64)
    assert torch.equal(mixing.capped(torch.cat([alone, beside], 1), 0.6)[:, 1:], beside)


@settings(max_examples=200, deadline=None)
@given(problems(), st.floats(0.01, 1.0))
def test_under_the_cap_columns_sum_to_one_and_nobody_is_above_it(problem, cap):
    _, counts, prior, _ = problem
    q = mixing.class_weights(mixing.sample_weights(counts), prior)
    held = mixing.capped(q, cap)
    torch.testing.assert_close(held.sum(0), torch.ones(held.shape[1], dtype=torch.float64), rtol=1e-9, atol=1e-9)
    assert (held >= 0).all()
    assert held.max() <= max(cap, 1 / len(q)) + 1e-9
    order = q[:, 0].argsort()
    assert (held[order, 0].diff() >= -1e-9).all()  # who had more has not less now
    assert mixing.capped(q, 1.0) is q


# --- median and trimmed mean


def naive_trimmed(values, weights, trim):
    """Every participant's value is a piece of the line from 0 to 1; the mean over the middle of that line."""
    pieces, at = [], 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        length = min(at + weight, 1 - trim) - max(at, trim)
        pieces.append((max(length, 0.0), value))
        at += weight
    return sum(length * value for length, value in pieces) / sum(length for length, _ in pieces)


@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from([0.0, 0.1, 0.25, 0.4, mixing.MEDIAN]))
def test_the_trimmed_mean_is_that_of_the_middle_of_a_line(problem, trim):
    models, counts, prior, _ = problem
    q = mixing.class_weights(mixing.sample_weights(counts), prior).T
    found = mixing.trimmed(q, {"w": models}, trim)["w"]
    for j, weights in enumerate(q.tolist()):
        for d in range(models.shape[1]):
            assert found[j, d].item() == pytest.approx(
                naive_trimmed(models[:, d].tolist(), weights, trim), rel=1e-6, abs=1e-9
            )
    if trim == 0:
        torch.testing.assert_close(found, mixing.mix(q, {"w": models})["w"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([5, 1, 3], [1, 1, 1], 3),
        ([4, 1, 2, 100], [1, 1, 1, 1], 3),  # two in the middle: (2 + 4) / 2
        ([1, 2, 3, 4, 5, 6], [1] * 6, 3.5),  # sixths do not add up to a half exactly
        ([1, 2, 1e30], [3, 3, 5], 2),  # 3/11, 6/11: the half is passed at 2, whatever the largest is
        ([1, 2, 1e30], [1, 1, 3], 1e30),  # who has more than half of the weight is the median
        ([7], [1], 7),
    ],
)
def test_the_weighted_median_by_hand(values, weights, expected):
    stack = {"w": torch.tensor(values, dtype=torch.float64)}
    share = torch.tensor([weights], dtype=torch.float64) / sum(weights)
    found = mixing.trimmed(share, stack, mixing.MEDIAN)["w"]
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64), rtol=1e-9, atol=0)


def test_sorting_in_parts_changes_nothing(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    stack = {"w": torch.randn(5, 7, 11, generator=generator), "one": torch.randn(5, generator=generator)}
    q = torch.rand(3, 5, generator=generator, dtype=torch.float64)
    whole = mixing.trimmed(q / q.sum(1, keepdim=True), stack, 0.2)
    monkeypatch.setattr(mixing, "SORTED", 12)
    parts = mixing.trimmed(q / q.sum(1, keepdim=True), stack, 0.2)
    assert [torch.equal(whole[name], parts[name]) for name in stack] == [True, True]
    assert (whole["w"].shape, whole["one"].shape, whole["w"].dtype) == ((3, 7, 11), (3,), torch.float32)


# --- a row per class


def test_class_average_by_hand():
    """Class 0: (1 * 2 + 3 * 6) / 4; class 1 has no weight and keeps its row. Tiny weights are weights, too."""
    values = torch.tensor([[[2.0], [1.0]], [[6.0], [1.0]]])
    old = torch.tensor([[0.0], [9.0]])
    assert mixing.class_average(values, torch.tensor([[1.0, 0.0], [3.0, 0.0]]), old).tolist() == [[5.0], [9.0]]
    assert mixing.class_average(values, torch.tensor([[1e-40, 0.0], [3e-40, 0.0]]), old)[0, 0] == pytest.approx(5)


# --- the mixture nearest to the origin


def test_nearest_to_origin_by_hand():
    two = mixing.nearest_to_origin(torch.diag(torch.tensor([1.0, 3.0]).double()))  # a^2 + 3 (1 - a)^2: a = 3/4
    torch.testing.assert_close(two, torch.tensor([0.75, 0.25]).double())
    behind = torch.tensor([[1.0, 2.0], [2.0, 4.0]]).double()  # the points 1 and 2 of a line
    assert mixing.nearest_to_origin(behind).tolist() == [1, 0]
    around = torch.tensor([[1.0, -2.0], [-2.0, 4.0]]).double()  # the points 1 and -2: the origin is between them
    torch.testing.assert_close(mixing.nearest_to_origin(around), torch.tensor([2 / 3, 1 / 3]).double())
    assert mixing.nearest_to_origin(torch.diag(torch.tensor([0.0, 1.0, 0.0]).double())).tolist() == [0.5, 0, 0.5]
    assert mixing.nearest_to_origin(torch.ones(1, 1).double()).tolist() == [1]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 12), st.integers(1, 8), st.sampled_from([1e-3, 1.0, 1e3]), st.integers(0, 2**32 - 1))
def test_nearest_to_origin_fulfils_karush_kuhn_tucker(points, size, ridge, seed):
    """The slope is equal on the support, and not smaller off it."""
    rng = np.random.default_rng(seed)
    p = torch.from_numpy(rng.normal(size=(points, size)) + rng.normal(size=size))
    q = p @ p.T + ridge * torch.diag(torch.from_numpy(rng.random(points) + 0.1))
    weights = mixing.nearest_to_origin(q)
    assert (weights >= 0).all()
    assert float(weights.sum()) == pytest.approx(1, abs=1e-9)
    slopes, level = q @ weights, float(weights @ q @ weights)
    torch.testing.assert_close(slopes[weights > 0], torch.full_like(slopes[weights > 0], level), rtol=1e-7, atol=1e-9)
    assert (slopes >= level - 1e-7 * abs(level)).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1.0, 1.0 + 1e-15, 3.0, 1e12]), min_size=2, max_size=8), st.integers(0, 9)
)
def test_nearest_to_origin_of_whatever_is_a_mixture(lengths, seed):
    """Points that coincide, lie on a line, are the origin or very far: weights that are finite, and no endless search."""
    direction = torch.from_numpy(np.random.default_rng(seed).normal(size=3))
    p = torch.tensor(lengths).double()[:, None] * direction
    weights = mixing.nearest_to_origin(p @ p.T)
    assert (weights >= 0).all()
    assert float(weights.sum()) == pytest.approx(1, abs=1e-9)


def test_what_is_cut_off_goes_to_the_others():
    """0.0005 is below 1e-3: the others are divided by 0.9995. The largest stays, however small."""
    cut = mixing.cut(torch.tensor([[0.9985, 0.001, 0.0005]]).double(), 1e-3)
    torch.testing.assert_close(cut, torch.tensor([[0.9985 / 0.9995, 0.001 / 0.9995, 0]]).double())
    many = torch.full((2000,), 1 / 2000).double()
    torch.testing.assert_close(mixing.cut(many, 1e-3), many)


@pytest.mark.parametrize("given", [5, None, ["a", "b"], "ab", [[1, 2]], [1], [1, -1], [0, 0], [1, float("nan")]])
def test_what_is_no_label_histogram_is_one_sentence(given):
    with pytest.raises(ConfigError, match="a label histogram here is 2 numbers >= 0, not all of them 0"):
        mixing.histogram(given, 2)


def test_no_averages_of_a_large_stack_are_none():
    assert mixing.averages({"w": torch.ones(2, mixing.COLUMNS + 1)}, torch.ones(0, 2)) == []
