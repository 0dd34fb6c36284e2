"""A copy of the network that models are loaded into: what it answers, and how good its answers are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from cwfed.core.errors import RunError
from cwfed.core.types import Output, Params
from cwfed.data import Federation, Samples
from cwfed.data.partition import Indices
from cwfed.engine import draws
from cwfed.engine.precision import Precision, to_bf16
from cwfed.models import attached, output_layer, parameters_of, statistics

EVALUATION_BATCH = 256


class Answers(NamedTuple):
    """A network's answers to some samples, one entry per sample."""

    predicted: NDArray[np.int64]
    right: NDArray[np.bool_]
    loss: NDArray[np.float64]
    """Cross-entropy."""


class _Features:
    """A hook that keeps the last input of the output layer.

    It has no reference to its network's owner: a reference cycle would keep all data in memory until Python collects cycles.
    """

    features: Tensor | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.features = inputs[0]


class LoadedNetwork:
    """A network and the samples that it is asked about. One model is loaded at a time."""

    def __init__(
        self,
        model: nn.Module,
        federation: Federation,
        samples: Samples,
        precision: Precision = "fp32",
    ) -> None:
        self.model = copy.deepcopy(model).to(samples.device)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
        self.federation, self.samples = federation, samples
        self._generator = torch.Generator(samples.device)
        draws.seed(self.model, self._generator)
        self._output = output_layer(self.model, federation.data.classes)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._casts = to_bf16(self.model, self._output) if precision == "bf16" else []
        self.params = parameters_of(self.model) | {names[id(cast)]: master for cast, master in self._casts}
        """The float32 parameters: the network's own, or the masters of its bf16 ones."""
        self._seen = _Features()
        self._output.register_forward_pre_hook(self._seen)
        self._state = self.params | statistics(self.model)
        self.buffers = dict(self.model.named_buffers())
        self.initial_buffers = {n: b.clone() for n, b in self.buffers.items()}
        self._others = [(b, self.initial_buffers[n]) for n, b in self.buffers.items() if n not in self._state]
        self._trainable = {p: p.requires_grad for p in (*self.params.values(), *(cast for cast, _ in self._casts))}
        self._cast_names = {names[id(cast)] for cast, _ in self._casts}
        self._own_names = [name for name in self.params if not attached(self.model, name)]

    def make_dense(self) -> None:
        """Make embeddings give dense gradients: a loss of the algorithm's own may evaluate the network as a function, which cannot have
        sparse ones."""
        for module in self.model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                module.sparse = False

    def load(self, params: Params) -> None:
        """Copy a model, which must be complete, into the network."""
        require_whole(params, self._state)
        with torch.no_grad():
            for name, tensor in self._state.items():
                tensor.copy_(params[name])
            for (
                buffer,
                initial,
            ) in self._others:  # such as a count of batches, which must not pass from one client to the next
                buffer.copy_(initial)
            self._follow()

    def _follow(self) -> None:
        """Copy the float32 masters into the network's bf16 parameters."""
        if self._casts:
            torch._foreach_copy_([cast for cast, _ in self._casts], [master for _, master in self._casts])

    def save(self, out: Params, row: int) -> None:
        """Copy the loaded model into a row of a stack of models."""
        with torch.no_grad():
            for name, stack in out.items():
                stack[row].copy_(self._state[name])

    def copy_of(self, names: Iterable[str]) -> Params:
        """Copies of some tensors of the loaded model, in main memory, where the server works."""
        return {name: self._state[name].detach().to("cpu", copy=True) for name in names}

    def complete(self) -> Params:
        """A copy of the whole loaded model."""
        return self.copy_of(self._state)

    @property
    def output_weight(self) -> str:
        """The name of the output layer's weight matrix."""
        return f"{self.model.output_layer}.weight"

    def take_features(self) -> Tensor:
        """The last input of the output layer; it is given once."""
        features, self._seen.features = self._seen.features, None
        assert features is not None, "the network did not use its output layer"
        return features

    def forward(self, inputs: Tensor) -> Output:
        """The loaded model's output for a batch, with the features (the input of the output layer)."""
        logits = self.model(inputs)
        return Output(logits, self.take_features(), self._output.weight, self.buffers)

    def network(self, params: Params, inputs: Tensor, statistics: str | None = "") -> Output:
        """The network as a function of its parameters; see `types.Network`."""
        if params is self.params and statistics == "":
            return self.forward(inputs)
        casts = self._cast_names
        given = {n: params[n].bfloat16() if n in casts else params[n] for n in self._own_names}
        buffers = self.buffers
        if statistics is None:
            buffers = {name: b.clone() for name, b in buffers.items()}
        elif statistics:
            buffers = buffers | {n: buffers[statistics + n] for n in buffers if statistics + n in buffers}
        logits = functional_call(self.model, given | buffers, (inputs,))
        return Output(logits, self.take_features(), params[self.output_weight], buffers)

    def squared_gradients(self, indices: Indices, batch_size: int) -> Tensor:
        """||d CE / d w||^2 of the loaded model for each full batch of these samples, in main memory."""
        self.model.eval()
        leaves = [p for p in self.model.parameters() if p.requires_grad]
        size = min(batch_size, len(indices))
        found = []
        for chosen in indices[: len(indices) // size * size].reshape(-1, size):
            inputs, labels = self.samples.batch(chosen)
            loss = F.cross_entropy(self.forward(inputs).logits, labels)
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
            parts = [dense(g, g).double().square().sum() for g in gradients if g is not None]
            found.append(torch.stack(parts).sum())
        return torch.stack(found).cpu()

    def measure(self, indices: Indices) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """For each sample: whether the loaded model is right, and its cross-entropy."""
        _, right, loss = self.answers(indices)
        return right, loss

    @torch.inference_mode()
    def answers(self, indices: Indices, see: Callable[[int, Tensor, Tensor], None] | None = None) -> Answers:
        """The loaded model's answers to some samples; `see(position, logits, labels)` is called for every batch."""
        self.model.eval()
        predicted, right, loss = [], [], []
        for at in range(0, len(indices), EVALUATION_BATCH):
            inputs, labels = self.samples.batch(indices[at : at + EVALUATION_BATCH])
            logits = self.model(inputs)
            predicted.append(logits.argmax(1))
            right.append(predicted[-1] == labels)
            loss.append(F.cross_entropy(logits, labels, reduction="none"))
            if see:
                see(at, logits, labels)
        if not right:
            return Answers(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_), np.zeros(0))
        return Answers(
            torch.cat(predicted).cpu().numpy(), torch.cat(right).cpu().numpy(), torch.cat(loss).cpu().double().numpy()
        )

    @torch.inference_mode()
    def class_means(self, indices: Indices, of: Callable[[Tensor], Tensor]) -> Tensor:
        """The mean of a function of the loaded model's features, by class, in main memory."""
        self.model.eval()
        classes, width = self.federation.data.classes, self._output.in_features
        sums = torch.zeros_like(of(torch.zeros(classes, width, device=self.samples.device)))
        for at in range(0, len(indices), EVALUATION_BATCH):
            inputs, labels = self.samples.batch(indices[at : at + EVALUATION_BATCH])
            sums.index_add_(0, labels, of(self.forward(inputs).features))
        counts = torch.from_numpy(np.bincount(self.federation.data.labels[indices], minlength=classes))
        return sums.cpu().clone() / counts.clamp_min(1)[:, None]


def require_whole(model: Params, network: Params) -> None:
    """RunError unless a model has exactly the network's tensors."""
    if model.keys() == network.keys():
        return
    if unknown := sorted(model.keys() - network.keys()):
        raise RunError(f"the algorithm gives a client a model with {unknown[0]}, which the network does not have")
    missing = ", ".join(sorted(network.keys() - model.keys()))
    raise RunError(
        f"the algorithm gives a client a model without {missing}: where only a part of the model travels, `personal` (and "
        "`begin`) must add the rest, such as own | got.model, and `keeps` must name it"
    )


def dense(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """A gradient with all rows; zeros where there is none."""
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient
