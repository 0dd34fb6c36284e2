"""A node's own account of what differential privacy has cost its samples: on its disk, over all rounds, runs and restarts.

The server cannot keep it, because the samples are protected from the server. Every training is entered before it begins, so before
anything of it can be sent. A training that is repeated has new noise and costs again. The account covers all runs that use this folder; if
the file is removed, it starts at 0, and what was sent before is no longer counted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cwfed.core import files
from cwfed.core.errors import RunError
from cwfed.privacy import dp
from cwfed.privacy.dp import SamplePrivacy
from cwfed.privacy.noise import Numbers, SystemDraws

FILE = "privacy-account.json"
DELTA = 1e-5
"""A node's own budget is for this delta, or for the plan's if that is smaller, as the plan comes from the server."""


@dataclass(frozen=True)
class Account:
    """The account of one node."""

    folder: Path
    privacy: SamplePrivacy
    """What the plan asks for."""
    plan_budget: float = 0.0
    """The largest epsilon that the plan allows (`privacy.dp_budget`); 0: any."""
    own_budget: float = 0.0
    """The largest epsilon that this node's operator allows; 0: any."""

    def charge(self, rate: float, steps: int, data: str, classes: int) -> float | None:
        """Enter a training of so many steps on these data; returns epsilon after it, None if there is no bound.

        RunError if that would exceed a budget; then nothing is entered, and the training must not begin.
        """
        with self._changed() as book:
            self._enter(book["trained"], rate, steps)
            if self.privacy.histogram:
                self._histogram(book, data, classes)
            self._require(self.plan_budget, "privacy.dp_budget", book, self.privacy.delta)
            self._require(self.own_budget, "dp_budget in its node config", book, min(DELTA, self.privacy.delta))
            epsilon = spent(book, self.privacy.delta)
            book |= {"epsilon": epsilon, "delta": self.privacy.delta}
        return epsilon

    def sentence(self, epsilon: float | None) -> str:
        """The state of the account in words, for the node's operator."""
        if epsilon is None:
            return "privacy.dp_noise = 0: the samples of this node have no differential privacy"
        budgets = [budget for budget in (self.plan_budget, self.own_budget) if budget]
        of = f" of {min(budgets):g}" if budgets else ""
        return f"epsilon {epsilon:.2f}{of} is spent (delta {self.privacy.delta:g}; account: {self.folder / FILE})"

    def noise_of(self, data: str) -> Callable[[int], Numbers]:
        """A function from the number of classes to the noise of these data's histogram, which is drawn and entered once."""

        def remembered(classes: int) -> Numbers:
            with self._changed() as book:
                return np.array(self._histogram(book, data, classes)["noise"])

        return remembered

    def _enter(self, trained: list[Any], rate: float, steps: int) -> None:
        if trained and trained[-1][:2] == [self.privacy.noise, rate]:
            trained[-1][2] += steps
        else:
            trained.append([self.privacy.noise, rate, steps])

    def _histogram(self, book: dict[str, Any], data: str, classes: int) -> dict[str, Any]:
        """The noise for these data and this epsilon. The same noise for other data would reveal the difference between both."""
        epsilon = self.privacy.histogram
        key = hashlib.sha256(f"{data} {epsilon!r} {classes}".encode()).hexdigest()
        kept: dict[str, dict[str, Any]] = book["histograms"]
        if key not in kept:
            kept[key] = {"epsilon": epsilon, "noise": SystemDraws().laplace(size=classes).tolist()}
        return kept[key]

    def _require(self, budget: float, where: str, book: dict[str, Any], delta: float) -> None:
        if not budget:
            return
        epsilon = spent(book, delta)
        if epsilon is None:
            raise RunError(f"{where} = {budget:g}, but privacy.dp_noise = 0 guarantees nothing: set a noise")
        if epsilon > budget:
            raise RunError(
                f"the privacy budget is spent: this round would bring epsilon to {epsilon:.2f} (delta {delta:g}), and "
                f"{where} is {budget:g}; the client does not train any more"
            )

    @contextmanager
    def _changed(self) -> Iterator[dict[str, Any]]:
        """The account's table, which is written when the block ends, and not if the block raises an error."""
        path = self.folder / FILE
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f".{FILE}.lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                book = self._read(path)
                before = json.dumps(book)
                yield book
                if json.dumps(book) != before:
                    files.write_whole(path, json.dumps(files.seal_table(book), indent=1))
        except OSError as error:
            raise RunError(f"the privacy account {path} cannot be written: {error.strerror or error}") from None

    def _read(self, path: Path) -> dict[str, Any]:
        if not path.exists():
            return {"trained": [], "histograms": {}, "epsilon": 0.0, "delta": self.privacy.delta}
        book = files.read_table(path)
        if not isinstance(book.get("trained"), list) or not isinstance(book.get("histograms"), dict):
            raise RunError(f"{path} is not a privacy account: restore the original file")
        return book


def spent(book: dict[str, Any], delta: float) -> float | None:
    """Epsilon of everything in an account's table; None: without bound."""
    trained = tuple((noise, rate, steps) for noise, rate, steps in book["trained"])
    histograms = sum(kept["epsilon"] for kept in book["histograms"].values())
    epsilon = dp.dp_sgd_epsilon(trained, delta)
    return None if epsilon is None else epsilon + float(histograms)
