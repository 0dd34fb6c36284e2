"""A client's final model, loaded from a run folder, or made from what a run has in memory."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cwfed import models
from cwfed.algorithms import foreign
from cwfed.core.errors import DataError, RunError
from cwfed.core.mixing import histogram
from cwfed.core.rng import torch_stream
from cwfed.data import text
from cwfed.data.clients import to_network
from cwfed.federation.config import Config
from cwfed.federation.rounds import Progress
from cwfed.federation.simulation import Simulation
from cwfed.models import InputShape
from cwfed.runs import saved_models
from cwfed.runs.folder import RunFolder
from cwfed.runs.saved_models import Found, Pick


class PersonalModel:
    """A network with a client's weights, and what is needed to feed it.

    Examples:
        >>> import cwfed
        >>> result = cwfed.run({"train": {"rounds": 2, "lr": 0.05}, "data": {"clients": 5}, "model": {"name": "mlp"}})
        >>> result.models[0].predict(cwfed.load_data("digits").inputs[:5]).shape
        (5,)
    """

    def __init__(
        self,
        network: nn.Module,
        class_names: Sequence[str],
        words: Sequence[str] = (),
        *,
        pick: Pick = "last",
        round_: int = 0,
    ) -> None:
        self.network = network.eval()
        self.class_names = tuple(class_names)
        self.pick: Pick = pick
        """The round of the weights: the one that held-out training data picked ("validated"), or the "last"."""
        self.round = round_
        """The number of that round; 0 if it is not known."""
        self._words = words

    def __repr__(self) -> str:
        picked = "picked by validation" if self.pick == "validated" else "the last"
        return f"PersonalModel({type(self.network).__name__}, {len(self.class_names)} classes, round {self.round}, {picked})"

    @torch.inference_mode()
    def probabilities(self, inputs: NDArray[Any] | Sequence[str]) -> NDArray[np.float32]:
        """The class probabilities of images (N x H x W x C), vectors (N x F), or texts."""
        if self._words and not isinstance(inputs, np.ndarray):
            inputs = text.encode([str(t) for t in inputs], self._words)
        what = "inputs"
        try:
            array = np.asarray(inputs)
            what += f" of shape {array.shape}"
            if array.dtype == np.float64:
                array = array.astype(np.float32)
            out: NDArray[np.float32] = self.network(to_network(torch.tensor(array))).softmax(1).numpy()
            return out
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise DataError(f"{what} do not fit the model: {error}") from None

    def predict(self, inputs: NDArray[Any] | Sequence[str]) -> NDArray[np.int64]:
        """The most probable class of each sample."""
        classes: NDArray[np.int64] = self.probabilities(inputs).argmax(1)
        return classes


def load_model(
    run: str | Path,
    client: int | None = None,
    *,
    class_counts: Sequence[float] | None = None,
    pick: Pick | None = None,
    trust: bool = False,
) -> PersonalModel:
    """The personal model of a client; or, for a newcomer, the one made from its label histogram.

    Arguments:
        run: the run's folder.
        client: its number. Default: a newcomer, who never took part.
        class_counts: the newcomer's label histogram. Default: it tells nothing about itself.
        pick: the round: "validated", the best on held-out training data (the default where the run has one), or "last"; the model's
            attributes `pick` and `round` say which one it is.
        trust: also load a run whose model or algorithm is code outside cwfed ("module:name"), which imports that module.

    Returns:
        The model: `predict(inputs)`, `probabilities(inputs)`, `network`.

    Errors:
        CwfedError, one sentence: no such run or client, models that were not kept, code without `trust`.

    Examples:
        >>> import cwfed, tempfile
        >>> with tempfile.TemporaryDirectory() as out:
        ...     settings = {"train": {"rounds": 1, "lr": 0.05}, "data": {"clients": 5}, "model": {"name": "mlp"}}
        ...     _ = cwfed.run(settings, out)
        ...     model = cwfed.load_model(out, client=3, pick="last")
        >>> model.predict(cwfed.load_data("digits").inputs[:2]).shape
        (2,)
    """
    if pick not in (None, "validated", "last"):
        raise RunError(f'pick = {pick!r} is not possible: "validated" or "last"')
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
    if class_counts is not None:
        class_counts = histogram(class_counts, len(names)).tolist()
    algorithm = config.build_algorithm()
    with torch_stream(config.run.seed, "model"):  # for tensors that clients keep, a newcomer has the initial ones
        network = models.build(facts.model.name, shape, len(names), config.model.options)
        network = algorithm.adapt(network, str(network.output_layer))
    models.detach(network)
    if client is not None and class_counts is not None:
        raise RunError("give a client or a label histogram, not both")
    found = _newcomer(folder, config, class_counts, pick) if client is None else _of_client(folder, client, pick)
    params = found.params
    if client is None:  # tensors that stay with clients are the initial ones
        initial, statistics = models.parameters_of(network), models.statistics(network)
        kept = set(algorithm.keeps((*initial, *statistics), models.task_of(network, 1, len(names))))
        stays = {name: w for name, w in (initial | statistics).items() if name in kept}
        params = (statistics if config.train.batch_norm == "local" else {}) | stays | params
        if class_counts is not None:
            params = algorithm.predictor(params, class_counts, models.task_of(network, 1, len(names)))
    words = _words(folder) if shape.vocabulary else ()
    return _personal(network, found._replace(params=params), names, words, f"in {folder.path}")


def _personal(
    network: nn.Module, found: Found, class_names: Sequence[str], words: Sequence[str], where: str
) -> PersonalModel:
    """The network with these weights; RunError if some are missing or unknown."""
    try:
        missing, unexpected = network.load_state_dict(found.params, strict=False)
    except (RuntimeError, AttributeError, TypeError) as error:
        raise RunError(f"the model {where} does not fit the network: {str(error).splitlines()[-1]}") from None
    own = models.parameters_of(network) | models.statistics(network)  # each tensor once, even if it has several names
    lacking = [name for name in missing if name in own]
    if lacking or unexpected:
        raise RunError(f"the model {where} does not fit the network: {(lacking + unexpected)[0]} differs")
    return PersonalModel(network, class_names, words, pick=found.pick, round_=found.round)


class FromMemory:
    """Makes the models of a run without a folder."""

    def __init__(self, simulation: Simulation, last: Progress, picked: Progress | None) -> None:
        self._simulation, self._last, self._picked = simulation, last, picked
        self._is_open = False

    def __call__(self, client: int | None, class_counts: Sequence[float] | None, pick: Pick | None) -> PersonalModel:
        """The same as `load_model` for a run with a folder."""
        if pick not in (None, "validated", "last"):
            raise RunError(f'pick = {pick!r} is not possible: "validated" or "last"')
        simulation = self._simulation
        if client is not None and client not in range(simulation.clients):
            raise RunError(f"there is no client {client}: the clients are 0 to {simulation.clients - 1}")
        if pick == "validated" and self._picked is None:
            raise RunError('no round was picked by validation: pick = "last" takes that of the last round')
        if not self._is_open:
            simulation.reopen()
            self._is_open = True
        chosen: Pick = "validated" if pick != "last" and self._picked else "last"
        progress = self._picked if chosen == "validated" and self._picked else self._last
        if client is None:
            model = simulation.local_statistics | simulation.newcomer_model(progress, class_counts)
        else:
            model = simulation.final_model(progress, client)
        params = {n: w for n, w in model.items() if not models.attached(simulation.template, n)}
        network, data = models.detach(copy.deepcopy(simulation.template)), simulation.federation.data
        return _personal(network, Found(params, chosen, progress.round), data.class_names, data.words, "of the run")


def _words(folder: RunFolder) -> list[str]:
    found: list[str] = folder.read_json("vocabulary.json", "words")["words"]
    return found


def _of_client(folder: RunFolder, client: int, pick: Pick | None) -> Found:
    if not folder.models.exists():
        raise RunError(_why_no_models(folder))
    return saved_models.read(folder.models, client, pick, folder.rounds_done())


def _why_no_models(folder: RunFolder) -> str:
    if "federation" in folder.read_json("manifest.json"):
        return f"{folder.path} is the server's folder of a federation: the personal models are with the clients"
    if not folder.finished:
        return f"{folder.path} is not finished, and models are saved at the end: cwfed run --resume continues it"
    reason = {
        "none": 'run.save_models = "none"',
        "auto": 'they are larger than run.save_models = "auto" writes, or their folder was removed',
        "all": "their folder was removed",
    }[folder.config().run.save_models]
    return (
        f"the models of the run in {folder.path} are not there ({reason}): "
        f"cwfed run --resume --set run.save_models=all --out {shlex.quote(str(folder.path))} writes them"
    )


def _newcomer(folder: RunFolder, config: Config, class_counts: Sequence[float] | None, pick: Pick | None) -> Found:
    tree, _ = folder.checkpoints.newest()
    if tree is None:
        raise RunError(f"{folder.path} has no checkpoint to make a newcomer's model from")
    if pick == "validated" and "picked" not in tree:
        raise RunError(
            f"the checkpoint in {folder.path} has nothing of a round that validation picked: "
            'pick = "last" takes that of the last round'
        )
    chosen: Pick = "validated" if pick != "last" and "picked" in tree else "last"
    progress = tree["picked"] if chosen == "validated" and tree["picked"] else tree
    return Found(config.build_algorithm().newcomer(progress["server"], class_counts), chosen, progress["round"])
