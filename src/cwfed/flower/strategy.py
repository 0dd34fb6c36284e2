"""A Flower strategy for any algorithm of cwfed, which sends every client a model (or several) of its own.

The algorithm is the same object as in the simulator, and so is the round (`open_round.py`): the strategy sends its messages and reads
the answers.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from cwfed.core.errors import ConfigError, RunError
from cwfed.core.events import Event, Note, PhaseResult, Round, Spent
from cwfed.core.types import Download, ExtraSpec, Params, Phase
from cwfed.engine import Score
from cwfed.engine.tasks import Outbox
from cwfed.federation.open_round import OpenRound, Sizes
from cwfed.federation.rounds import FUTILE, Progress, give_up_in_vain, is_over, mean
from cwfed.flower import replies as replies_of
from cwfed.flower import wire
from cwfed.flower.lobby import Lobby
from cwfed.flower.members import Hello, Members
from cwfed.flower.plan import Plan
from cwfed.flower.post import Post, message_to
from cwfed.flower.replies import Upload

log = logging.getLogger("cwfed.flower")

NOTHING = ArrayRecord(), ConfigRecord()
"""The arguments of Flower's steps for a common model and settings, which do not exist here."""
ACCOUNTS = (
    "a federation: the noise is each node's own, and epsilon is what its own account said with its last update; rounds whose "
    "answer was lost cost too and are in that account only"
)


class PersonalisedStrategy(Strategy):
    """Any algorithm of cwfed on Flower: `strategy.start(grid)` runs the federation of a plan."""

    def __init__(
        self,
        plan: Plan,
        *,
        trains: Iterable[int] | None = None,
        measured: Iterable[int] | None = None,
        pack: wire.Pack = wire.to_record,
        post: Post | None = None,
    ) -> None:
        self.plan, self.config, self.blueprint = plan, plan.config, plan.blueprint
        self.algorithm = plan.blueprint.algorithm
        self.members = Members(plan)
        self.post = post or Post(plan.federation)
        self.stop = self.post.stop
        """Set to end the federation at the next check for answers."""
        self._lobby = Lobby(self.members, self.post)
        self._pack = pack
        self._outbox = Outbox(self.algorithm, self.blueprint.initial, plan.clients)
        self._trains = None if trains is None else set(trains)
        self._measured = None if measured is None else set(measured)
        self.run = ""
        """The federation's own name, the same over all restarts. Clients use it for the folder of what they keep for this federation."""
        self._accepted: dict[int, int] = {}
        """By client, the last round in which its update was good; what it kept in later rounds is not used."""
        self.sent: dict[int, Download] = {}
        """By client, what it was sent in this round."""
        self._notes: list[str] = []
        """Further notes about this round."""
        self._said_of: set[int] = set()
        self._epsilon: dict[int, float | None] = {}
        """By client, the cost of differential privacy that it has reported last."""
        self.resume(self.first())

    def first(self) -> Progress:
        """Before round 1."""
        return Progress(0, self.blueprint.first_state(), peers={"run": secrets.token_hex(8)})

    def summary(self) -> None:
        """Log what is about to be run."""
        federation, train = self.plan.federation, self.config.train
        log.info(
            "%s, %d rounds, at least %d nodes, %d parameters",
            self.config.algorithm_name,
            train.rounds,
            federation.nodes,
            self.blueprint.parameters,
        )

    # --- the federation

    def start(  # type: ignore[override]  # there is no common initial model, and the plan knows the rounds
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 0,
        timeout: float = 0,
        *,
        out: str | Path | None = None,
        **unused: Any,
    ) -> Result:
        """Run the federation and record it in its run folder; an interrupted one is resumed."""
        from cwfed.flower.server import run_federation

        if initial_arrays or num_rounds not in (0, self.config.train.rounds) or timeout or any(unused.values()):
            raise ConfigError(
                "the plan says how the federation runs, not the arguments of start: the rounds are train.rounds, "
                "the timeout is federation.timeout, and initial models come from run.seed"
            )
        return run_federation(self, grid, out)

    def resume(self, progress: Progress) -> None:
        """Continue from the progress of a run."""
        self.progress, peers = progress, progress.peers
        self.opened = OpenRound(self.blueprint, progress, [])
        self.members.from_tree(peers)
        self._accepted = accepted_in(progress)
        self.run = str(peers.get("run", self.plan.fingerprint))  # the name in earlier versions
        self._epsilon = {int(client): epsilon for client, epsilon in peers.get("epsilon", {}).items()}

    def rounds(self, grid: Grid, progress: Progress) -> Iterator[tuple[Progress, Event]]:
        """Carry out the rounds that are left; yields the progress and an event after each."""
        self.resume(progress)
        give_up_in_vain(progress, self.config.train.rounds)
        unanswered = 0
        while not is_over(self.config, self.progress):
            before, number = self.progress, self.progress.round + 1
            for sentence in self.gather(grid):
                yield before, Note(sentence)
            replies = self.post.exchange(grid, self.configure_train(number, *NOTHING, grid))
            first = next((reply for reply in replies if not replies_of.is_gone(reply)), None)
            if self.opened.asked and first is None:
                unanswered += 1  # not a round: all nodes went away, or are far too slow
                yield before, Note(self._unanswered(unanswered, f"round {number}"))
                continue
            unanswered = 0
            self.aggregate_train(number, chain(filter(None, [first]), replies))
            del first  # it contains a model
            for note in self._measure(grid, number):
                yield before, note
            for sentence in (*self._notes, *self._who_decides()):
                yield before, Note(sentence)
            self.progress = self._with_peers(self.opened.finish(self._sizes))
            yield self.progress, self.event()
            give_up_in_vain(self.progress, self.config.train.rounds)

    def _measure(self, grid: Grid, number: int) -> Iterator[Note]:
        """Let the clients measure their models. In the last round it is repeated until at least one does."""
        for tries in range(1, FUTILE + 1):
            if not self.opened.is_evaluated:
                return
            self.aggregate_evaluate(number, self.post.exchange(grid, self.configure_evaluate(number, *NOTHING, grid)))
            if self.opened.result("received", self._sizes) or number < self.config.train.rounds:
                return
            yield Note(self._unanswered(tries, "the last evaluation"))
            for sentence in self.gather(grid):
                yield Note(sentence)

    def _unanswered(self, tries: int, what: str) -> str:
        if tries >= FUTILE:
            raise RunError(f"no node answered {what} in {tries} tries of {self.plan.federation.timeout:g} seconds")
        return f"no node answered {what}: it is tried again"

    def gather(self, grid: Grid) -> list[str]:
        """Wait until there are enough nodes; returns what changed among them, in sentences."""
        return self._lobby.gather(grid)

    # --- a round, in the steps that Flower knows

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Choose who takes part, and send each its model."""
        here = self.members.here(grid.get_node_ids())
        able = here if self._trains is None else [c for c in here if c in self._trains]
        self.opened = opened = OpenRound(self.blueprint, self.progress, able)
        self._notes = []
        self._prepare(opened.invited)
        self.sent = {client: self.download(client) for client in opened.invited}
        opened.down = sum(download.nbytes for download in self.sent.values())
        messages = [
            self._send(
                client, server_round, self.sent[client], MessageType.TRAIN, {"measure": self._is_measured(client)}
            )
            for client in opened.asked
        ]
        opened.clock.lap("send")
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Read what arrived, and close the round."""
        opened, waiting, clients = self.opened, set(self.opened.asked), self.members.by_node
        uploads: list[Upload] = []
        stack = Stack(self.blueprint.guard.model, opened.asked)
        for reply in replies:
            client = clients.get(reply.metadata.src_node_id)
            if client is None or client not in waiting or replies_of.is_gone(reply):
                continue
            waiting.discard(client)
            try:
                upload = replies_of.read(reply, partial(self._read_upload, client))
            except wire.BadMessage as error:
                opened.refuse(client, str(error))
                continue
            stack.put(client, upload.model)
            uploads.append(replace(upload, model={}))
        uploads.sort(
            key=lambda upload: upload.update.client
        )  # answers arrive in any order, but sums need a fixed one
        updates = [upload.update for upload in uploads]
        opened.take(updates, stack.of([update.client for update in updates]))
        for upload in uploads:
            if (client := upload.update.client) not in opened.refused:
                self._renew(client, upload.hello)
                if self._private:
                    self._epsilon[client] = upload.epsilon
        opened.close(lambda c: self.sent[c].model)
        self._accepted |= dict.fromkeys(opened.closed.participants, server_round)
        self.progress = self._with_peers(opened.progress)
        return None, MetricRecord({"loss": mean(opened.losses) or 0.0, "participants": len(opened.updates)})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send every client its present model, to be measured at the client."""
        messages = []
        is_last = server_round == self.config.train.rounds
        may_stop = 0 < self.config.run.patience <= self.progress.waited + 1  # if this is not the best round
        measured = [client for client in self.members.here(grid.get_node_ids()) if self._is_measured(client)]
        self._prepare(measured)
        for client in measured:
            download = self.download(client)
            self.opened.down_to_measure += download.nbytes
            unknown = client in self._accepted and client not in self.progress.trained
            keep = self.plan.federation.keep
            told = {
                "kept": self.blueprint.has_own_models and unknown,
                "keep": keep == "every" or (keep == "last" and (is_last or may_stop)),
            }
            messages.append(self._send(client, server_round, download, MessageType.EVALUATE, told))
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Gather what the clients measured."""
        opened, clients = self.opened, self.members.by_node
        for reply in replies:
            client = clients.get(reply.metadata.src_node_id)
            if client is None or replies_of.is_gone(reply):
                continue
            try:
                hello, scores = replies_of.read(reply, partial(self._read_scores, client))
            except wire.BadMessage as error:
                opened.refuse(client, f"its measurements: {error}")
                continue
            self._renew(client, hello)
            for phase, score in scores.items():
                opened.measured(phase, {client: score})
        self.progress = self._with_peers(opened.progress)
        result = opened.result("received", self._sizes)
        return MetricRecord({"accuracy": result.accuracy}) if result else None

    def event(self) -> Round:
        """What happened; who is measured may change from round to round, so the results name their clients."""
        clients = sorted(self.opened.received)
        samples = [self.members.hellos[c].test for c in clients]

        def named(result: PhaseResult | None) -> PhaseResult | None:
            return result and replace(result, clients=clients, samples=samples)

        event = self.opened.event()
        return replace(
            event,
            received=named(event.received),
            trained=named(event.trained),
            spent=self._spent() if is_over(self.config, self.progress) else None,
        )

    # --- parts

    @property
    def _sizes(self) -> Sizes:
        return {client: (hello.test, hello.validation) for client, hello in self.members.hellos.items()}

    def _is_measured(self, client: int) -> bool:
        """Whether a client measures its models in this round."""
        return self.opened.is_evaluated and (self._measured is None or client in self._measured)

    def _read_upload(self, client: int, content: RecordDict) -> Upload:
        hello = self._hello(client, content)
        return replies_of.read_upload(hello, client, content, self.blueprint.guard, self.blueprint.metrics)

    def _read_scores(self, client: int, content: RecordDict) -> tuple[Hello, dict[Phase, Score]]:
        hello = self._hello(client, content)
        return hello, replies_of.read_scores(hello, content, self.blueprint.metrics)

    def _hello(self, client: int, content: RecordDict) -> Hello:
        """What a client said of itself; an answer has it anew where its data have changed."""
        before = self.members.hellos[client]
        if "hello" not in content.config_records:
            return before
        return self.members.renewed(client, replies_of.read_hello(before.node, content))

    def _renew(self, client: int, hello: Hello) -> None:
        """Data that have changed: what was measured on the former ones is no longer known."""
        before = self.members.hellos[client]
        if hello == before:
            return
        self.members.hellos[client] = hello
        self.opened.forget(client)
        sizes = ", ".join(f"{n:,} {what}" for what, n in hello.sizes.items())
        was = ", ".join(f"{n:,}" for n in before.sizes.values())
        self._notes.append(f"the data of {hello.name} (client {client}) have changed: {sizes} (before: {was})")

    def _who_decides(self) -> list[str]:
        """Who alone decides the reported accuracy: nobody can check how many test samples a client has."""
        tests = {client: self.members.hellos[client].test for client in self.opened.received}
        most = max(tests, key=lambda client: tests[client], default=None)
        if most is None or len(tests) < 3 or 2 * tests[most] <= sum(tests.values()) or most in self._said_of:
            return []
        self._said_of.add(most)
        share = tests[most] / sum(tests.values())
        return [
            f"{self.members.names[most]} (client {most}) says that it has {share:.1%} of all test samples: the accuracy is "
            "what it says; guard.most_samples bounds it, and the log has the median of the clients"
        ]

    def _prepare(self, clients: Sequence[int]) -> None:
        """Have what these clients are sent made together."""
        state = self.progress.server
        if missing := self._outbox.missing(state, clients):
            self._outbox.make(state, missing)

    def download(self, client: int) -> Download:
        """What a client is sent; who joins late gets a model from its label histogram, where it told it."""
        download = self._outbox.send(self.progress.server, client)
        hello = self.members.hellos.get(client)
        if (
            self.progress.round
            and client not in self._accepted
            and hello
            and hello.histogram
            and len(download.models) == 1
        ):
            made = self.algorithm.newcomer(self.progress.server, hello.histogram)
            if made.keys() >= download.model.keys():  # what does not travel, the client makes itself
                download = Download(({name: made[name] for name in download.model},), download.notes)
        names = self.blueprint.initial  # in its order: Flower's mods compare the names of what came and what goes
        ordered = ({name: model[name] for name in names if name in model} for model in download.models)
        return Download(tuple(ordered), download.notes)

    def _with_peers(self, progress: Progress) -> Progress:
        return replace(progress, peers=self._peers())

    def _peers(self) -> dict[str, Any]:
        accepted = {str(client): number for client, number in sorted(self._accepted.items())}
        peers = self.members.to_tree() | {"accepted": accepted, "run": self.run}
        epsilon = {str(client): epsilon for client, epsilon in sorted(self._epsilon.items())}
        return peers | ({"epsilon": epsilon} if self._private else {})

    @property
    def _private(self) -> bool:
        return self.config.privacy.dp != "off"

    def _spent(self) -> Spent | None:
        """What differential privacy has cost, as far as a server can know."""
        privacy = self.config.privacy
        epsilon = {str(client): epsilon for client, epsilon in sorted(self._epsilon.items())}
        return Spent(privacy.dp_delta, epsilon, privacy.dp_histogram, ACCOUNTS) if self._private else None

    def _send(self, client: int, number: int, download: Download, kind: str, told: dict[str, Any]) -> Message:
        hello = self.members.hellos[client]
        told = {"client": client, "round": number, "run": self.run, "accepted": self._accepted.get(client, 0), **told}
        told |= hello.sizes
        if kind == MessageType.TRAIN and self.plan.federation.clip:
            told["clipping_norm"] = self.plan.federation.clip  # for Flower's fixedclipping_mod at the client
        content = RecordDict({"told": ConfigRecord(told)})
        wire.download_to(content, download, self._pack)
        return message_to(hello.node, kind, str(number), content)


class Stack:
    """The uploaded models of a round, each put into its client's row when it comes."""

    def __init__(self, forms: Mapping[str, ExtraSpec], clients: Sequence[int]) -> None:
        self._rows = {client: row for row, client in enumerate(clients)}
        self._models = {n: torch.empty(len(clients), *form.shape, dtype=form.dtype) for n, form in forms.items()}

    def put(self, client: int, model: Params) -> None:
        """A client's model."""
        for name, stack in self._models.items():
            stack[self._rows[client]] = model[name]

    def of(self, clients: Sequence[int]) -> Params:
        """The models of these clients, in this order; of all of them as they came, this very stack."""
        rows = [self._rows[client] for client in clients]
        if rows == list(self._rows.values()):
            return self._models
        return {name: stack[rows] for name, stack in self._models.items()} if rows else {}


def accepted_in(progress: Progress) -> dict[int, int]:
    """By client, the last round in which its update was good; earlier versions remembered only whose ever was."""
    ever = dict.fromkeys(progress.peers.get("ever", []), progress.round)
    return ever | {int(client): number for client, number in progress.peers.get("accepted", {}).items()}
