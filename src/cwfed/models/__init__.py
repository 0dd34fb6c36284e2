"""The models: any module whose attribute `output_layer` names its last linear layer, which has one row per class."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from cwfed.core.errors import ConfigError, CwfedError, did_you_mean
from cwfed.core.plugins import load_object, why
from cwfed.core.shape import InputShape
from cwfed.core.types import Norm, Params, Task
from cwfed.models.cnn import CNN
from cwfed.models.fasttext import FastText
from cwfed.models.mlp import MLP
from cwfed.models.resnet18 import ResNet18

Builder = Callable[..., nn.Module]

NORMS: dict[Norm, tuple[type[nn.Module], ...]] = {
    "batch": (_BatchNorm,),
    "group": (nn.GroupNorm,),
    "layer": (nn.LayerNorm, nn.RMSNorm),
    "instance": (_InstanceNorm,),
}
"""The types of norm layers of each kind."""

MODELS: dict[str, Builder] = {"cnn": CNN, "resnet18": ResNet18, "fasttext": FastText, "mlp": MLP}

__all__ = [
    "MODELS",
    "Attached",
    "InputShape",
    "attach",
    "attached",
    "build",
    "default_for",
    "detach",
    "holder",
    "task_of",
]


def default_for(shape: InputShape) -> str:
    """The model that `model.name = "auto"` stands for: fasttext for text, cnn for images, else mlp."""
    if shape.vocabulary:
        return "fasttext"
    return "cnn" if len(shape.dims) == 3 else "mlp"


def build(name: str, shape: InputShape, classes: int, options: Mapping[str, Any]) -> nn.Module:
    """A model by name, or the user's own "module:function", called as function(shape, classes, **options)."""
    if ":" in name:
        builder = load_object(name, "model")
    elif name in MODELS:
        builder = MODELS[name]
    else:
        raise ConfigError(f"unknown model {name!r}: {did_you_mean(name, MODELS)}")
    if not callable(builder):
        raise ConfigError(f"model {name!r} is not a function of (shape, classes)")
    try:
        parameters = list(inspect.signature(builder).parameters.values())[2:]
    except ValueError:
        raise ConfigError(f"model {name!r} is not a function of (shape, classes)") from None
    known = [p.name for p in parameters]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for option in options:
        if option not in known and not takes_any:
            what = did_you_mean(option, known) if known else "it has none"
            raise ConfigError(f"unknown setting model.options.{option} for {name}: {what}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # refused below, in our words
            model: nn.Module = builder(shape, classes, **options)
    except CwfedError:
        raise
    except (Exception, SystemExit) as error:  # the user's code, or settings that torch refuses in its own words
        given = f" with {dict(options)}" if options else ""
        raise ConfigError(f"model {name!r} cannot be built{given}: {why(error)}") from None
    output_layer(model, classes, name)
    under_one_name(model)
    if f"{model.output_layer}.weight" not in parameters_of(model):
        raise ConfigError(
            f"the output layer {model.output_layer!r} of model {name!r} must have a weight of its own, which is no other layer's"
        )
    if min((p.numel() for p in model.parameters()), default=0) == 0:
        raise ConfigError(f"model {name!r} has a layer without any weights")
    return model


def output_layer(model: nn.Module, classes: int, name: str = "") -> nn.Linear:
    """The output layer that the model names; ConfigError if there is none, or if it does not fit."""
    name = name or type(model).__name__
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {name!r} did not give a torch.nn.Module but a {type(model).__name__}")
    layer = getattr(model, "output_layer", None)
    if not isinstance(layer, str):
        linear = [n for n, m in model.named_modules() if n and isinstance(m, nn.Linear)]
        raise ConfigError(
            f"model {name!r} does not name its output layer: set its attribute output_layer, "
            f'for example model.output_layer = "{linear[-1] if linear else "fc"}"'
        )
    modules = dict(model.named_modules())
    if layer not in modules:
        linear = [n for n, m in modules.items() if isinstance(m, nn.Linear)]
        raise ConfigError(f"model {name!r} has no output layer {layer!r}; its linear layers: {', '.join(linear)}")
    found = modules[layer]
    if not isinstance(found, nn.Linear) or found.out_features != classes:
        raise ConfigError(
            f"the output layer {layer!r} of model {name!r} must be a Linear with {classes} outputs, it is {found}"
        )
    return found


class Again(nn.Module):
    """Stands for a module that a container has a second time: calling it calls that module, but its tensors have no second name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["module"] = module

    def __getattr__(self, name: str) -> Any:
        if "module" not in self.__dict__:  # while it is being copied
            raise AttributeError(name)
        return getattr(self.__dict__["module"], name)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.__dict__["module"](*inputs, **named)

    # Python looks these up in the class; the module itself raises an error for what it does not have

    def __getitem__(self, at: Any) -> Any:
        return self.__dict__["module"][at]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__dict__["module"])

    def __len__(self) -> int:
        return len(self.__dict__["module"])

    def __bool__(self) -> bool:
        return True


def under_one_name(network: nn.Module) -> None:
    """Give a module that the network has under several names only its first name; calls by the other names still work.

    `functional_call` replaces tensors under every name, and does not restore those of a module with two names.
    """
    known, others = set[int](), list[str]()
    for name, module in list(network.named_modules(remove_duplicate=False)):
        has_tensors = any(True for _ in (*module.parameters(), *module.buffers()))
        if not has_tensors or any(name.startswith(f"{other}.") for other in others):
            continue
        if id(module) in known:
            others.append(name)
        known.add(id(module))
    for name in others:
        path, _, last = name.rpartition(".")
        parent = network.get_submodule(path)
        module = parent.get_submodule(last)
        if isinstance(parent, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            parent._modules[last] = Again(module)
        else:
            del parent._modules[last]
            parent.__dict__[last] = module


class Attached(nn.Module):
    """The tensors of a module by their names, without its computation, because an nn.Sequential calls every module in it.

    It is not a layer: what `attach` adds to a network takes no part in what the network computes (what an algorithm adds to a layer of the
    network may).
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for kind in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            setattr(self, kind, getattr(module, kind))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


def attach(network: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Add tensors that an algorithm needs besides the network. They have names like its own tensors, but are not layers.

    Arguments:
        network: the network, which is changed in place.
        name: the prefix of their names.
        module: a module that has the tensors, such as a second network or a `holder`.

    Returns:
        The same network.

    Errors:
        torch raises an error for a name that the network already has.

    Examples:
        >>> import cwfed, torch
        >>> network = cwfed.attach(torch.nn.Linear(3, 2), "mine", cwfed.holder({"alpha": torch.ones(1)}))
        >>> [name for name, _ in network.named_parameters() if name.startswith("mine")]
        ['mine.alpha']
    """
    network.add_module(name, Attached(module))
    object.__setattr__(network, "attached", (*getattr(network, "attached", ()), name))
    return network


def holder(tensors: Mapping[str, Tensor], statistics: Mapping[str, Tensor] | None = None) -> nn.Module:
    """A module that only has these parameters (and buffers, for running statistics), for `attach`. A name may have dots.

    Arguments:
        tensors: the parameters by name.
        statistics: the buffers by name. Default: none.

    Returns:
        The module.

    Errors:
        torch raises an error for a name that occurs twice.

    Examples:
        >>> import cwfed, torch
        >>> sorted(cwfed.holder({"alpha": torch.ones(1), "head.weight": torch.ones(2, 3)}).state_dict())
        ['alpha', 'head.weight']
    """
    root = nn.Module()

    def place(name: str) -> tuple[nn.Module, str]:
        *path, last = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        return at, last

    for name, tensor in tensors.items():
        at, last = place(name)
        at.register_parameter(last, nn.Parameter(tensor))
    for name, tensor in (statistics or {}).items():
        at, last = place(name)
        at.register_buffer(last, tensor)
    return root


def attached(network: nn.Module, name: str) -> bool:
    """Whether a tensor or a layer of this name was attached to the network."""
    return any(name == own or name.startswith(f"{own}.") for own in getattr(network, "attached", ()))


def detach(network: nn.Module) -> nn.Module:
    """The network without what was attached to it, for example for predictions."""
    for name in getattr(network, "attached", ()):
        delattr(network, name)
    object.__setattr__(network, "attached", ())
    return network


def task_of(model: nn.Module, clients: int, classes: int, seed: int = 0) -> Task:
    """What an algorithm may know about the experiment; layers are in the order in which the model registers them."""
    layers: dict[str, tuple[str, ...]] = {}
    names = parameters_of(model).keys()  # a weight that several layers share belongs to the first
    for name, module in model.named_modules():
        parameters = (f"{name}.{p}" if name else p for p, _ in module.named_parameters(recurse=False))
        own = tuple(parameter for parameter in parameters if parameter in names)
        if own and not isinstance(module, Attached) and not attached(model, name):
            layers[name] = own
    norms = {
        name: kind
        for name, module in model.named_modules()
        for kind, types in NORMS.items()
        if isinstance(module, types) and not attached(model, name)
    }
    assert isinstance(model.output_layer, str)
    return Task(clients, classes, layers, model.output_layer, seed, norms)


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """The running statistics of norm layers: the floating-point buffers that are part of the model's state."""
    saved = model.state_dict(keep_vars=True)
    return {n: b for n, b in model.named_buffers() if n in saved and b.is_floating_point()}


def parameters_of(model: nn.Module) -> Params:
    """The parameters by name; not copies."""
    return dict(model.named_parameters())
