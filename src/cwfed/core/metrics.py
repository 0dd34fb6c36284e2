"""What is measured of a model: sums that add up over samples and clients, and the numbers computed from them.

One table serves all metrics that are built in. For each class it has the samples, the right answers, how often the class
was predicted, and the summed cross-entropy. With N_k, R_k, P_k and L_k of class k, and sums over the classes:

    accuracy             sum R_k / sum N_k
    balanced_accuracy    mean of R_k / N_k (recall) over the classes that have samples
    macro_f1             mean of 2 R_k / (N_k + P_k) over the classes that have samples or were predicted
    loss                 sum L_k / sum N_k

Absent classes are treated as in scikit-learn. A metric of the user's own is another `Metric`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cwfed.core.errors import ConfigError, RunError, did_you_mean
from cwfed.core.plugins import load_object

Sums = NDArray[np.float64]

SAMPLES, RIGHT, PREDICTED, LOSS = range(4)
"""The rows of the table of one model on one client's data; its columns are the classes."""
PER_CLASS = "per class"
"""The key of the table; the key of an own metric's sums is the metric's name."""
MOST_SUMS = 10_000
"""The most sums of an own metric: they are stored for every client and each of its models."""


@dataclass(frozen=True)
class Metric:
    """A number about a model's answers.

    `sums` is a function of (logits, labels), samples x classes and samples, that gives a tensor of sums over the samples: those
    of two lots of samples, added, are those of both together. `value` makes one number of such sums.

    Examples:
        >>> import cwfed, torch
        >>> def hits(logits, labels):
        ...     among = (logits.topk(2).indices == labels[:, None]).any(1)
        ...     return torch.stack([among.sum(), torch.tensor(len(labels))])
        >>> top2 = cwfed.Metric(hits, lambda sums: sums[0] / sums[1])
        >>> float(top2.value(top2.sums(torch.tensor([[3., 2., 1.], [3., 2., 1.]]), torch.tensor([1, 2]))))
        0.5
    """

    sums: Callable[[Tensor, Tensor], Tensor]
    value: Callable[[Tensor], Any]
    lower_is_better: bool = False
    """For `run.pick` and `run.patience`."""

    def values(self, rows: Sums) -> list[float | None]:
        """The value of each row of sums; None if it cannot be computed or is not finite."""
        return [self._value(torch.from_numpy(row)) for row in rows]

    def _value(self, sums: Tensor) -> float | None:
        try:
            return finite(float(self.value(sums)))
        except Exception:  # such as a division by a sum of zero; in general it works, as it was tried before round 1
            return None


# --- built in


def _share(part: Sums, whole: Sums) -> Sums:
    """part / whole; NaN where there is nothing to have a part of."""
    found: Sums = np.divide(part, whole, out=np.full(np.shape(part), np.nan), where=whole > 0)
    return found


def _mean(values: Sums, counted: NDArray[np.bool_]) -> Sums:
    return _share(np.where(counted, values, 0.0).sum(-1), counted.sum(-1))


def recall(table: Sums) -> Sums:
    """R_k / N_k of each class; NaN for a class without samples."""
    return _share(table[..., RIGHT, :], table[..., SAMPLES, :])


def precision(table: Sums) -> Sums:
    """R_k / P_k of each class; NaN for a class that was never predicted."""
    return _share(table[..., RIGHT, :], table[..., PREDICTED, :])


def f1(table: Sums) -> Sums:
    """2 R_k / (N_k + P_k) of each class; NaN for one that has no samples and was never predicted."""
    return _share(2 * table[..., RIGHT, :], table[..., SAMPLES, :] + table[..., PREDICTED, :])


def class_loss(table: Sums) -> Sums:
    """L_k / N_k, the mean cross-entropy of each class; NaN for a class without samples."""
    return _share(table[..., LOSS, :], table[..., SAMPLES, :])


def accuracy(table: Sums) -> Sums:
    """Right answers / samples."""
    return _share(table[..., RIGHT, :].sum(-1), table[..., SAMPLES, :].sum(-1))


def balanced_accuracy(table: Sums) -> Sums:
    """The mean recall of the classes that have samples."""
    return _mean(recall(table), table[..., SAMPLES, :] > 0)


def macro_f1(table: Sums) -> Sums:
    """The mean F1 of the classes that have samples or were predicted."""
    return _mean(f1(table), table[..., SAMPLES, :] + table[..., PREDICTED, :] > 0)


def loss(table: Sums) -> Sums:
    """The mean cross-entropy."""
    return _share(table[..., LOSS, :].sum(-1), table[..., SAMPLES, :].sum(-1))


def per_class(logits: Tensor, labels: Tensor) -> Tensor:
    """The table of the built-in metrics, in the plainest form; the engines use `Places`."""
    predicted = logits.argmax(1)
    lost = F.cross_entropy(logits, labels, reduction="none").double()
    weights = (torch.ones_like(lost), (predicted == labels).double(), None, lost)
    counted = (labels, labels, predicted, labels)
    return torch.stack(
        [torch.bincount(k, w, logits.shape[1]).double() for k, w in zip(counted, weights, strict=True)]
    )


@dataclass(frozen=True)
class _OfClasses(Metric):
    """A metric of the common table, computed for many tables at once."""

    def values(self, rows: Sums) -> list[float | None]:
        return [finite(value) for value in self.value(rows).tolist()]  # type: ignore[arg-type]


BUILT_IN: dict[str, Metric] = {
    "accuracy": _OfClasses(per_class, accuracy),  # type: ignore[arg-type]
    "balanced_accuracy": _OfClasses(per_class, balanced_accuracy),  # type: ignore[arg-type]
    "macro_f1": _OfClasses(per_class, macro_f1),  # type: ignore[arg-type]
    "loss": _OfClasses(per_class, loss, lower_is_better=True),  # type: ignore[arg-type]
}


def words(name: str) -> str:
    """A metric's name for people.

    >>> words("macro_f1"), words("balanced_accuracy")
    ('macro F1', 'balanced accuracy')
    """
    return "macro F1" if name == "macro_f1" else name.replace("_", " ")


def is_share(name: str) -> bool:
    """Whether a metric is shown in per cent."""
    return name in BUILT_IN and name != "loss"


# --- the user's own


class Own(NamedTuple):
    """A metric of the user's own that was tried and adds up."""

    name: str
    metric: Metric
    shape: tuple[int, ...]
    """Of its sums."""


def name_of(setting: str) -> str:
    """What a metric of `run.metrics` ("module:name") is called.

    >>> name_of("own_metric:top3")
    'top3'
    """
    return setting.partition(":")[2]


def check_names(settings: Sequence[str], pick: str) -> None:
    """ValueError if two metrics have the same name, or none is called `pick`. Nothing is imported."""
    for setting in settings:
        if not name_of(setting).isidentifier():
            known = ", ".join(BUILT_IN)
            raise ValueError(
                f'run.metrics names {setting!r}: a metric of your own is "module:name" ({known} are always measured)'
            )
    names = [*BUILT_IN, *map(name_of, settings)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"run.metrics: two metrics are called {twice[0]!r}: give one of them another name")
    if pick not in names:
        raise ValueError(f"run.pick = {pick!r} is not a metric of this run: {did_you_mean(pick, names)}")


def load(settings: Sequence[str], classes: int) -> tuple[Own, ...]:
    """The metrics of these names ("module:name"), tried; ConfigError for one that does not add up."""
    return tuple(_tried(setting, load_object(setting, "run.metrics"), classes) for setting in settings)


def _tried(setting: str, metric: Any, classes: int) -> Own:
    """Try a metric on made-up answers, all at once and in two parts, so that mistakes show before round 1."""
    what = f"the metric {setting!r}"
    if not isinstance(metric, Metric):
        raise ConfigError(f"{what} must be a cwfed.Metric(sums, value), it is a {type(metric).__name__}")
    random = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(24, classes, generator=random)
    labels = torch.where(torch.arange(24) % 3 > 0, logits.argmax(1), torch.arange(24) % classes)
    whole, first, rest = (
        _sums(metric, what, logits[lot], labels[lot]) for lot in (slice(None), slice(9), slice(9, 24))
    )
    if not whole.shape == first.shape == rest.shape:
        shapes = f"{tuple(whole.shape)} for 24 samples and {tuple(first.shape)} for 9"
        raise ConfigError(f"{what} does not add up: its sums have the shape {shapes}; sum over the samples")
    if prod(whole.shape) > MOST_SUMS:
        raise ConfigError(f"{what} has {prod(whole.shape)} sums: at most {MOST_SUMS} can be kept for every client")
    if not whole.isfinite().all():
        raise ConfigError(f"{what} has sums that are not finite numbers, for logits that are")
    if not torch.allclose(whole, first + rest, rtol=1e-4, atol=1e-4):
        at = int((whole - first - rest).abs().argmax())
        found = f"{float(whole.flatten()[at]):.6g} for 24 samples, {float((first + rest).flatten()[at]):.6g}"
        raise ConfigError(f"{what} does not add up: it gives {found} for two parts of them; give sums, not means")
    try:
        value = float(metric.value(whole))
    except Exception as error:  # it is the user's code: whatever stops it is the answer
        raise ConfigError(f"{what} makes no number of its sums ({type(error).__name__}: {error})") from None
    if not isfinite(value):
        raise ConfigError(f"{what} makes {value} of its sums, which is not a finite number")
    return Own(name_of(setting), metric, tuple(whole.shape))


def _sums(metric: Metric, what: str, logits: Tensor, labels: Tensor) -> Tensor:
    try:
        sums = metric.sums(logits, labels)
    except Exception as error:
        raise ConfigError(f"{what} cannot be measured ({type(error).__name__}: {error})") from None
    if not isinstance(sums, Tensor):
        raise ConfigError(f"{what} must give its sums as a tensor, it gives a {type(sums).__name__}")
    return sums.double()


# --- counting


@dataclass(frozen=True)
class Tally:
    """What was counted of a model's answers to some samples."""

    right: int
    loss: float
    """Summed cross-entropy."""
    sums: Mapping[str, Sums] = field(default_factory=dict)
    """The table of all classes under `PER_CLASS`, and the sums of each own metric under its name."""
    values: Mapping[str, float | None] = field(default_factory=dict)
    """In a real federation: the metrics of a client that does not send its sums."""

    def value(self, name: str, key: str, metric: Metric) -> float | None:
        """A metric of this client alone."""
        return metric.values(self.sums[key][None])[0] if key in self.sums else self.values.get(name)

    def to_tree(self) -> dict[str, Any]:
        """For a checkpoint."""
        sums = {name: torch.from_numpy(np.array(found)) for name, found in self.sums.items()}
        return {"right": self.right, "loss": self.loss, "sums": sums, "values": dict(self.values)}

    @classmethod
    def from_tree(cls, tree: Any) -> Tally:
        """From a checkpoint."""
        return cls(tree["right"], tree["loss"], {n: s.numpy() for n, s in tree["sums"].items()}, tree["values"])

    def fits(self, own: Sequence[Own], classes: int) -> bool:
        """Whether this tally, which may come from a file, belongs to an experiment with these metrics and classes."""
        shapes = {PER_CLASS: (4, classes)} | {name: shape for name, _, shape in own}
        sums = self.sums.keys() == shapes.keys() and all(self.sums[n].shape == shape for n, shape in shapes.items())
        numbers = (self.right, self.loss, *(value for value in self.values.values() if value is not None))
        return (sums or not self.sums) and all(isinstance(number, int | float) for number in numbers)


class Places:
    """Counts answers to some samples, by class and by part; a part is, for example, a client's test data.

    It can be reused for the same samples with other models. Samples of parts beyond the first `parts` are not counted.
    """

    def __init__(self, labels: NDArray[np.int64], part: NDArray[np.int64], parts: int, classes: int) -> None:
        self._parts, self._classes = parts, classes
        self._first = (part * classes).ravel()
        self._of_label = self._first + labels.ravel()
        self._samples = self._add_up(self._of_label)

    def _add_up(self, places: NDArray[np.int64], weights: NDArray[Any] | None = None) -> NDArray[Any]:
        found = np.bincount(places, weights, (self._parts + 1) * self._classes)
        return found[: self._parts * self._classes].reshape(self._parts, self._classes)

    def count(self, predicted: NDArray[np.int64], right: NDArray[np.bool_], lost: NDArray[np.float64]) -> Sums:
        """The table of each part."""
        table = np.empty((self._parts, 4, self._classes))
        table[:, SAMPLES] = self._samples
        table[:, RIGHT] = self._add_up(self._of_label, right.ravel())
        table[:, PREDICTED] = self._add_up(self._first + predicted.ravel())
        table[:, LOSS] = self._add_up(self._of_label, lost.ravel())
        return table


class OwnSums:
    """The sums of the user's own metrics, part by part."""

    def __init__(self, own: Sequence[Own], parts: int) -> None:
        self._own = own
        self._sums = {name: np.zeros((parts, *shape)) for name, _, shape in own}

    def add(self, part: int, logits: Tensor, labels: Tensor) -> None:
        """Some samples of a part."""
        for name, metric, shape in self._own:
            try:
                found = metric.sums(logits, labels)
                if found.shape != shape:
                    raise ValueError(f"sums of the shape {tuple(found.shape)}, they had {shape} before")
            except Exception as error:  # it is the user's code: whatever stops it is the answer
                raise RunError(f"the metric {name!r} failed ({type(error).__name__}: {error})") from None
            self._sums[name][part] += found.double().cpu().numpy()

    def of(self, part: int) -> dict[str, Sums]:
        """All sums of a part."""
        return {name: sums[part] for name, sums in self._sums.items()}


# --- from sums to numbers


def everything(own: Sequence[Own]) -> list[tuple[str, str, Metric]]:
    """All metrics but the accuracy, which is counted anyway: (name, key of its sums, metric)."""
    others = [(name, PER_CLASS, metric) for name, metric in BUILT_IN.items() if name != "accuracy"]
    return others + [(name, name, metric) for name, metric, _ in own]


class Numbers(NamedTuple):
    """All metrics by name, over all clients and for each; and the table of all classes, if every client sends its table."""

    over_all: dict[str, float | None]
    clients: dict[str, list[float | None]]
    table: Sums | None


def numbers(
    tallies: Sequence[Tally], samples: Sequence[int], own: Sequence[Own] = (), clients: bool = True
) -> Numbers:
    """The metrics of some clients' tallies; None for a client without samples.

    Over all clients the sums are added, so that a client counts by its samples. Where a client tells only its values, the
    metric over all is the mean of the clients' values, weighted by their samples.
    """
    some = np.array(samples) > 0
    over_all: dict[str, float | None] = {}
    of_clients: dict[str, list[float | None]] = {}
    rows: dict[str, Sums | None] = {}  # of each client that has samples, and last of all together
    for key in (PER_CLASS, *(name for name, _, _ in own)):
        rows[key] = None
        if all(key in tally.sums for tally in tallies):
            stack = np.stack([tally.sums[key] for tally in tallies])
            whole = stack.sum(0, keepdims=True)
            rows[key] = np.concatenate([stack[some], whole]) if clients else whole
    for name, key, metric in everything(own):
        sums = rows[key]
        if sums is None:
            told = [tally.value(name, key, metric) if one else None for tally, one in zip(tallies, some, strict=True)]
            over_all[name], of_clients[name] = _weighted(told, samples), told
            continue
        *found, over_all[name] = metric.values(sums) if some.any() else [None]
        left = iter(found)
        of_clients[name] = [next(left) if one else None for one in some] if clients else []
    table = rows[PER_CLASS]
    return Numbers(over_all, of_clients, None if table is None else table[-1])


def _weighted(values: Sequence[float | None], samples: Sequence[int]) -> float | None:
    known = [(value, count) for value, count in zip(values, samples, strict=True) if value is not None]
    return finite(sum(value * count for value, count in known) / sum(count for _, count in known)) if known else None


def finite(value: float) -> float | None:
    """The number, or None if it is not finite."""
    return value if isfinite(value) else None


def worth(value: float | None, lower_is_better: bool) -> float:
    """The number by which rounds are picked: more is better, and a round without a value is the worst."""
    return -np.inf if value is None else -value if lower_is_better else value
