"""The settings of an experiment, section by section: type, bounds, default and meaning of each.

The tables of docs/configuration.md are made from this file (`make reference`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator, model_validator

from cwfed.core import metrics, optimizers
from cwfed.core.augment import Augment
from cwfed.core.errors import did_you_mean
from cwfed.data.partition import NAMES as PARTITIONS
from cwfed.data.shift import Shift
from cwfed.data.sources import NAMES, SPLIT, SourceSpec
from cwfed.federation.adversary import Attack
from cwfed.federation.guard import MOST_SAMPLES
from cwfed.federation.settings import Section, setting
from cwfed.models import MODELS
from cwfed.privacy.dp import SamplePrivacy
from cwfed.privacy.norms import Dial

MOST = 10**12
"""The largest count of anything: a config from outside must not make endless lists or loops."""


class DataSection(Section):
    """Which data, and which client holds what."""

    name: str = setting("digits")
    """`digits`, `mnist`, `fashion_mnist`, `cifar10`, `cifar100`, `tiny_imagenet`, `ag_news`; `hub`, `imagefolder`, `csv`, `pfllib`,
    `arrays` with `path`; or your own, `"module:function"`. `memory` and `memory_split` stand for data given in Python."""
    path: str = setting("")
    """For own data: a folder, a file, or a hub name."""
    image_column: str = setting("")
    """`hub`: the column with the images; this, `text_column` or `feature_columns` is needed."""
    text_column: str = setting("")
    """`hub` and `csv`: the column with the texts (`csv`: `text` where none is named)."""
    feature_columns: list[str] = setting(factory=list, since="0.2", before=[])
    """`hub` and `csv`: columns of numbers that make a vector, in place of a text; `["*"]`: all columns but those of labels and clients."""
    label_column: str = setting("label")
    """`hub` and `csv`: the column with the labels."""
    client_column: str = setting("", since="0.2", before="")
    """`hub`, `csv` and the named data sets: the column with the client of each sample, for `partition = "column"`."""
    delimiter: str = setting(",", since="0.2", before=",")
    """`csv`: the character between two columns, such as `";"`."""
    subset: str = setting("", since="0.2", before="")
    """`hub`: the configuration of a repository that has several; offline, the folder of that name."""
    splits: list[str] = setting(factory=list, since="0.2", before=[])
    """`hub`: the splits that are merged, such as `["train", "validation"]` (default: all)."""
    image_size: int = setting(0, ge=0, le=10_000)
    """Resize images to this many pixels a side; 0 leaves them as they are."""
    partition: str = setting("pathological")
    """`pathological`, `dirichlet`, `iid`, `quantity`, `shards`, `extended_dirichlet`, `label_quantity`, `column`, `file`
    ([data.md](data.md)); or your own, `"module:function"`, called as `function(labels, clients, classes, rng)` with a
    numpy generator, which returns an array of sample numbers for each client."""
    classes_per_client: int = setting(2, ge=1, le=MOST)
    """Pathological and extended Dirichlet: classes that each client holds at most; with `clients` times this below the number of classes,
    no client holds some of them, and the run says so."""
    shards_per_client: int = setting(2, ge=1, le=MOST, since="0.2", before=2)
    """Shards: how many each client is dealt."""
    alpha: float = setting(0.1, gt=0)
    """Dirichlet, extended Dirichlet, label plus quantity: smaller is more heterogeneous."""
    quantity_alpha: float = setting(0.5, gt=0, since="0.2", before=0.5)
    """Quantity, label plus quantity: alpha of the clients' sizes; smaller is more unequal."""
    least_samples: int = setting(0, ge=0, le=MOST, since="0.2", before=0)
    """The fewest samples that a client may hold; natural clients (`column`) with fewer are left out. 0: what a batch needs,
    min(4 · batch, N/M/2); for natural clients no minimum."""
    split_file: str = setting("", since="0.2", before="")
    """File: a CSV with the columns client and sample (and part), or the same as JSON ([data.md](data.md))."""
    balanced: bool = setting(False)
    """Pathological: equal shares."""
    shuffled: bool = setting(False)
    """Pathological: classes are dealt in random order."""
    clients: int = setting(20, ge=1, le=10**6)
    """Number of clients. PFLlib folders and split files have their own number; of natural clients (`column`), at most so many take part,
    drawn at random."""
    samples: int = setting(0, ge=0, le=MOST)
    """A fixed random subset of this size, the same for every seed; 0 takes all."""
    validation: float = setting(0.1, ge=0, lt=1)
    """Share of each client's training data that is held out, so that a round can be picked without test data."""
    split_seed: int = setting(-1, ge=-1, before=-1)
    """The seed of the split: partition, test, validation and holdout parts, which clients are newcomers and which are evaluated.
    -1: `run.seed`, so every seed has its own split. Any other number gives all seeds one split, and `run.seed` decides the rest
    (initial models, batches, who takes part)."""
    augment: Augment = setting("none", since="0.2", before="none")
    """Training images are shifted by up to 4 pixels (crop), mirrored (flip) or both; never at evaluation. What is drawn is a function of
    seed, round and client."""
    shift: Shift = setting("none", since="0.2", before="none")
    """Feature shift: the images of each client are turned (rotation) or tinted (colour), by its group ([data.md](data.md))."""
    shift_groups: int = setting(4, ge=1, le=MOST, since="0.2", before=4)
    """The number of groups of clients: the images of group g of G are turned, or their hue is turned, by g/G of a full circle."""
    newcomers: int = setting(0, ge=0, le=10**6)
    """Number of clients that never take part. At the end they are measured with the model that they would get, with and without their
    label histogram."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if ":" not in name and name not in NAMES:
            raise ValueError(f"unknown data set {name!r}: {did_you_mean(name, NAMES)}")
        return name

    @field_validator("partition")
    @classmethod
    def _known_partition(cls, name: str) -> str:
        if ":" not in name and name not in PARTITIONS:
            raise ValueError(f"unknown partition {name!r}: {did_you_mean(name, PARTITIONS)}")
        return name

    @model_validator(mode="after")
    def _fits(self) -> DataSection:
        if len(self.delimiter) != 1 or self.delimiter in '\r\n"':
            raise ValueError(f"data.delimiter = {self.delimiter!r} must be one character, such as ';'")
        if self.split_file and self.partition != "file":
            raise ValueError('data.split_file is read with data.partition = "file"')
        return self

    def source(self) -> SourceSpec:
        """What the loader needs to know."""
        return SourceSpec(
            self.name,
            self.path,
            self.image_column,
            self.text_column,
            self.label_column,
            self.image_size,
            tuple(self.feature_columns),
            self.client_column,
            self.delimiter,
            self.subset,
            tuple(self.splits),
        )

    @property
    def room(self) -> int | None:
        """How many classes all clients together can hold; None where nothing limits that."""
        limited = self.partition in ("pathological", "extended_dirichlet") and self.name not in SPLIT
        return self.clients * self.classes_per_client if limited else None

    def how_split(self) -> str:
        """Who holds what, in a few words."""
        if self.name in SPLIT:
            return "split as in the folder"
        known = {
            "pathological": f"{self.classes_per_client} classes per client",
            "dirichlet": f"Dirichlet({self.alpha:g})",
            "iid": "IID",
            "quantity": f"sizes from Dirichlet({self.quantity_alpha:g})",
            "shards": f"{self.shards_per_client} shards a client",
            "extended_dirichlet": f"{self.classes_per_client} classes per client, Dirichlet({self.alpha:g})",
            "label_quantity": f"Dirichlet({self.alpha:g}), sizes from Dirichlet({self.quantity_alpha:g})",
            "column": f"clients of the column {self.client_column}",
            "file": f"split as in {Path(self.split_file).name}",
        }
        words = known.get(self.partition, self.partition)  # a new partition has at least its name
        return words if self.shift == "none" else f"{words}, {self.shift} in {self.shift_groups} groups"


class ModelSection(Section):
    """Which network."""

    name: str = setting("auto")
    """`auto`, by the kind of data: `cnn` for images, `fasttext` for text, `mlp` for vectors; or `resnet18`, or your own,
    `"module:function"`."""
    options: dict[str, Any] = setting(factory=dict)
    """Keyword arguments of the model, such as `options.hidden = 64`."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if ":" not in name and name not in (*MODELS, "auto"):
            raise ValueError(f"unknown model {name!r}: {did_you_mean(name, (*MODELS, 'auto'))}")
        return name

    @field_validator("options")
    @classmethod
    def _plain(cls, options: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(options, allow_nan=False)
        except (TypeError, ValueError) as error:  # TOML has dates
            raise ValueError(f"model.options must be numbers, texts, lists or tables: {str(error).lower()}") from None
        return options


class TrainSection(Section):
    """How clients train and who takes part."""

    rounds: int = setting(1000, ge=1, le=10**7, changes="length")
    """How many rounds; a finished run can be given more, one that is not finished also fewer (with a cosine schedule neither)."""
    participation: float = setting(1.0, gt=0)
    """Clients in a round: up to 1 a fraction of all clients, above 1 their number."""
    client_dropout: float = setting(0.0, ge=0, lt=1, was="train.dropout")
    """Probability that a participant is lost in a round: it gets the model and never answers."""
    lr: float = setting(0.005, gt=0)
    """The learning rate."""
    batch_size: int = setting(10, ge=1, le=MOST)
    """Samples in a step; the last, incomplete batch is dropped (a client smaller than a batch trains on all of its samples)."""
    epochs: int = setting(1, ge=1, le=10**6)
    """Local epochs of a round."""
    optimizer: optimizers.Name = setting("sgd", since="0.2", before="sgd")
    """The clients' optimiser, with the formulas of torch.optim; its state is new in every round, unless `keep_optimizer`."""
    momentum: float = setting(0.0, ge=0, lt=1, since="0.2", before=0.0)
    """Momentum of SGD."""
    nesterov: bool = setting(False, since="0.2", before=False)
    """Nesterov momentum, for SGD with momentum."""
    weight_decay: float = setting(0.0, ge=0, since="0.2", before=0.0)
    """Weight decay of any optimiser; decoupled in adamw."""
    keep_optimizer: bool = setting(False, since="0.2", before=False)
    """A client keeps its optimiser's state (momentum, Adam's moments) until its next round: one or two more models per client."""
    schedule: Literal["constant", "step", "cosine"] = setting("constant", since="0.2", before="constant")
    """The learning rate over the rounds: constant; multiplied by `decay` every `decay_every` rounds (step); or a half cosine down to 0 at
    round `rounds`, so that a longer run has other rates."""
    decay: float = setting(0.1, gt=0, le=1, since="0.2", before=0.1)
    """The factor of a step of the schedule."""
    decay_every: int = setting(100, ge=1, le=MOST, since="0.2", before=100)
    """Rounds between two steps of the schedule."""
    warm_up: int = setting(0, ge=0, le=MOST, since="0.2", before=0)
    """Rounds in which the learning rate rises linearly to its value."""
    clip: float = setting(0.0, ge=0, since="0.2", before=0.0)
    """The longest gradient of a batch, over all trained parameters; 0: no limit."""
    label_smoothing: float = setting(0.0, ge=0, lt=1, since="0.2", before=0.0)
    """Label smoothing of the cross-entropy in training."""
    batch_norm: Literal["average", "local"] = setting("average")
    """Running statistics of norm layers are averaged as in FedAvg, or stay with each client (local), as in the published code: then a
    client that never trained has none. Weights and biases of norm layers are parameters like any others."""
    precision: Literal["fp32", "bf16"] = setting("fp32", before="fp32")
    """bf16 computes linear and convolution layers in bfloat16, with float32 master weights; the output layer, norm layers, embeddings,
    losses and all mixing stay float32. It is refused if the CPU has no bf16 instructions."""

    @model_validator(mode="after")
    def _fits(self) -> TrainSection:
        if self.optimizer != "sgd" and (self.momentum or self.nesterov):
            raise ValueError(
                f"train.momentum and train.nesterov belong to sgd; {self.optimizer} has moments of its own"
            )
        if self.nesterov and not self.momentum:
            raise ValueError("train.nesterov needs a train.momentum above 0")
        if self.keep_optimizer and self.make_optimizer().is_plain:
            raise ValueError(
                "train.keep_optimizer: plain SGD has no state to keep; set train.momentum or another optimizer"
            )
        return self

    def make_optimizer(self) -> optimizers.Optimizer:
        """What the maths needs to know."""
        if self.optimizer == "sgd":
            return optimizers.SGD(self.momentum, self.nesterov, self.weight_decay)
        return optimizers.Adam(self.weight_decay, decoupled=self.optimizer == "adamw")

    def make_schedule(self) -> optimizers.Schedule:
        """The same for the learning rate."""
        return optimizers.Schedule(self.schedule, self.rounds, self.decay_every, self.decay, self.warm_up)


class RunSection(Section):
    """How the experiment is carried out, and what is measured."""

    seed: int = setting(0, ge=0)
    """Everything random is a function of (seed, purpose, round, client); with `data.split_seed`, the split has a seed of its own."""
    engine: Literal["auto", "loop", "threads", "processes", "vmap"] = setting("auto", changes="nothing")
    """`loop`: one client after the other; `threads`: side by side with one compute thread each, the same bits; `processes`: the same in
    worker processes, the same bits; `vmap`: all clients in one batched step, the same but for rounding. `auto` picks by model, devices
    and number of participants, never by measured time, and says why ([performance.md](performance.md))."""
    workers: int = setting(0, ge=0, le=10_000, changes="nothing")
    """Clients trained side by side; 0: one per core, or one per device where `device` has several."""
    compile: Literal["auto", "always", "never"] = setting("auto", changes="nothing")
    """Whether the vmap engine compiles its step, which changes the last bits; `auto` does if there is a C++ compiler and the run is long
    enough to pay for it (20,000 steps, the same clients in every round). The choice is written to the run's config.toml and
    manifest.json, and a resumed or longer run keeps it."""
    device: str = setting("auto", changes="nothing")
    """Where clients train: `auto`, `cpu`, `cuda` or `mps`. Several devices are separated by commas, such as `cuda:0,cuda:1`: each worker
    process gets one, in turn; `auto`: all GPUs."""
    evaluate_every: int = setting(1, ge=1, le=MOST)
    """Rounds between two evaluations; the last round is always evaluated."""
    evaluate_clients: int = setting(0, ge=0, le=MOST)
    """Evaluate a fixed random sample of this many clients; 0: all."""
    checkpoint_seconds: float = setting(30.0, ge=0, changes="nothing")
    """Least time between two checkpoints; 0 writes one every round."""
    keep_checkpoints: int = setting(1, ge=0, le=2, changes="nothing", since="0.2", before=1)
    """Checkpoints that a finished run keeps. More rounds, models that were not saved and models of newcomers are made from the last one:
    with 0, none of these are possible. A second one is used if the last is damaged."""
    save_models: Literal["auto", "all", "none"] = setting("auto", changes="nothing")
    """Write every client's model of the last round and of the round that validation picked; `auto` does if those of one round fit into
    1 GiB, but not in `cwfed compare` and `cwfed sweep`, which are about numbers."""
    metrics: list[str] = setting(factory=list, since="0.2", before=[])
    """Metrics of your own, `["module:name"]`, beside `accuracy`, `balanced_accuracy`, `macro_f1` and `loss`
    ([evaluation.md](evaluation.md))."""
    pick: str = setting("accuracy", since="0.2", before="accuracy")
    """The metric that rounds are picked by, on test data (`best`) and on held-out data (`validated`, the saved models)."""
    patience: int = setting(0, ge=0, since="0.2", before=0)
    """Stop when that metric on held-out data has not improved for so many evaluated rounds; 0: never. Needs `data.validation` above 0."""

    @model_validator(mode="after")
    def _known(self) -> RunSection:
        metrics.check_names(self.metrics, self.pick)
        return self


class GuardSection(Section):
    """What the server does about bad updates, besides the checks that are always made (`guard.py`)."""

    least: int = setting(1, ge=1, le=10**6, before=1)
    """The fewest good updates of a round; with fewer, the round is skipped and the server's state does not change."""
    most_samples: int = setting(MOST_SAMPLES, ge=1, before=MOST_SAMPLES)
    """The most training samples of a client; one that claims more is refused, because they are its weight in every average."""
    norm_bound: float = setting(0.0, ge=0, before=0.0)
    """Updates longer than this many times the round's median length are scaled back to that limit; 0: never. For methods that send a
    client one model. Federations on Flower have 2 unless they set it ([security.md](security.md))."""


class AdversarySection(Section):
    """Malicious clients, for experiments. They are not evaluated: results are those of the honest clients."""

    clients: int = setting(0, ge=0, le=10**6, before=0)
    """Number of malicious clients, which are drawn from the seed. They take part, but are not evaluated."""
    attack: Attack = setting("class-capture", before="class-capture")
    """What they do to the model they send: make one row of the output layer long, or send NaN everywhere."""
    strength: float = setting(100.0, before=100.0)
    """class-capture: the factor of the captured row; 1: honest, bit for bit."""
    target: int = setting(0, ge=0, le=MOST, before=0)
    """class-capture: the captured class."""


class PrivacySection(Section):
    """What clients do so that their uploads reveal less; docs/privacy.md says what it hides and what it does not."""

    norms: Literal["exact", "noise", "coarse"] = setting("exact", before="exact")
    """Row norms of the uploaded output layer: as trained, with noise, or rounded to a few levels. Refused where it would hide nothing: no
    output layer is uploaded, or class counts are sent."""
    norm_noise: float = setting(0.5, ge=0, before=0.5)
    """noise: its standard deviation, in units of the mean norm."""
    norm_levels: int = setting(2, ge=1, le=MOST, before=2)
    """coarse: the number of levels to which norms are rounded; 1 makes all equal."""
    dp: Literal["off", "sample"] = setting("off", before="off")
    """Differential privacy for every sample of a client: DP-SGD with Poisson batches; epsilon is in `summary.json`. Needs
    `pip install 'cwfed[privacy]'` (Opacus, for its accountant)."""
    dp_clip: float = setting(1.0, gt=0, before=1.0)
    """The longest gradient that a sample may have."""
    dp_noise: float = setting(1.0, ge=0, before=1.0)
    """Standard deviation of the noise in units of `dp_clip`; 0: only clipping, without any guarantee."""
    dp_delta: float = setting(1e-5, gt=0, lt=1, before=1e-5)
    """The delta for which epsilon is given."""
    dp_histogram: float = setting(0.0, ge=0, before=0.0)
    """The epsilon spent once on a noisy class histogram, without which WDR is refused under DP."""
    dp_budget: float = setting(0.0, ge=0, changes="nothing", before=0.0)
    """The largest epsilon that a client may spend; 0: any. A simulation that would exceed it does not begin; the node of a federation
    keeps its own account and does not train any more."""

    def dial(self) -> Dial:
        """What the maths needs to know."""
        return Dial(self.norms, self.norm_noise, self.norm_levels)

    def samples(self) -> SamplePrivacy | None:
        """The same for differential privacy; None where it is off."""
        if self.dp == "off":
            return None
        return SamplePrivacy(self.dp_clip, self.dp_noise, self.dp_delta, self.dp_histogram)
