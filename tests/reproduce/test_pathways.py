"""The motivational example: the paper's data, its equations written as loops, its claims, its picture."""

from __future__ import annotations

import json

import pytest
import torch

from cwfed.reproduce import pathways, pathways_drawing
from cwfed.reproduce.pathways import Settings
from tests.conftest import leaves
from tests.reproduce.test_aggregation import check_that_it_saves, check_that_words_can_be_read

QUICK = Settings(epochs=1, batch=200)
MODELS = ("local", "fedavg", "local_wdr", "class_models", "personal", "p", "p_tilde", "p_tilde_wdr")


@pytest.fixture(scope="module")
def quick() -> pathways.Pathways:
    return pathways.compute(0, QUICK)


@pytest.fixture(scope="module", params=[0, 1, 2])
def found(request) -> pathways.Pathways:
    """As in the picture."""
    return pathways.compute(request.param)


def bits(found):
    return leaves({name: getattr(found, name) for name in MODELS})


def test_the_data_are_the_papers():
    labels = [pathways.samples(0, client, Settings())[1] for client in range(3)]
    assert [of.bincount().tolist() for of in labels] == [[2700, 300], [200, 1800], [500, 500]]
    assert torch.cat(labels).bincount().tolist() == [3400, 2600]


def test_the_two_clouds_lie_as_far_apart_as_set():
    settings = Settings(distance=6.0, noise=0.5)
    data = [pathways.samples(0, client, settings) for client in range(3)]
    inputs, labels = (torch.cat(parts) for parts in zip(*data, strict=True))
    assert inputs.shape == (6000, 3)
    centres = [inputs[labels == j].mean(0) for j in (0, 1)]
    assert torch.dist(*centres) == pytest.approx(6, abs=0.1)
    assert inputs[labels == 0].std(0).tolist() == pytest.approx([0.5] * 3, abs=0.05)


def test_the_same_seed_gives_the_same_bits_whatever_torch_did_before(quick):
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.manual_seed(123)
    try:
        again = pathways.compute(0, QUICK)
        assert bits(again) == bits(quick)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_rng_state(state)
    assert bits(pathways.compute(1, QUICK)) != bits(quick)


def test_a_coefficient_of_zero_is_training_without_wdr():
    found = pathways.compute(0, Settings(epochs=1, batch=200, wdr=0.0))
    assert leaves(found.local) == leaves(found.local_wdr)


def test_the_models_are_the_papers_equations(quick):
    """Every sum written out, in Python's floats."""
    counts = [3000, 2000, 1000]
    p = [n / sum(counts) for n in counts]
    norms = [[sum(w**2 for w in row) ** 0.5 for row in model] for model in quick.local_wdr["output.weight"].tolist()]
    p_tilde = [[norm / sum(rows) for norm in rows] for rows in norms]
    for name, trained in quick.local_wdr.items():
        size = trained[0].numel()
        models = [w.flatten().tolist() for w in trained]
        of_class = [[0.0] * size for _ in range(2)]
        for j in range(2):
            total = sum(p[i] * p_tilde[i][j] for i in range(3))
            for i in range(3):
                for k in range(size):
                    of_class[j][k] += p[i] * p_tilde[i][j] / total * models[i][k]
        for j in range(2):
            assert quick.class_models[name][j].flatten().tolist() == pytest.approx(of_class[j], rel=1e-5, abs=1e-6)
        for i in range(3):
            mixed = [sum(p_tilde[i][j] * of_class[j][k] for j in range(2)) for k in range(size)]
            assert quick.personal[name][i].flatten().tolist() == pytest.approx(mixed, rel=1e-5, abs=1e-6)
        plain = [w.flatten().tolist() for w in quick.local[name]]
        average = [sum(p[i] * plain[i][k] for i in range(3)) for k in range(size)]
        assert quick.fedavg[name].flatten().tolist() == pytest.approx(average, rel=1e-5, abs=1e-6)


def test_the_papers_claims_hold(found):
    assert all(claim.holds for claim in pathways.claims(found)), pathways.claims(found)


def test_with_wdr_the_output_rows_say_the_classes_and_without_they_do_not(found):
    assert (found.p_tilde_wdr - found.p).abs().max() < 0.03
    assert (found.p_tilde - found.p)[:2].abs().min() > 0.3


def test_the_critical_weights_are_the_eight_largest(quick):
    for row in pathways.panels(quick):
        for panel in row:
            masks = pathways.critical(panel.model)
            mask = torch.cat([masks[name].flatten() for name in pathways.WEIGHTS])
            sizes = torch.cat([panel.model[name].flatten() for name in pathways.WEIGHTS]).abs()
            assert (len(mask), int(mask.sum())) == (20, 8)
            assert sizes[mask].min() >= sizes[~mask].max()


def test_critical_weights_by_hand():
    # 1 .. 12 in the hidden layer, 0.5 and -20 .. in the output layer: 9 .. 12, and -20, 21 | -22, 23
    output = torch.tensor([[-20.0, 0.5, 0.5, 21.0], [-22.0, 0.5, 23.0, 0.5]])
    model = {"fc.weight": torch.arange(1.0, 13).view(4, 3), "output.weight": output}
    assert pathways.critical(model)["fc.weight"].nonzero().tolist() == [[2, 2], [3, 0], [3, 1], [3, 2]]
    assert pathways.into_outputs(model) == [2, 2]


def test_the_numbers_are_json_and_those_of_the_models(quick):
    facts = pathways.numbers(quick)
    assert json.loads(json.dumps(facts)) == facts
    assert len(facts["panels"]) == 4 + 5 + 3
    assert facts["panels"]["w_2^L"]["p"] == [0.1, 0.9]
    assert facts["panels"][r"\tilde{w}_1^L"]["p_tilde"] == pytest.approx(quick.p_tilde_wdr[0].tolist())
    assert facts["panels"][r"\tilde{w}_2^G"]["p"] is None
    assert set(facts["claims"]) == {
        "both_outputs_without_wdr", "aligned_with_wdr", "class_models_mirror_majority", "personal_models_stay_close",
    }  # fmt: skip


def test_the_picture_has_a_network_for_every_model_and_its_words_can_be_read(quick):
    figure = pathways_drawing.draw(quick)
    panels = {panel.name: panel for row in pathways.panels(quick) for panel in row}
    networks = [axes for axes in figure.axes if axes.get_label() in panels]
    assert [axes.get_label() for axes in networks] == list(panels)
    check_that_words_can_be_read(figure)
    for axes in networks:
        colours = [line.get_color() for line in axes.lines]
        assert len(colours) == 20
        assert sum(colour in (pathways_drawing.POSITIVE, pathways_drawing.NEGATIVE) for colour in colours) == 8
        dashed = [line.get_color() for line in axes.lines if line.get_linestyle() == "--"]
        assert dashed == [colour for colour in colours if colour == pathways_drawing.NEGATIVE]


def test_a_wider_line_is_a_larger_weight(quick):
    figure = pathways_drawing.draw(quick)
    (panel,) = pathways.panels(quick)[0][3:]
    (axes,) = (axes for axes in figure.axes if axes.get_label() == panel.name)
    widths = [line.get_linewidth() for line in axes.lines]  # in the order of the weights
    weights = torch.cat([panel.model[name].flatten() for name in pathways.WEIGHTS]).abs().tolist()
    strongest = sorted(range(20), key=lambda k: -weights[k])[:8]
    assert [widths[k] for k in strongest] == sorted((widths[k] for k in strongest), reverse=True)
    assert all(widths[k] == 0.5 for k in range(20) if k not in strongest)


def test_the_picture_saves(quick, tmp_path):
    check_that_it_saves(pathways_drawing.draw(quick), tmp_path)
