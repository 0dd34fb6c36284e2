from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from cwfed import models
from cwfed.core import plugins
from cwfed.core.errors import ConfigError
from cwfed.engine.worker import descend
from cwfed.models import InputShape, build, task_of
from cwfed.models.conv import Conv2d
from cwfed.models.fasttext import FastText
from cwfed.runs import session
from tests.conftest import small

COLOUR = InputShape((3, 32, 32))


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("classes", "parameters"), [(10, 11_181_642), (100, 11_227_812), (1000, 11_689_512)])
def test_resnet18_has_the_published_number_of_parameters(classes, parameters):
    with torch.device("meta"):
        assert count(build("resnet18", COLOUR, classes, {})) == parameters


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        # conv1 (c*25+1)*32, conv2 (32*25+1)*64, fc (64*left^2+1)*512, output 513*10
        ((1, 28, 28), 832 + 51_264 + 1025 * 512 + 5130),
        ((3, 32, 32), 2432 + 51_264 + 1601 * 512 + 5130),
        ((3, 64, 64), 2432 + 51_264 + 10_817 * 512 + 5130),
    ],
)
def test_cnn_is_the_paper_s(shape, parameters):
    assert count(build("cnn", InputShape(shape), 10, {})) == parameters


@pytest.mark.parametrize("size", [(4, 4), (8, 8), (15, 40), (16, 16), (17, 23), (33, 20), (64, 64)])
def test_cnn_takes_any_size(size):
    model = build("cnn", InputShape((2, *size)), 5, {})
    assert model(torch.zeros(3, 2, *size)).shape == (3, 5)


def test_pooling_before_relu_changes_nothing():
    torch.manual_seed(0)
    model = build("cnn", COLOUR, 10, {})
    x = torch.randn(4, 3, 32, 32)
    y = nn.functional.max_pool2d(nn.functional.relu(model.conv1(x)), 2)
    y = nn.functional.max_pool2d(nn.functional.relu(model.conv2(y)), 2)
    y = model.output(nn.functional.relu(model.fc(y.flatten(1))))
    assert torch.equal(model(x), y)


def test_mlp_of_several_layers():
    deep = build("mlp", InputShape((9,)), 3, {"hidden": 5, "depth": 3})
    assert [name for name, _ in deep.named_children()] == ["fc", "fc2", "fc3", "output"]
    assert deep(torch.zeros(2, 9)).shape == (2, 3)
    assert list(task_of(deep, 2, 3).layers) == ["fc", "fc2", "fc3", "output"]


def test_resnet18_of_a_quarter_of_the_channels():
    narrow = build("resnet18", COLOUR, 10, {"width": 16})
    assert narrow.output.in_features == 128
    assert count(narrow) < count(build("resnet18", COLOUR, 10, {})) / 15
    assert narrow(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_resnet18_forward_on_small_images():
    assert build("resnet18", InputShape((3, 64, 64)), 7, {})(torch.zeros(2, 3, 64, 64)).shape == (2, 7)


def test_fasttext_ignores_padding():
    torch.manual_seed(0)
    model = build("fasttext", InputShape((6,), vocabulary=20), 4, {})
    short, padded = torch.tensor([[3, 4]]), torch.tensor([[3, 4, 0, 0, 0, 0]])
    assert torch.equal(model(short), model(padded))
    assert model(torch.zeros(1, 6, dtype=torch.long)).isfinite().all()  # a text without any word
    loss = model(padded).sum()
    loss.backward()
    assert model.embedding.weight.grad[0].abs().sum() == 0


def test_layers_are_listed_from_input_to_output():
    assert list(task_of(build("cnn", COLOUR, 10, {}), 5, 10).layers) == ["conv1", "conv2", "fc", "output"]
    task = task_of(build("resnet18", COLOUR, 10, {}), 5, 10)
    assert task.select(("layer4",))[0] == "layer4.0.conv1.weight"
    assert task.output_weight == "output.weight"


def test_auto_goes_by_the_data():
    assert [models.default_for(InputShape(*s)) for s in [((3, 8, 8),), ((5,),), ((9,), 100)]] == [
        "cnn",
        "mlp",
        "fasttext",
    ]


def no_name(shape, classes):
    return nn.Linear(4, classes)


def wrong_name(shape, classes):
    model = nn.Sequential(nn.Linear(4, classes))
    model.output_layer = "head"
    return model


def wrong_size(shape, classes):
    model = nn.Sequential(nn.Linear(4, classes + 1))
    model.output_layer = "0"
    return model


def no_module(shape, classes):
    return "a network"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_name", "does not name its output layer"),
        ("wrong_name", "has no output layer 'head'; its linear layers: 0"),
        ("wrong_size", "must be a Linear with 3 outputs"),
        ("no_module", "did not give a torch.nn.Module"),
    ],
)
def test_a_model_whose_output_layer_cannot_be_found(name, says):
    with pytest.raises(ConfigError, match=says):
        build(f"{__name__}:{name}", InputShape((4,)), 3, {})


@pytest.mark.parametrize(
    ("name", "shape", "options", "says"),
    [
        ("cnm", COLOUR, {}, "did you mean cnn"),
        ("cnn", InputShape((5,)), {}, "needs images, these data are vectors"),
        ("cnn", InputShape((1, 3, 3)), {}, "at least 4x4"),
        ("resnet18", InputShape((9,), 50), {}, "needs images, these data are text"),
        ("resnet18", COLOUR, {"width": 0}, "width must be positive"),
        ("mlp", COLOUR, {"depth": 0}, "depth must be positive"),
        ("fasttext", COLOUR, {}, "needs text"),
        ("mlp", InputShape((9,), 50), {}, "needs vectors or images"),
        ("mlp", InputShape((9,)), {"hiden": 3}, "did you mean hidden"),
        ("mlp", InputShape((9,)), {"hidden": "abc"}, "cannot be built with"),
        ("mlp", InputShape((9,)), {"hidden": -5}, "cannot be built with"),
        ("builtins:int", InputShape((9,)), {}, "not a function of"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_model_that_does_not_fit(name, shape, options, says):
    with pytest.raises(ConfigError, match=says):
        build(name, shape, 10, options)


@pytest.mark.parametrize(
    ("before", "after", "kernel", "stride", "padding", "side"),
    [
        (6, 5, 3, 1, 1, 2),
        (4, 8, 3, 2, 1, 4),
        (4, 8, 1, 2, 0, 4),
        (3, 4, 7, 2, 3, 2),
        (5, 6, 3, 1, 1, 1),
        (4, 4, 3, 1, 1, 9),
    ],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolution_of_few_pixels_is_the_convolution(before, after, kernel, stride, padding, side, layout):
    ours = Conv2d(before, after, kernel, stride, padding).to(memory_format=layout)
    torchs = torch.nn.Conv2d(before, after, kernel, stride, padding, bias=False).to(memory_format=layout)
    torchs.load_state_dict(ours.state_dict())
    x = torch.randn(3, before, side, side).to(memory_format=layout).requires_grad_()
    a, b = ours(x), torchs(x)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(a)
    for ga, gb in zip(
        torch.autograd.grad(a, (x, ours.weight), weights),
        torch.autograd.grad(b, (x, torchs.weight), weights),
        strict=True,
    ):
        torch.testing.assert_close(ga, gb, rtol=1e-4, atol=1e-5)


def test_fasttexts_sparse_gradient_moves_as_the_dense_one_to_the_bit():
    shape = InputShape((9,), 50)
    sparse = FastText(shape, 3)
    dense = copy.deepcopy(sparse)
    dense.embedding.sparse = False
    tokens = torch.randint(0, 12, (10, 9))  # words repeat within the batch, and some are padding
    for model in (sparse, dense):
        parameters = list(model.parameters())
        for _ in range(5):
            loss = model(tokens).square().sum()
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                descend(parameters, gradients, 0.01)
    for name, w in sparse.state_dict().items():
        assert torch.equal(w, dense.state_dict()[name]), name
    assert torch.equal(sparse.embedding.weight[12:], dense.embedding.weight[12:])


class Net(nn.Module):
    """A network in which a layer may have a second name, or a weight that is another layer's, too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 10)
        self.output_layer = "head"
        if kind == "attribute":
            self.again = self.middle
        if kind == "list":
            self.layers = nn.ModuleList([self.middle, self.middle])
        if kind == "weight":
            self.other = nn.Linear(8, 8, bias=False)
            self.other.weight = self.middle.weight
        self.kind = kind

    def forward(self, x):
        hidden = self.middle(self.body(x.flatten(1)).relu()).relu()
        if self.kind == "list":
            return self.head(self.layers[1](hidden).relu())
        if self.kind == "weight":
            return self.head((self.other(hidden) + self.middle.bias).relu())
        return self.head((self.again if self.kind == "attribute" else self.middle)(hidden).relu())


def plain(shape, classes, hidden=0):
    return Net("plain")


def attribute(shape, classes, hidden=0):
    return Net("attribute")


def in_a_list(shape, classes, hidden=0):
    return Net("list")


def tied(shape, classes, hidden=0):
    return Net("weight")


@pytest.mark.parametrize("other", ["attribute", "in_a_list", "tied"])
@pytest.mark.parametrize(("algorithm", "engine"), [("ditto", "loop"), ("fedala", "loop"), ("ditto", "vmap")])
def test_a_layer_with_two_names_is_trained_as_with_one(algorithm, engine, other, monkeypatch):
    """torch leaves the tensors of one client in such a layer: methods that ask the network at other weights had wrong numbers, the
    batched step a traceback. A personal model with one, or with a tied weight, could not be made.
    """
    drawn = nn.Linear.reset_parameters
    monkeypatch.setattr(nn.Linear, "reset_parameters", lambda layer: drawn(layer) if layer.bias is not None else None)
    settings = [f"algorithm.name={algorithm}", f"run.engine={engine}", "train.rounds=3"]
    one, two = (session.run(small(f"model.name={__name__}:{net}", *settings)) for net in ("plain", other))
    assert [row.loss for row in two.history] == pytest.approx([row.loss for row in one.history], rel=1e-5)
    inputs = torch.zeros(2, 8, 8, 1).numpy()
    assert two.model(0).probabilities(inputs) == pytest.approx(one.model(0).probabilities(inputs), abs=1e-5)


def test_only_what_has_tensors_and_two_names_gets_one():
    relu, layer = nn.ReLU(), nn.Linear(4, 4)
    network = nn.Sequential(layer, relu, nn.Sequential(layer, relu), nn.Linear(4, 2))
    network.output_layer = "3"
    build_of(network)
    assert list(dict(network.named_parameters(remove_duplicate=False))) == [
        "0.weight",
        "0.bias",
        "3.weight",
        "3.bias",
    ]
    assert network[2][0].weight is layer.weight
    assert (network[1], network[2][1]) == (relu, relu)
    copied = copy.deepcopy(network)
    assert copied[2][0].weight is copied[0].weight is not layer.weight
    x = torch.randn(3, 4)
    assert torch.equal(copied(x), network(x))


def test_a_layer_that_a_container_has_twice_is_what_it_was_for_the_network_s_own_code():
    """len, iteration and [] are looked up in the class."""
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    network = nn.Module()
    network.blocks, network.end, network.output_layer = nn.ModuleList([block, block]), nn.Linear(4, 2), "end"
    again = build_of(network).blocks[1]
    assert (again[0], len(again), list(again), bool(again)) == (block[0], 2, list(block), True)
    assert again.training is True


def test_a_weight_that_two_layers_share_is_the_first_one_s_and_never_the_output_layer_s():
    """Methods that go through all parameters looked for it under both names."""
    network = Net("weight")
    assert task_of(network, 2, 10).parameters == tuple(dict(network.named_parameters()))
    outer, inner = nn.Linear(4, 4), nn.Linear(4, 4)
    outer.weight = inner.weight
    network = nn.Sequential(inner, outer)
    network.output_layer = "1"
    with pytest.raises(ConfigError, match=r"output layer '1' .* must have a weight of its own"):
        build(plugins.give(lambda shape, classes: network, "shared"), InputShape((4,)), 4, {})


def build_of(network: nn.Module) -> nn.Module:
    given = plugins.give(lambda shape, classes: network, "network")
    return build(given, InputShape((4,)), 2, {})
