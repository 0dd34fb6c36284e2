from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cwfed import models
from cwfed.algorithms.fednh import FedNH, PrototypeHead
from cwfed.core.errors import ConfigError
from cwfed.core.types import Uploads
from cwfed.federation.simulation import Simulation
from cwfed.models import InputShape
from cwfed.runs import session
from cwfed.runs.predict import load_model
from tests.algorithms.helpers import task
from tests.conftest import finish, small


def test_prototypes_move_by_hand():
    # class 0: client 0 has 3 samples at (1,0), client 1 one at (0,1) -> (3,1)/4 -> direction (3,1)/sqrt(10)
    # new = normalise(0.9 * (0,1) + 0.1 * (3,1)/sqrt(10)); class 1 is held by nobody and stays
    old = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    sent = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [0.0, 0.0]]])
    moved = FedNH(rho=0.9).move(old, sent, torch.tensor([[3.0, 0.0], [1.0, 0.0]]))
    expected = F.normalize(torch.tensor([0.3, 0.9 * math.sqrt(10) + 0.1]), dim=0)
    torch.testing.assert_close(moved[0], expected)
    assert moved[1].tolist() == [1.0, 0.0]


def test_the_body_is_a_plain_mean_whatever_the_sample_counts():
    algorithm = FedNH()
    state = algorithm.init(lambda c: {"body": torch.zeros(1), "layer.weight": torch.eye(2)}, task(2))
    extras = {"prototypes": torch.eye(2).repeat(2, 1, 1), "class_counts": torch.ones(2, 2)}
    up = Uploads((0, 1), {"body": torch.tensor([[2.0], [6.0]])}, torch.tensor([1, 99]), extras)
    assert algorithm.aggregate(state, up)["model"]["body"].item() == 4.0


def test_logits_are_scaled_cosines():
    head = PrototypeHead(2, 2, scale=30.0, learnable=False)
    head.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 5.0]]))
    assert head(torch.tensor([[3.0, 4.0]])).tolist() == [[pytest.approx(18.0), pytest.approx(24.0)]]


def test_prototypes_start_orthogonal_and_uniform_where_that_is_impossible():
    few = PrototypeHead(8, 5, 30.0, False).weight
    torch.testing.assert_close(few @ few.T, torch.eye(5), atol=1e-6, rtol=0)
    many = PrototypeHead(3, 200, 30.0, False).weight
    torch.testing.assert_close(many.norm(dim=1), torch.ones(200))
    assert many.mean(0).norm() < 0.25


@pytest.mark.parametrize("learn_scale", ["false", "true"])
def test_prototypes_stay_on_the_sphere_and_are_not_trained_by_gradient(learn_scale):
    settings = ["algorithm.name=fednh", f"algorithm.learn_scale={learn_scale}", "train.rounds=4"]
    simulation = Simulation(small(*settings))
    progress, _ = finish(simulation)
    weight = progress.server["model"]["output.weight"]
    torch.testing.assert_close(weight.norm(dim=1), torch.ones(10))
    fixed, _ = finish(Simulation(small(*settings, "algorithm.rho=1")))
    torch.testing.assert_close(fixed.server["model"]["output.weight"], simulation.fresh(0)["output.weight"])
    assert ("output.scale" in progress.server["model"]) == (learn_scale == "true")


def test_the_scale_is_learnt_from_one_and_averaged_like_the_body():
    simulation = Simulation(small("algorithm.name=fednh", "train.rounds=3"))
    assert simulation.fresh(0)["output.scale"].item() == 1.0
    progress, _ = finish(simulation)
    assert progress.server["model"]["output.scale"].item() != 1.0
    algorithm = FedNH()
    state = algorithm.init(lambda c: {"layer.scale": torch.tensor(1.0), "layer.weight": torch.eye(2)}, task(2))
    extras = {"prototypes": torch.eye(2).repeat(2, 1, 1), "class_counts": torch.ones(2, 2)}
    up = Uploads((0, 1), {"layer.scale": torch.tensor([2.0, 5.0])}, torch.tensor([1, 99]), extras)
    assert algorithm.aggregate(state, up)["model"]["layer.scale"].item() == 3.5


def test_a_fixed_scale_is_no_parameter():
    simulation = Simulation(small("algorithm.name=fednh", "algorithm.learn_scale=false", "algorithm.scale=30"))
    progress, _ = finish(simulation)
    assert "output.scale" not in progress.server["model"]
    assert simulation.template.output.scale == 30.0


def test_classes_nobody_has_keep_their_prototype():
    simulation = Simulation(small("algorithm.name=fednh", "data.clients=3"))  # they hold the digits 0 to 5
    progress, _ = finish(simulation)
    before, after = simulation.fresh(0)["output.weight"], progress.server["model"]["output.weight"]
    assert torch.equal(before[6:], after[6:])
    assert not torch.equal(before[:6], after[:6])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp", InputShape((7,))),
        ("cnn", InputShape((1, 8, 8))),
        ("resnet18", InputShape((3, 32, 32))),
        ("fasttext", InputShape((9,), 50)),
    ],
)
def test_the_head_is_replaced_in_every_model(name, shape):
    model = models.build(name, shape, 4, {})
    adapted = FedNH().adapt(model, model.output_layer)
    x = torch.zeros(2, *shape.dims, dtype=torch.long) if shape.vocabulary else torch.randn(2, *shape.dims)
    assert adapted.eval()(x).abs().max() <= 30.0001
    assert isinstance(adapted.get_submodule(model.output_layer), PrototypeHead)


def test_a_nested_output_layer_is_replaced_in_its_place():
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 4)), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    FedNH().adapt(model, "1.1")
    assert isinstance(model[1][1], PrototypeHead)


def test_its_model_loads_back_with_its_head(tmp_path):
    session.run(small("algorithm.name=fednh", "algorithm.learn_scale=true"), tmp_path / "run")
    model = load_model(tmp_path / "run", client=0)
    assert isinstance(model.network.output, PrototypeHead)


def test_impossible_settings():
    with pytest.raises(ConfigError, match="rho must lie from 0 to 1"):
        FedNH(rho=1.5)
