"""The paper's motivational example: which weights of a tiny network matter, with and without WDR.

Two Gaussian clouds in R^3, three clients, a network of 3-4-2 neurons whose 20 weights fit into a picture. All clients
start from the same model and train once; then come the two aggregations:

    w^G    = sum_i p_i w_i^L                     FedAvg, of the models trained without WDR
    w~_j^G = sum_i q_ij w~_i^L                   class models, of the models trained with WDR
    w~_i^L* = sum_j p~_ij w~_j^G                 personal models

The critical pathways are the 8 largest of the 20 weights. The biases train along and are mixed along, but are no lines.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from cwfed.core import losses, mixing
from cwfed.core.rng import stream, torch_stream
from cwfed.core.shape import InputShape
from cwfed.core.types import Params
from cwfed.federation.rounds import one_compute_thread
from cwfed.models.mlp import MLP
from cwfed.reproduce.verdict import Claim

COUNTS = ((2700, 300), (200, 1800), (500, 500))
"""n_ij: the samples of each client by class, 3400 of class 0 and 2600 of class 1."""
SIZES = (3, 4, 2)
"""Neurons of the input, the hidden and the output layer."""
WEIGHTS = ("fc.weight", "output.weight")
"""The matrices whose 12 + 8 entries are drawn."""
CRITICAL = 8
"""So many of the 20 weights make the critical pathways."""

LOCAL_WDR = r"\tilde{{w}}_{}^L"


@dataclass(frozen=True)
class Settings:
    """What the paper leaves open."""

    distance: float = 4.0
    """Between the two centres."""
    noise: float = 1.0
    """Standard deviation of the samples around their centre."""
    lr: float = 0.1
    """Learning rate of plain SGD."""
    epochs: int = 10
    """Passes over a client's samples before the only aggregation."""
    batch: int = 100
    """Samples in a batch."""
    wdr: float = 1.0
    """The coefficient of ||p - p~||_2."""


@dataclass(frozen=True, eq=False)
class Pathways:
    """All models of the picture. Those of clients and classes are stacks, one model a client or class."""

    seed: int
    settings: Settings
    local: Params
    """w_i^L: trained without WDR."""
    fedavg: Params
    """w^G: one model, the average of `local`."""
    local_wdr: Params
    """w~_i^L: trained with WDR, from the same start on the same batches."""
    class_models: Params
    """w~_j^G: made from `local_wdr` by class-wise aggregation."""
    personal: Params
    """w~_i^L*: mixed from the class models."""
    p: Tensor
    """p_ij, the clients' class distributions (3 x 2)."""
    p_tilde: Tensor
    """p~_ij, read from the output rows of `local`."""
    p_tilde_wdr: Tensor
    """p~_ij, read from the output rows of `local_wdr`: what the class-wise aggregation uses."""


# computing


def samples(seed: int, client: int, settings: Settings) -> tuple[Tensor, Tensor]:
    """A client's inputs and labels. The centres lie opposite each other, in a direction drawn from a Gaussian."""
    direction = stream(seed, "pathways centres").normal(size=SIZES[0])
    direction *= settings.distance / 2 / np.linalg.norm(direction)
    labels = np.repeat([0, 1], COUNTS[client])
    noise = stream(seed, "pathways samples", client=client).normal(scale=settings.noise, size=(len(labels), SIZES[0]))
    inputs = np.stack([-direction, direction])[labels] + noise
    return torch.from_numpy(inputs).float(), torch.from_numpy(labels)


def compute(seed: int = 0, settings: Settings | None = None) -> Pathways:
    """Train the three clients with and without WDR and aggregate both once. About a second."""
    settings = settings or Settings()
    with one_compute_thread():  # batches this small wait for a second thread longer than they compute
        local, local_wdr = (_train_all(seed, settings, wdr) for wdr in (0.0, settings.wdr))

    counts = torch.tensor(COUNTS, dtype=torch.float64)
    shares = mixing.sample_weights(counts.sum(1))  # p_i
    p_tilde, p_tilde_wdr = (mixing.norm_distribution(stack["output.weight"].double()) for stack in (local, local_wdr))
    class_models = mixing.mix(mixing.class_weights(shares, p_tilde_wdr).T, local_wdr)
    return Pathways(
        seed=seed,
        settings=settings,
        local=local,
        fedavg=mixing.average(local, shares),
        local_wdr=local_wdr,
        class_models=class_models,
        personal=mixing.mix(p_tilde_wdr, class_models),
        p=counts / counts.sum(1, keepdim=True),
        p_tilde=p_tilde,
        p_tilde_wdr=p_tilde_wdr,
    )


def _train_all(seed: int, settings: Settings, wdr: float) -> Params:
    with torch_stream(seed, "pathways model"):
        network = MLP(InputShape((SIZES[0],)), SIZES[2], hidden=SIZES[1])
    models = [_train(network, seed, client, settings, wdr) for client in range(len(COUNTS))]
    return {name: torch.stack([model[name] for model in models]) for name in models[0]}


def _train(network: nn.Module, seed: int, client: int, settings: Settings, wdr: float) -> Params:
    """Plain SGD on cross-entropy + wdr ||p - p~||_2; the network given is the start and stays as it is."""
    inputs, labels = samples(seed, client, settings)
    prior = labels.bincount(minlength=SIZES[2]).double() / len(labels)
    params = {name: w.detach().clone().requires_grad_() for name, w in network.named_parameters()}
    for epoch in range(settings.epochs):
        order = torch.from_numpy(stream(seed, "pathways batches", epoch, client).permutation(len(labels)))
        for at in range(0, len(order), settings.batch):
            batch = order[at : at + settings.batch]
            loss = F.cross_entropy(functional_call(network, params, (inputs[batch],)), labels[batch])
            if wdr:
                loss = loss + wdr * losses.wdr(params["output.weight"], prior)
            gradients = torch.autograd.grad(loss, list(params.values()))
            with torch.no_grad():
                for w, gradient in zip(params.values(), gradients, strict=True):
                    w -= settings.lr * gradient
    return {name: w.detach() for name, w in params.items()}


# what the picture shows, in numbers


class Panel(NamedTuple):
    """One network of the picture."""

    name: str
    """In the paper's notation, readable as text and as mathtext."""
    words: str
    model: Params
    p: Tensor | None
    """The class distribution of the data behind it; a class model has no data of its own."""

    @property
    def p_tilde(self) -> Tensor:
        """The share of each class, read from the output rows."""
        return mixing.norm_distribution(self.model["output.weight"].double())


def panels(found: Pathways) -> tuple[tuple[Panel, ...], ...]:
    """The three rows: without WDR and FedAvg's model, with WDR and the class models, the personal models."""

    def clients(stack: Params, name: str, words: str) -> list[Panel]:
        return [
            Panel(name.format(i + 1), words.format(i + 1), _model(stack, i), found.p[i]) for i in range(len(found.p))
        ]

    everybody = mixing.sample_weights(torch.tensor(COUNTS).sum(0))
    class_models = [
        Panel(rf"\tilde{{w}}_{j + 1}^G", f"model of class {j}", _model(found.class_models, j), None)
        for j in range(SIZES[2])
    ]
    return (
        (
            *clients(found.local, "w_{}^L", "client {} after training"),
            Panel("w^G", "FedAvg's global model", found.fedavg, everybody),
        ),
        (*clients(found.local_wdr, LOCAL_WDR, "client {} after training"), *class_models),
        (*clients(found.personal, r"\tilde{{w}}_{}^{{L*}}", "client {} after mixing"),),
    )


def critical(model: Params) -> dict[str, Tensor]:
    """Which weights are among the 8 of largest magnitude: a mask of each matrix."""
    weights = vector(model)
    mask = torch.zeros(len(weights), dtype=torch.bool)
    mask[weights.abs().topk(CRITICAL).indices] = True
    hidden = model[WEIGHTS[0]].numel()
    parts = zip(WEIGHTS, (mask[:hidden], mask[hidden:]), strict=True)
    return {name: part.view(model[name].shape) for name, part in parts}


def into_outputs(model: Params) -> list[int]:
    """How many critical weights go to output neuron 0 and to output neuron 1."""
    return [int(count) for count in critical(model)["output.weight"].sum(1)]


def numbers(found: Pathways) -> dict[str, Any]:
    """The facts behind the picture, and whether the paper's claims hold in them.

    The personal models are held against the plain average of the very models they were made from. FedAvg's w^G may
    lie as close to its own clients (`fedavg_from_local`): without WDR they differ less, there is less to lose.
    """
    first, second = 0, 1  # the clients with most samples of class 0 and of class 1
    local, local_wdr, personal = map(_vectors, (found.local, found.local_wdr, found.personal))
    plain = vector(mixing.average(found.local_wdr, mixing.sample_weights(torch.tensor(COUNTS).sum(1))))
    similarity = F.cosine_similarity(_vectors(found.class_models)[:, None], local_wdr[None], dim=-1)
    moved, averaged = _relative_distance(personal, local_wdr), _relative_distance(plain, local_wdr)
    trained = [into_outputs(_model(found.local, i)) for i in range(len(COUNTS))]
    aligned = [into_outputs(_model(found.local_wdr, i)) for i in range(len(COUNTS))]
    return {
        "seed": found.seed,
        "settings": asdict(found.settings),
        "panels": {
            panel.name: {
                "critical_into_output": into_outputs(panel.model),
                "p": None if panel.p is None else panel.p.tolist(),
                "p_tilde": panel.p_tilde.tolist(),
            }
            for row in panels(found)
            for panel in row
        },
        "cosine_of_class_model_and_client": similarity.tolist(),
        "relative_distance": {
            "personal_from_local_wdr": moved.tolist(),
            "average_from_local_wdr": averaged.tolist(),
            "fedavg_from_local": _relative_distance(vector(found.fedavg), local).tolist(),
        },
        "claims": {
            "both_outputs_without_wdr": all(min(counts) > 0 for counts in trained),
            "aligned_with_wdr": aligned[first][0] > aligned[first][1] and aligned[second][1] > aligned[second][0],
            "class_models_mirror_majority": bool(
                similarity[0, first] > similarity[0, second] and similarity[1, second] > similarity[1, first]
            ),
            "personal_models_stay_close": bool(moved.mean() < averaged.mean()),
        },
    }


def claims(found: Pathways) -> list[Claim]:
    """What the paper says about its picture, and whether it is so here."""
    facts = numbers(found)
    holds, distance = facts["claims"], facts["relative_distance"]
    cosine = facts["cosine_of_class_model_and_client"]

    def critical_into(name: str) -> str:
        return ", ".join(
            "{} and {}".format(*facts["panels"][name.format(i)]["critical_into_output"]) for i in (1, 2, 3)
        )

    def mean(of: str) -> float:
        return fmean(distance[of])

    return [
        Claim(
            "without WDR, both output neurons have critical pathways at every client",
            holds["both_outputs_without_wdr"],
            f"critical weights into output 0 and 1: {critical_into('w_{}^L')}",
        ),
        Claim(
            "with WDR, the critical pathways go mostly to the dominant class of clients 1 and 2",
            holds["aligned_with_wdr"],
            f"critical weights into output 0 and 1: {critical_into(LOCAL_WDR)}",
        ),
        Claim(
            "a class model mirrors the client with most samples of that class",
            holds["class_models_mirror_majority"],
            f"cosine with client 1 and 2: class 0 {cosine[0][0]:.2f} and {cosine[0][1]:.2f}, "
            f"class 1 {cosine[1][0]:.2f} and {cosine[1][1]:.2f}",
        ),
        Claim(
            "the personal models stay closer to the trained ones than their plain average does",
            holds["personal_models_stay_close"],
            f"mean relative distance {mean('personal_from_local_wdr'):.2f}, plain average "
            f"{mean('average_from_local_wdr'):.2f} (FedAvg without WDR {mean('fedavg_from_local'):.2f})",
        ),
    ]


def _model(stack: Params, i: int) -> Params:
    return {name: w[i] for name, w in stack.items()}


def vector(model: Params) -> Tensor:
    """The 20 weights as one row of numbers."""
    return torch.cat([model[name].flatten() for name in WEIGHTS])


def _vectors(stack: Params) -> Tensor:
    return torch.cat([mixing.rows(stack[name]) for name in WEIGHTS], dim=1)


def _relative_distance(there: Tensor, here: Tensor) -> Tensor:
    ratio: Tensor = torch.linalg.vector_norm(there - here, dim=-1) / torch.linalg.vector_norm(here, dim=-1)
    return ratio
