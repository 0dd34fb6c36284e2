"""An own algorithm in one file: a frozen dataclass that overrides what its paper changes.

This one is Ditto (Li et al., 2021): FedAvg, and beside it a personal model v that stays with its client:

    v <- v - lr (grad CE(v) + strength (v - w)),  w the received model        strength = 0: every client alone

The same from the command line, in this folder: cwfed compare -a fedavg,own_algorithm:Ditto:strength=0.5
Whether it keeps to what every algorithm must: test_own_algorithm.py
"""

import copy
from dataclasses import dataclass

import cwfed
from cwfed import Loss, Start


@dataclass(frozen=True)
class Ditto(cwfed.FedAvg):
    """Two models at the client: the common one travels, its own one stays."""

    phase = "trained"  # reported is the model after local training: its own
    strength: float = 0.1
    """How strongly the personal model is pulled towards the received one."""

    def adapt(self, model, output):  # a copy of the network, as tensors named own.*
        return cwfed.attach(model, "own", copy.deepcopy(model))

    def uploaded(self, names, task):
        return tuple(name for name in names if not name.startswith("own."))

    def keeps(self, names, task):
        return tuple(name for name in names if name.startswith("own."))

    def begin(self, got, own, data):
        return Start(params=own | got.model, anchor=got.model)

    def loss(self, network, params, batch, start, stage):
        own = self.shown(params)
        pull = sum((own[n] - w).square().sum() for n, w in start.anchor.items() if n in own)
        common = batch.cross_entropy(network(params, batch.inputs).logits)
        personal = batch.cross_entropy(network(own, batch.inputs, statistics="own.").logits)
        return Loss(common, personal + self.strength / 2 * pull)

    def shown(self, params):  # the personal model is the network with the tensors own.*
        return params | {n.removeprefix("own."): w for n, w in params.items() if n.startswith("own.")}


if __name__ == "__main__":
    for name in ("fedavg", "own_algorithm:Ditto"):
        settings = [f"algorithm.name={name}", "model.name=mlp", "train.rounds=20", "train.lr=0.05"]
        summary = cwfed.run(cwfed.load_config(settings=settings))
        print(f"{name}: {summary.reported.accuracy:.1%}")
