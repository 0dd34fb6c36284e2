"""A client's final model, loaded back from a run folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cwfed import models
from cwfed.algorithms import foreign
from cwfed.checkpoint import read_tensors
from cwfed.config import Config
from cwfed.data import text
from cwfed.data.clients import to_network
from cwfed.errors import DataError, RunError
from cwfed.folder import RunFolder
from cwfed.models import InputShape
from cwfed.types import Params

_FILE = re.compile(r"client-\d+\.safetensors", re.ASCII)


class PersonalModel:
    """A network with a client's weights, and what is needed to feed it."""

    def __init__(self, network: nn.Module, class_names: Sequence[str], words: Sequence[str] = ()) -> None:
        self.network = network.eval()
        self.class_names = tuple(class_names)
        self._words = words

    @torch.inference_mode()
    def probabilities(self, inputs: NDArray[Any] | Sequence[str]) -> NDArray[np.float32]:
        """The class probabilities of images (N x H x W x C), vectors (N x F), or texts."""
        if self._words and not isinstance(inputs, np.ndarray):
            inputs = text.encode([str(t) for t in inputs], self._words)
        array = np.asarray(inputs)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        try:
            out: NDArray[np.float32] = self.network(to_network(torch.tensor(array))).softmax(1).numpy()
            return out
        except (RuntimeError, TypeError) as error:
            raise DataError(f"inputs of shape {array.shape} do not fit the model: {error}") from None

    def predict(self, inputs: NDArray[Any] | Sequence[str]) -> NDArray[np.int64]:
        """The most probable class of each sample."""
        classes: NDArray[np.int64] = self.probabilities(inputs).argmax(1)
        return classes


def load_model(
    run: str | Path,
    client: int | None = None,
    *,
    class_counts: Sequence[float] | None = None,
    trust: bool = False,
) -> PersonalModel:
    """The final personal model of a client; or, for a newcomer, the one made from its label histogram.

    With neither a client nor a histogram, the model for a newcomer who says nothing about itself. A run whose model or
    algorithm is code of somebody's own ("module:name") is only loaded with `trust`: that imports the module.
    """
    folder = RunFolder(run)
    settings, facts = folder.config(), folder.facts()
    named = [*([facts.model.name] if ":" in facts.model.name else []), *foreign(settings.algorithm)]
    if named and not trust:
        raise RunError(
            f"{folder.path} names code, {named[0]}, which loading it imports: pass trust=True if it is yours"
        )
    config = folder.config(imports=True)
    shape = InputShape(tuple(facts.data.shape), facts.data.vocabulary)
    names = [str(name) for name in facts.data.classes]
    network = models.build(facts.model.name, shape, len(names), config.model.options)
    network = config.build_algorithm().adapt(network, str(network.output_layer))
    if client is not None and class_counts is not None:
        raise RunError("give a client or a label histogram, not both")
    params = _newcomer(folder, config, class_counts) if client is None else _of_client(folder, client)
    if client is None and config.train.batch_norm == "local":
        params = models.statistics(network) | params  # nobody else's statistics are to be had
    try:
        missing, unexpected = network.load_state_dict(params, strict=False)
    except (RuntimeError, AttributeError, TypeError) as error:
        raise RunError(
            f"the model in {folder.path} does not fit the network: {str(error).splitlines()[-1]}"
        ) from None
    lacking = [name for name in missing if not name.endswith("num_batches_tracked")]
    if lacking or unexpected:
        raise RunError(f"the model in {folder.path} does not fit the network: {(lacking + unexpected)[0]} differs")
    return PersonalModel(network, names, _words(folder) if shape.vocabulary else ())


def _words(folder: RunFolder) -> list[str]:
    found: list[str] = folder.read_json("vocabulary.json", "words")["words"]
    return found


def _of_client(folder: RunFolder, client: int) -> Params:
    index = folder.read_json("models/index.json")
    if str(client) not in index:
        raise RunError(f"{folder.path} has no model of client {client}: its clients are 0 to {len(index) - 1}")
    name = str(index[str(client)])
    if not _FILE.fullmatch(name):  # a foreign index cannot make us read elsewhere
        raise RunError(f"{folder.path / 'models/index.json'} is damaged: {name!r} is not the name of a model file")
    return read_tensors(folder.path / "models" / name)[0]


def _newcomer(folder: RunFolder, config: Config, class_counts: Sequence[float] | None) -> Params:
    tree, _ = folder.checkpoints.newest()
    if tree is None:
        raise RunError(f"{folder.path} has no checkpoint to make a newcomer's model from")
    return config.build_algorithm().newcomer(tree["server"], class_counts)
