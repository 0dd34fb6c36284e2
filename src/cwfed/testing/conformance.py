"""One suite that every algorithm passes, whatever it does inside; yours too.

With pytest, in a file test_mine.py beside mine.py:

    from cwfed import testing

    class TestMine(testing.Suite):
        algorithm = "mine:Mine"

Without: `cwfed.testing.check("mine:Mine")` carries out the same checks and raises an AssertionError that names those that failed.
Everything is done by the simulator, on data of seconds.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cwfed.algorithms import FedAvg, build, describe, name_of
from cwfed.core.events import PhaseResult, Round
from cwfed.core.types import Cost, ExtraSpec, Uploads
from cwfed.engine.base import sends_each
from cwfed.federation.config import Config, from_table, with_settings
from cwfed.federation.cost import sizes, without_numbers
from cwfed.federation.guard import spec_of
from cwfed.federation.rounds import Progress, from_tree, to_tree
from cwfed.federation.simulation import Simulation
from cwfed.models import attached
from cwfed.runs import checkpoint, session

BASE = ("model.name=mlp", "model.options.hidden=16", "data.clients=6", "train.rounds=3", "train.lr=0.05")
"""A digits experiment of a second."""
FEW = "data.samples=300"
"""What the suite takes of them: a run is then a tenth of a second."""
TWO = "train.rounds=2"
"""The fewest in which what a round leaves is used by another."""
BATCH_NORM = ("model.name=cwfed.testing.problems:with_batch_norm", "model.options={}")
SMALL_THINGS = 8 * 12
"""Bytes that a participant may send and `cwfed cost` does not count: an index, a handful of weights."""

Outcome = tuple[dict[str, object], list[dict[str, object]]]


class Suite:
    """The checks, one per method `test_...`; a subclass names the algorithm."""

    algorithm: str | type[FedAvg] | FedAvg = "fedavg"
    """A registered name, "module:Class", the class, or an algorithm with its hyper-parameters."""
    settings: Sequence[str] = ()
    """Added to every experiment: hyper-parameters, or what makes the algorithm cheaper to run."""
    still: Sequence[str] = ()
    """Settings with which nothing moves where the learning rate is next to nothing, such as a rate of the algorithm's own."""
    sends_others_models: bool = False
    """Whether clients are sent the models of other clients, as far as those have taken part."""

    def moves_anyway(self, simulation: Simulation) -> set[str]:
        """Tensors that the server changes although nobody trained."""
        return set()

    def kept_besides(self, simulation: Simulation) -> int:
        """Numbers that the server keeps and `costs` does not count."""
        return 0

    def simulation(self, *more: str) -> Simulation:
        """The experiment with these settings on top."""
        return Simulation(self.config(*more))

    def config(self, *more: str) -> Config:
        """Its settings."""
        base = with_settings(Config(), [*BASE, FEW])
        return with_settings(
            from_table(base.model_dump() | {"algorithm": table_of(self.algorithm)}), [*self.settings, *more]
        )

    # --- the same bits

    def test_the_seed_decides_everything(self) -> None:
        first = outcome(self.simulation(TWO))
        assert outcome(self.simulation(TWO)) == first, (
            "two runs with the same seed differ: draw only from what cwfed hands out, and keep nothing in the algorithm itself"
        )
        assert outcome(self.simulation(TWO, "run.seed=1")) != first, "the seed changes nothing"

    def test_engine_and_workers_do_not_matter(self) -> None:
        for model in ("mlp", "cnn"):
            options = [f"model.name={model}", "model.options.hidden=16", TWO, "data.clients=4", "data.samples=160"]
            loop = outcome(self.simulation("run.engine=loop", *options))
            threads = outcome(self.simulation("run.engine=threads", "run.workers=3", *options))
            assert threads == loop, f"three clients side by side ({model}) give other bits than one after the other"

    def test_interrupted_equals_uninterrupted(self) -> None:
        config = self.config("train.rounds=4", "train.participation=0.5", "train.client_dropout=0.2")
        whole, _ = outcome(Simulation(config))
        simulation = Simulation(config)
        progress = simulation.start()
        for progress, _ in simulation.rounds(progress):
            if progress.round == 2:
                break
        simulation.close()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            checkpoint.save(path, to_tree(progress))
            continued, reached = Simulation(config), from_tree(checkpoint.load(path))
            continued.check_progress(reached)
            resumed, _ = finish(continued, reached)
        assert leaves(to_tree(resumed)) == whole, (
            "a resumed run differs: all that the server knows must be in its state"
        )

    # --- who takes part

    def test_partial_participation_and_lost_clients(self) -> None:
        _, events = finish(self.simulation("train.rounds=6", "train.participation=0.5", "train.client_dropout=0.3"))
        assert all(len(e.participants) + len(e.dropped) == 3 for e in events), "half of six clients are three"
        assert any(e.dropped for e in events), "nobody was lost"
        assert all(0 <= phase(e).accuracy <= 1 for e in events), "an accuracy is no share"

    def test_a_round_that_loses_everybody_changes_nothing(self) -> None:
        simulation = self.simulation("train.rounds=1", "train.client_dropout=0.999999")
        before = simulation.start()
        progress, (event,) = finish(simulation, before)
        assert (event.participants, event.loss, event.up) == ([], None, 0), "somebody took part"
        assert leaves(progress.server) == leaves(before.server), "the state changed in a round without participants"

    def test_single_class_clients_and_a_class_nobody_has(self) -> None:
        data = [
            "data.name=cwfed.testing.problems:blobs",
            "data.samples=0",
            "data.partition=cwfed.testing.problems:one_class_each",
        ]
        progress, events = finish(self.simulation(*data, "data.clients=3"))
        assert all(bool(t.isfinite().all()) for t in tensors(progress.server)), "the state is not finite"
        assert is_finite(phase(events[-1]).loss), "the loss is not finite"

    def test_a_client_that_never_took_part_has_a_model(self) -> None:
        simulation = self.simulation("data.newcomers=2")
        progress = simulation.start()
        for progress, event in simulation.rounds(progress):
            assert not set(event.participants) & set(simulation.newcomers), "a newcomer took part"
        model = simulation.final_model(progress, simulation.newcomers[0])
        joined = simulation.welcome(progress)
        simulation.close()
        network = {n: w.shape for n, w in simulation.fresh(0).items() if not attached(simulation.template, n)}
        assert {n: w.shape for n, w in model.items()} == network, (
            "a newcomer's model does not have the network's tensors"
        )
        assert joined is not None, "no newcomer was measured"
        assert 0 <= joined.histogram <= 1, "an accuracy is no share"

    # --- what it costs

    def test_traffic_is_what_cwfed_cost_says(self) -> None:
        simulation = self.simulation("train.rounds=3")
        cost = cost_of(simulation, participants=6)
        _, events = finish(simulation)
        for event in events[1:]:  # in round 1 there may be nothing to send yet
            assert event.down == 4 * cost.down, (
                f"{event.down} bytes were sent to clients, `costs` says {4 * cost.down}"
            )
            more = event.up - 4 * cost.up
            assert 0 <= more <= 6 * SMALL_THINGS, f"{event.up} bytes were sent by clients, `costs` says {4 * cost.up}"
        half = self.simulation("train.rounds=3", "train.participation=0.5")
        most = 4 * cost_of(half, participants=3).down
        _, events = finish(half)
        for i, event in enumerate(events):
            heard = len({c for earlier in events[:i] for c in earlier.participants})
            expected = most * heard // 6 if self.sends_others_models else most
            assert event.down == expected, f"{event.down} bytes were sent to three clients, `costs` says {expected}"
            assert event.up == events[0].up, "what clients send grows"

    def test_server_memory_is_what_cwfed_cost_says(self) -> None:
        simulation = self.simulation("data.clients=12")
        progress, _ = finish(simulation)
        kept = (
            sum(t.numel() * min(4, t.element_size()) for t in tensors(progress.server)) // 4
        )  # a byte is a quarter of a number
        said = cost_of(simulation, participants=12).server + self.kept_besides(simulation)
        slack = 12 * 12 + 12 + 10 * 10 + 12  # small matrices: attention, affinity, recipe, clusters
        assert abs(kept - said) <= slack, f"the server keeps {kept} numbers, `costs` says {said}"

    # --- the maths

    def test_when_nobody_moves_nothing_moves(self) -> None:
        simulation = self.simulation("train.rounds=2", "train.lr=1e-40", *self.still)
        before = simulation.start()
        after, _ = finish(simulation, before)
        anyway = self.moves_anyway(simulation)
        for client in range(3):
            now = simulation.algorithm.send(after.server, client).models
            for sent, was in zip(now, [*simulation.algorithm.send(before.server, client).models, *now], strict=False):
                for n, w in sent.items():
                    is_same = n in anyway or torch.allclose(w, was[n], rtol=1.3e-6, atol=1e-5)
                    assert is_same, f"{n} moved although nobody trained: do the weights of an average sum to 1?"

    def test_aggregating_does_not_change_the_state_it_is_given(self) -> None:
        simulation = self.simulation("train.rounds=2")
        kept = []
        for progress, _ in simulation.rounds(simulation.start()):
            kept.append((progress, leaves(to_tree(progress))))
        simulation.close()
        for progress, then in kept:
            assert leaves(to_tree(progress)) == then, "a later round changed the state of an earlier one in place"

    def test_learns_a_separable_problem(self) -> None:
        data = [
            "data.name=cwfed.testing.problems:blobs",
            "data.samples=0",
            "data.partition=dirichlet",
            "data.alpha=0.5",
        ]
        summary = session.run(
            self.config(*data, "data.clients=4", "train.rounds=15", "train.lr=0.06", "run.evaluate_every=3")
        )
        reached = summary.reported.accuracy
        assert reached > 0.97, f"it reaches {reached:.1%} where 97 % are easy"

    def test_works_with_batch_norm(self) -> None:
        for policy in ("local", "average"):
            _, events = finish(
                self.simulation(*BATCH_NORM, TWO, f"train.batch_norm={policy}", "train.participation=0.7")
            )
            last = events[-1]
            assert is_finite(phase(last).loss), f"the loss on receipt is not finite (train.batch_norm={policy})"
            assert last.trained, "nothing was measured after training"
            assert is_finite(last.trained.loss), f"the loss after training is not finite (train.batch_norm={policy})"

    def test_runs_with_fasttext_on_every_partition(self) -> None:
        text = [
            "data.name=cwfed.testing.problems:few_words",
            "data.samples=0",
            "model.name=fasttext",
            "model.options.hidden=16",
        ]
        for partition in ("pathological", "dirichlet", "iid"):
            more = [f"data.partition={partition}", "data.alpha=0.5", "train.participation=0.7"]
            _, events = finish(self.simulation(*text, TWO, *more))
            assert is_finite(phase(events[-1]).loss), f"the loss is not finite ({partition})"

    def test_its_config_table_builds_it_again(self) -> None:
        table = self.config().algorithm
        algorithm = build(table)
        assert build(describe(algorithm, table["name"])) == algorithm, "its fields do not say all about it"

    # --- what it sends

    def test_what_is_sent_together_is_what_is_sent_one_by_one(self) -> None:
        simulation = self.simulation("train.rounds=1")
        after, _ = finish(simulation, simulation.start())
        algorithm, clients = simulation.algorithm, simulation.members
        if not sends_each(algorithm):
            return  # it is asked one by one
        for client, sent in zip(clients, algorithm.send_each(after.server, clients), strict=True):
            alone = algorithm.send(after.server, client)
            pairs = [*zip((*sent.models, sent.notes), (*alone.models, alone.notes), strict=True)]
            is_same = all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in pairs)
            assert is_same, "`send_each` and `send` give a client something else: override both, or `send` alone"

    def test_the_guard_knows_what_an_honest_upload_looks_like(self) -> None:
        """`extras_spec` is exactly what `finish` sends: nothing of an honest run is refused, and nothing is missing."""
        simulation = self.simulation()
        guard, rounds = simulation.guard, uploads_of(simulation)
        assert len(rounds) == 3, "updates of honest clients were refused"
        for up in rounds:
            assert up.clients == tuple(range(6)), "updates of honest clients were refused"
            for row, count in enumerate(up.counts.tolist()):
                model, extras = row_of(up, row)
                said = {n: ExtraSpec(form.dtype, form.shape) for n, form in guard.extras_spec.items()}
                assert spec_of(extras) == said, f"`finish` sends {spec_of(extras)}, `extras_spec` says {said}"
                assert guard.problem(model, extras, count) == "", guard.problem(model, extras, count)

    def test_the_guard_refuses_everything_else(self) -> None:
        simulation = self.simulation("train.rounds=1")
        guard, (up,) = simulation.guard, uploads_of(simulation)
        count, (model, extras) = int(up.counts[0]), row_of(up, 0)
        for samples in (0, -1, 2.5, 10**12, math.nan, math.inf):
            assert "training samples" in guard.problem(model, extras, samples), f"{samples} samples are taken"
        for n in model:
            for bad in damaged(model, n):
                assert guard.problem(bad, extras, count), f"a damaged {n} is taken"
        for n in extras:
            for bad in damaged(extras, n):
                assert guard.problem(model, bad, count), f"a damaged {n} beside the model is taken"
        assert guard.problem(model, extras, count) == "", "an honest update is refused"


def check(algorithm: str | type[FedAvg] | FedAvg, *settings: str, suite: type[Suite] = Suite) -> None:
    """Carry out all checks of the suite for an algorithm; AssertionError names those that failed, and why.

    `settings` are added to every experiment, such as "algorithm.strength=0.5".
    """
    one = suite()
    one.algorithm, one.settings = algorithm, [*suite.settings, *settings]
    failed = []
    for name in (name for name in dir(suite) if name.startswith("test_") and getattr(suite, name)):
        try:
            getattr(one, name)()
        except Exception as error:  # whatever stops the algorithm is the answer
            failed.append(f"{name.removeprefix('test_').replace('_', ' ')}: {error or type(error).__name__}")
    assert not failed, f"{table_of(algorithm)['name']} does not conform:\n" + "\n".join(failed)


def table_of(algorithm: str | type[FedAvg] | FedAvg) -> dict[str, Any]:
    """The algorithm's table in a config."""
    if isinstance(algorithm, str):
        return {"name": algorithm}
    made = algorithm() if isinstance(algorithm, type) else algorithm
    return describe(made, name_of(made))


# --- what the checks look at


def finish(simulation: Simulation, progress: Progress | None = None) -> tuple[Progress, list[Round]]:
    """Carry out all rounds; the last progress and all round events."""
    try:
        progress = progress or simulation.start()
        events = []
        for progress, event in simulation.rounds(progress):
            events.append(event)
        return progress, events
    finally:
        simulation.close()


def outcome(simulation: Simulation) -> Outcome:
    """All that a run leaves: two are equal when these are."""
    progress, events = finish(simulation)
    return leaves(to_tree(progress)), [without_seconds(event) for event in events]


def leaves(tree: Any) -> dict[str, object]:
    """All leaves of a nested state by path, tensors as bytes: two states are equal when these are."""
    if isinstance(tree, dict):
        items: Iterator[tuple[Any, Any]] = iter(tree.items())
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    else:
        return {"": (tuple(tree.shape), tree.numpy().tobytes()) if hasattr(tree, "numpy") else tree}
    return {f"{key}/{path}": leaf for key, value in items for path, leaf in leaves(value).items()}


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of a nested state."""
    if isinstance(tree, Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    return [t for value in values for t in tensors(value)]


def without_seconds(event: Round) -> dict[str, object]:
    """An event without what may differ between two equal runs."""
    return {key: value for key, value in vars(event).items() if key != "seconds"}


def phase(event: Round) -> PhaseResult:
    """How good the models are on receipt."""
    assert event.received is not None, f"round {event.round} was not evaluated"
    return event.received


def is_finite(value: float | None) -> bool:
    """None, in an event, is beyond all bounds."""
    return value is not None and math.isfinite(value)


def cost_of(simulation: Simulation, participants: int) -> Cost:
    """What the algorithm says that it costs here."""
    config, shape = simulation.config, simulation.federation.shape
    classes = simulation.task.classes
    network = without_numbers(config.model.name, shape, classes, config.model.options)
    return simulation.algorithm.costs(
        sizes(simulation.algorithm, network, classes, simulation.clients, participants)
    )[0]


def uploads_of(simulation: Simulation) -> list[Uploads]:
    """What the server is given, round by round."""
    seen: list[Uploads] = []
    cls = type(simulation.algorithm)
    aggregate = cls.aggregate

    def watch(algorithm: FedAvg, state: Any, up: Uploads) -> Any:
        seen.append(up)
        return aggregate(algorithm, state, up)

    with mock.patch.object(cls, "aggregate", watch):
        finish(simulation)
    return seen


def row_of(up: Uploads, row: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One client's model, and what goes up beside it."""
    return {n: w[row] for n, w in up.models.items()}, {n: w[row] for n, w in up.extras.items()}


def damaged(kind: dict[str, Tensor], n: str) -> list[dict[str, Tensor]]:
    """The same with something wrong about one tensor."""
    w = kind[n]
    bad = [
        {k: v for k, v in kind.items() if k != n},
        kind | {"stowaway": w},
        kind | {n: torch.stack([w, w])},
        kind | {n: w.to(torch.float16)},
    ]
    if w.is_floating_point():
        bad += [kind | {n: torch.full_like(w, value)} for value in (torch.nan, torch.inf, -torch.inf, 3e38)]
    if n == "class_counts":
        bad += [kind | {n: w * factor} for factor in (0, 0.5, 2)]
    return bad
