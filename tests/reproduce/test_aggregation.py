"""The drawing of the two aggregations: its numbers by hand, and that it can be read."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from matplotlib.text import Text

from cwfed.reproduce import aggregation


def visible_texts(figure: Figure):
    """All words of a picture with their places in pixels."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    hidden = {text for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for text in axis.findobj(Text)}
    shown = [text for text in figure.findobj(Text) if text.get_text() and text not in hidden]  # all axes are off
    return [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in shown]


def check_that_words_can_be_read(figure: Figure):
    texts = visible_texts(figure)
    for text, box in texts:
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
        assert inside, f"{text} is cut off"
    for (one, box), (other, place) in combinations(texts, 2):
        assert not box.overlaps(place), f"{one} and {other} overlap"
    return [text for text, _ in texts]


def check_that_it_saves(figure: Figure, folder):
    for ending, start in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        path = folder / f"picture.{ending}"
        figure.savefig(path, dpi=110)
        assert path.read_bytes().startswith(start)


def test_weights_by_hand():
    # n_i = 3000, 2000, 1000 of 6000; q_ij = n_ij / sum_i n_ij with 3400 and 2600 samples of the classes
    p, prior, q = aggregation.weights()
    torch.testing.assert_close(p, torch.tensor([1 / 2, 1 / 3, 1 / 6]).double(), rtol=1e-6, atol=0)
    assert prior.tolist() == [[0.9, 0.1], [0.1, 0.9], [0.5, 0.5]]
    by_hand = [[2700 / 3400, 300 / 2600], [200 / 3400, 1800 / 2600], [500 / 3400, 500 / 2600]]
    torch.testing.assert_close(q, torch.tensor(by_hand, dtype=torch.float64))


def test_the_drawing_shows_every_weight_and_its_words_can_be_read():
    figure = aggregation.draw()
    assert len(figure.axes) == 4
    words = check_that_words_can_be_read(figure)
    p, prior, q = aggregation.weights()
    shown = [f"$p_{i + 1}$ = {p[i]:.2f}" for i in range(3)]
    for name, matrix in (("q", q), ("p", prior)):
        shown += [f"${name}_{{{i + 1}{j + 1}}}$ = {matrix[i, j]:.2f}" for i in range(3) for j in range(2)]
    assert set(shown) <= set(words)


def test_a_wider_arrow_is_a_larger_weight():
    (panel,) = (axes for axes in aggregation.draw().axes if "by_class" in axes.get_label())
    arrows = [patch for patch in panel.patches if isinstance(patch, FancyArrowPatch)]
    solid = sorted(a.get_linewidth() for a in arrows if a.get_linestyle() == "solid" and a.get_linewidth())
    assert solid == pytest.approx([0.5 + 6 * q for q in sorted(aggregation.weights().classes.flatten().tolist())])


def test_the_drawing_saves(tmp_path):
    check_that_it_saves(aggregation.draw(), tmp_path)
