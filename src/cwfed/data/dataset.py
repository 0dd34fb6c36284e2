"""A data set in memory: made from arrays, from a torch data set or client by client, and checked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cwfed.core.errors import MOST_NAME, DataError, plain
from cwfed.core.plugins import why

if TYPE_CHECKING:
    from torch.utils.data import Dataset as TorchDataset

PARTS = ("train", "validation", "test")
"""The parts of a client's data; parts.npy of a written data set has the position of each sample's part in this tuple."""


@dataclass(frozen=True)
class Dataset:
    """Samples and labels. Images are N x H x W x C; bytes are pixels, whole numbers tokens, floats as they are.

    Examples:
        >>> import cwfed
        >>> digits = cwfed.load_data("digits")
        >>> digits.inputs.shape, digits.classes
        ((1797, 8, 8, 1), 10)
    """

    name: str
    inputs: NDArray[Any]
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]
    words: tuple[str, ...] = ()
    """For text: the word of each token; 0 is padding, 1 any unknown word."""
    fixed_split: tuple[tuple[NDArray[np.int64], ...], ...] | None = None
    """For data that are split already: (train, test) or (train, validation, test) sample numbers of each client."""
    digest: str = ""
    """A hash of inputs and labels."""
    owners: NDArray[np.int64] | None = None
    """For data with natural clients: the number of each sample's client, an index of `owner_names`."""
    owner_names: tuple[str, ...] = ()
    """The names of the natural clients."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", plain(self.name, MOST_NAME))
        object.__setattr__(self, "class_names", tuple(plain(name, MOST_NAME) for name in self.class_names))
        problem = _problem(self)
        if problem:
            raise DataError(f"data set {self.name!r}: {problem}")
        if not self.digest:
            object.__setattr__(self, "digest", digest_of(self.inputs, self.labels))

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @classmethod
    def from_arrays(
        cls,
        inputs: ArrayLike,
        labels: ArrayLike,
        *,
        name: str = "arrays",
        class_names: Sequence[str] | None = None,
        clients: ArrayLike | None = None,
    ) -> Dataset:
        """A data set from arrays, without a file.

        Arguments:
            inputs: images N x H x W x C or N x H x W (bytes are pixels, floats as they are), or vectors N x F. A torch tensor of
                four dimensions is read as torch's N x C x H x W.
            labels: one for each sample, numbers or texts.
            name: what messages and tables call it.
            class_names: the names of the classes 0 .. K-1 where the labels are these numbers. Default: the labels, sorted.
            clients: the natural client of each sample, for `data.partition = "column"`. Default: none.

        Returns:
            The data set, for `cwfed.run(data=...)`.

        Errors:
            CwfedError, one sentence: lengths that differ, one-hot labels, N x C x H x W in numpy, values that are not finite.

        Examples:
            >>> import numpy as np
            >>> Dataset.from_arrays(np.zeros((4, 8, 8)), ["cat", "dog", "cat", "dog"]).class_names
            ('cat', 'dog')
        """
        return cls._made(name, _inputs(name, inputs), labels, class_names, clients)

    @classmethod
    def _made(cls, name: str, inputs: NDArray[Any], labels: Any, class_names: Any, clients: Any) -> Dataset:
        numbers, names = _classes(name, labels, class_names)
        made = cls(name, inputs, numbers, names)
        return made if clients is None else made.owned_by(clients)

    @classmethod
    def from_torch(
        cls,
        data: TorchDataset[Any],
        *,
        name: str = "",
        class_names: Sequence[str] | None = None,
        clients: ArrayLike | None = None,
    ) -> Dataset:
        """A data set from one of torch: all samples are read once, into memory.

        Arguments:
            data: a torch.utils.data.Dataset with a length, whose samples are (input, label): an image C x H x W or H x W, a vector,
                or a picture of PIL; the label a number.
            name: default: that of its class.
            class_names: default: its attribute `classes` where it has one, as torchvision's do, else the labels.
            clients: as for `from_arrays`.

        Returns:
            The data set, for `cwfed.run(data=...)`.

        Errors:
            CwfedError, one sentence: no length, samples that are no pair, or of different shapes.

        Examples:
            >>> import torch
            >>> pairs = torch.utils.data.TensorDataset(torch.zeros(6, 3, 8, 8), torch.arange(6) % 2)
            >>> Dataset.from_torch(pairs).inputs.shape
            (6, 8, 8, 3)
        """
        name = name or type(data).__name__
        try:
            samples = [_sample(data[i]) for i in range(len(data))]  # type: ignore[arg-type]
            inputs = _floats(np.stack([given for given, _ in samples]))
        except Exception as error:  # it may be the user's code: whatever stops it is the answer
            raise DataError(
                f"the torch data set {name!r} must have a length and samples (input, label) of one shape: {why(error)}"
            ) from None
        labels = [label for _, label in samples]
        if class_names is None and all(isinstance(label, int) for label in labels):
            known = getattr(data, "classes", None)
            class_names = (
                known if isinstance(known, list | tuple) and all(isinstance(k, str) for k in known) else None
            )
        return cls._made(name, inputs, labels, class_names, clients)

    @classmethod
    def from_clients(
        cls,
        clients: Mapping[Any, Any] | Sequence[Any],
        *,
        name: str = "arrays",
        class_names: Sequence[str] | None = None,
    ) -> Dataset:
        """A data set that comes split: each client brings its own training and test samples.

        Arguments:
            clients: for each client its parts, (train, test) or (train, validation, test), each a pair (inputs, labels) as for
                `from_arrays`; a list, or a dict by the clients' names.
            name: what messages and tables call it.
            class_names: as for `from_arrays`.

        Returns:
            The data set; the settings of the partition do not apply to it.

        Errors:
            CwfedError, one sentence: a part that is no pair, a client without training samples, shapes that differ.

        Examples:
            >>> import numpy as np
            >>> one = (np.zeros((6, 2)), [0, 1, 0, 1, 0, 1]), (np.zeros((2, 2)), [0, 1])
            >>> len(Dataset.from_clients({"anna": one, "ben": one}).fixed_split)
            2
        """
        if not isinstance(clients, Mapping | Sequence) or not clients:
            raise DataError(f"data set {name!r}: clients must be a list or a dict with one client or more")
        items = list(clients.items() if isinstance(clients, Mapping) else enumerate(clients))
        inputs, labels, split, at = [], [], [], 0
        for client, parts in items:
            own = []
            try:
                pairs = [(x, y) for x, y in parts]
                fits = len(pairs) in (2, 3) and all(np.ndim(x) and np.ndim(y) and len(x) == len(y) for x, y in pairs)
            except (TypeError, ValueError):
                fits = False
            if not fits:
                raise DataError(
                    f"data set {name!r}: client {client!r} must have (train, test) or (train, validation, test), each a pair "
                    "(inputs, labels) of the same length"
                )
            for x, y in pairs:
                inputs.append(_inputs(name, x))
                labels.append(_array_of(name, "labels", y))
                own.append(np.arange(at, at := at + len(y)))
            split.append(tuple(own))
        if len({x.shape[1:] for x in inputs}) != 1:
            raise DataError(
                f"data set {name!r}: the clients' samples have {len({x.shape[1:] for x in inputs})} different shapes"
            )
        # an empty list has no labels, and no type either
        numbers, names = _classes(name, np.concatenate([y for y in labels if len(y)] or labels), class_names)
        return cls(
            name,
            np.concatenate(inputs),
            numbers,
            names,
            fixed_split=tuple(split),
            owner_names=tuple(str(client) for client, _ in items),
        )

    def owned_by(self, clients: ArrayLike) -> Dataset:
        """The same data with natural clients: `clients` names the client of each sample, by a number or a text."""
        values = _array_of(self.name, "clients", clients).tolist()
        if not all(isinstance(value, str) for value in values) and not all(
            isinstance(value, int) for value in values
        ):
            raise DataError(
                f"data set {self.name!r}: clients are named by texts or by whole numbers, one for each sample"
            )
        owners, names = number_labels(values)
        return replace(self, owners=owners, owner_names=names)


def _inputs(name: str, given: Any) -> NDArray[Any]:
    """Inputs of any kind as an array N x H x W x C or N x F."""
    is_torch = hasattr(given, "detach")
    array = _floats(_array_of(name, "inputs", given))
    if array.ndim == 3:
        return array[..., None]
    if array.ndim == 4 and is_torch:
        return np.ascontiguousarray(array.transpose(0, 2, 3, 1))
    if array.ndim == 4 and array.shape[1] in CHANNELS and array.shape[3] not in CHANNELS:
        raise DataError(
            f"data set {name!r}: inputs of shape {array.shape} look like N x C x H x W: give N x H x W x C, as "
            "inputs.transpose(0, 2, 3, 1), or a torch tensor, which is read as N x C x H x W"
        )
    return array


def _array_of(name: str, what: str, given: Any) -> NDArray[Any]:
    """Anything array-like as an array with one entry per sample."""
    try:
        array = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    except (TypeError, ValueError) as error:  # rows of different lengths, or a type of torch's that numpy lacks
        raise DataError(f"data set {name!r}: {what} cannot be made into an array: {error}") from None
    if array.ndim == 0:
        raise DataError(f"data set {name!r}: {what} must have an entry for each sample, and there is only {given!r}")
    return array


def _floats(array: NDArray[Any]) -> NDArray[Any]:
    """Floats of any precision as float32; whole numbers as they are."""
    return array.astype(np.float32, copy=False) if np.issubdtype(array.dtype, np.floating) else array


CHANNELS = (1, 3, 4)
"""Of grey, colour and transparent images."""


def _sample(pair: Any) -> tuple[NDArray[Any], Any]:
    """A sample of a torch data set: an image as H x W x C."""
    given, label = pair
    is_tensor = hasattr(given, "detach")
    array = np.asarray(given.detach().cpu() if is_tensor else given)
    if array.ndim == 3 and is_tensor:
        array = array.transpose(1, 2, 0)
    elif array.ndim == 2:
        array = array[..., None]
    return array, label.item() if hasattr(label, "item") else label


def _classes(name: str, given: Any, names: Sequence[str] | None) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Labels as 0 .. K-1, and the names of the classes; DataError for one-hot labels and fractions."""
    array = _array_of(name, "labels", given)
    if array.ndim == 2 and array.shape[1] > 1:
        hot = np.issubdtype(array.dtype, np.number) and bool(
            ((array == 1).sum(1) == 1).all() and ((array != 0).sum(1) == 1).all()
        )
        raise DataError(
            f"data set {name!r}: labels must be one number or text for each sample, and these have the shape {array.shape}: "
            + ("they are one-hot, give labels.argmax(1)" if hot else "give one column of them")
        )
    if np.issubdtype(array.dtype, np.floating) and (array != np.floor(array)).any():
        raise DataError(
            f"data set {name!r}: labels are classes, and these are fractions such as {array[array != np.floor(array)][0]:g}: if "
            "they are names of classes, give them as texts, labels.astype(str)"
        )
    if names is None:
        return number_labels(array.reshape(-1).tolist())
    if not np.issubdtype(array.dtype, np.integer):
        raise DataError(
            f"data set {name!r}: with class_names, labels must be the numbers of these classes, not {array.dtype}"
        )
    return array.reshape(-1).astype(np.int64), tuple(map(str, names))


def number_labels(raw: Iterable[Any]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Any labels as 0 .. K-1 in their sorted order, with their names."""
    values = list(raw)
    try:
        names = sorted(set(values))
    except TypeError:
        raise DataError("the labels must be all numbers or all text") from None
    number = {value: i for i, value in enumerate(names)}
    return np.array([number[v] for v in values], dtype=np.int64), tuple(map(str, names))


def _problem(data: Dataset) -> str:
    """What is wrong with a data set; "" if nothing."""
    inputs, labels = data.inputs, data.labels
    if len(inputs) != len(labels):
        return f"{len(inputs)} samples but {len(labels)} labels"
    if len(labels) == 0:
        return "there are no samples"
    if labels.ndim != 1 or labels.dtype != np.int64:
        return "labels must be one whole number a sample"
    if labels.min() < 0 or labels.max() >= data.classes:
        return f"labels run from {labels.min()} to {labels.max()}, outside the {data.classes} classes"
    if data.classes < 2:
        return "a classifier needs at least two classes"
    if inputs.dtype != np.uint8 and not np.issubdtype(inputs.dtype, np.floating):
        if not (np.issubdtype(inputs.dtype, np.integer) and inputs.ndim == 2 and data.words):
            what = f"inputs of type {inputs.dtype} and shape {inputs.shape[1:]} are neither images, vectors nor text"
            return f"{what}: pixels are bytes (uint8), other numbers floats"
        if inputs.size and (inputs.min() < 0 or inputs.max() >= len(data.words)):
            return f"tokens run from {inputs.min()} to {inputs.max()}, outside the {len(data.words)} words"
    elif inputs.ndim not in (2, 4):
        return f"a sample must be a vector or an image (height, width, channels), not {inputs.shape[1:]}"
    if np.issubdtype(inputs.dtype, np.floating) and not np.isfinite(inputs).all():
        return "some inputs are not finite numbers"
    if data.owners is not None and (
        data.owners.shape != labels.shape or data.owners.min() < 0 or data.owners.max() >= len(data.owner_names)
    ):
        return f"there are {len(labels)} samples, and clients must name the client of each"
    return _split_problem(data.fixed_split, len(labels)) if data.fixed_split is not None else ""


def _split_problem(split: Sequence[Sequence[NDArray[np.int64]]], samples: int) -> str:
    """What is wrong with the split that comes with data; "" if nothing. Clients may share a sample, but hold it only once each."""
    if not split:
        return "its split has no clients"
    for client, parts in enumerate(split):
        arrays = [np.asarray(part) for part in parts]
        if len(arrays) not in (2, 3) or any(a.ndim != 1 or not np.issubdtype(a.dtype, np.integer) for a in arrays):
            return f"client {client} of its split must have (train, test) or (train, validation, test) sample numbers"
        held = np.concatenate(arrays)
        if not len(arrays[0]):
            return f"client {client} of its split has no training samples"
        if held.min() < 0 or held.max() >= samples:
            return f"client {client} of its split has a sample outside 0 to {samples - 1}"
        if len(np.unique(held)) < len(held):
            return f"client {client} of its split has a sample twice"
    return ""


def digest_of(*arrays: NDArray[Any]) -> str:
    """A hash of arrays: types, shapes and contents."""
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(f"{array.dtype.str}{array.shape}".encode())
        sha.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
    return sha.hexdigest()
