"""The yardstick: one round of cwFedAvg as published code works, on plain PyTorch and nothing of cwfed.

Clients one after the other with torch's default number of threads; a DataLoader over single samples with batches
of 10; an SGD optimiser; evaluation of all train and test data in batches of 10; aggregation by Python loops over
classes, clients and parameters. It is spared what such code does besides: reading each client's file from disk
several times a round, and computing AUC.

`cwfed bench` runs it side by side with our engines. It is meant to be obvious, not fast: leave it so.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

BATCH = 10


@dataclass
class Client:
    """A client as published code keeps it: lists of single samples and a model of its own."""

    train: list[tuple[Tensor, Tensor]]
    test: list[tuple[Tensor, Tensor]]
    model: nn.Module

    def class_distribution(self, classes: int) -> Tensor:
        """p: the share of each class in the training data."""
        labels = torch.stack([label for _, label in self.train])
        return torch.bincount(labels, minlength=classes) / len(labels)


class Reference:
    """A server and its clients. `output` names the output layer, `layers` the class-wise parameters."""

    def __init__(
        self,
        model: nn.Module,
        clients: Sequence[tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]],
        classes: int,
        output: str,
        class_wise: Sequence[str],
        lr: float,
        wdr: float,
    ) -> None:
        self.clients = [Client(train, test, copy.deepcopy(model)) for train, test in clients]
        self.classes, self.output, self.class_wise = classes, output, set(class_wise)
        self.lr, self.wdr = lr, wdr
        self.accuracy = 0.0

    def round(self) -> dict[str, float]:
        """One round; seconds by step."""
        began = time.perf_counter()
        for client in self.clients:
            self.train(client)
        trained = time.perf_counter()
        self.evaluate()
        evaluated = time.perf_counter()
        self.aggregate()
        return {
            "train": trained - began,
            "evaluate": evaluated - trained,
            "aggregate": time.perf_counter() - evaluated,
        }

    def train(self, client: Client) -> None:
        """One local epoch with the weight distribution regulariser."""
        client.model.train()
        optimizer = torch.optim.SGD(client.model.parameters(), lr=self.lr)
        criterion = nn.CrossEntropyLoss()
        prior = client.class_distribution(self.classes)
        for inputs, labels in DataLoader(client.train, BATCH, drop_last=True, shuffle=True):
            loss = criterion(client.model(inputs), labels)
            if self.wdr:
                norms = client.model.get_parameter(f"{self.output}.weight").norm(dim=1)
                loss = loss + self.wdr * torch.norm(prior - norms / norms.sum())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.no_grad()
    def evaluate(self) -> None:
        """Accuracy and loss on all train and test data."""
        right = samples = 0
        total = 0.0
        criterion = nn.CrossEntropyLoss()
        for client in self.clients:
            client.model.eval()
            for inputs, labels in DataLoader(client.test, BATCH):
                right += int((client.model(inputs).argmax(1) == labels).sum())
                samples += len(labels)
            for inputs, labels in DataLoader(client.train, BATCH):
                total += criterion(client.model(inputs), labels).item() * len(labels)
        self.accuracy = right / samples

    @torch.no_grad()
    def aggregate(self) -> None:
        """K class models from the clients' models, then one personal model per client from the class models."""
        samples = sum(len(client.train) for client in self.clients)
        shares = [len(client.train) / samples for client in self.clients]
        estimates = []
        for client in self.clients:
            norms = client.model.get_parameter(f"{self.output}.weight").norm(dim=1)
            estimates.append(norms / norms.sum())

        models = [dict(client.model.named_parameters()) for client in self.clients]
        averaged = {name: torch.zeros_like(p) for name, p in models[0].items() if name not in self.class_wise}
        for share, model in zip(shares, models, strict=True):
            for name, parameter in averaged.items():
                parameter += share * model[name]

        class_models = []
        for j in range(self.classes):
            weights = [share * estimate[j] for share, estimate in zip(shares, estimates, strict=True)]
            total = sum(weights)
            class_model = {name: torch.zeros_like(p) for name, p in models[0].items() if name in self.class_wise}
            for weight, model in zip(weights, models, strict=True):
                for name, parameter in class_model.items():
                    parameter += weight / total * model[name]
            class_models.append(class_model)

        for estimate, model in zip(estimates, models, strict=True):
            for name, parameter in averaged.items():
                model[name].copy_(parameter)
            for name in class_models[0]:
                model[name].zero_()
                for j in range(self.classes):
                    model[name] += estimate[j] * class_models[j][name]
