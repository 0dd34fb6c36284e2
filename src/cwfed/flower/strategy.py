"""A Flower strategy that carries any algorithm of cwfed: a model (or several) of its own for every client.

The algorithm is the simulator's object, unchanged. The strategy says who is sent what, checks what comes back, and
lets the algorithm aggregate it: the numbered steps of `simulation._round`, with messages in between.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from cwfed.engine import Score
from cwfed.errors import ConfigError, RunError
from cwfed.events import Event, Note, PhaseResult, Round
from cwfed.flower import replies as replies_of
from cwfed.flower import wire
from cwfed.flower.members import Hello, Members
from cwfed.flower.plan import Plan
from cwfed.flower.replies import Upload
from cwfed.guard import bounded
from cwfed.rounds import FUTILE, Clock, Progress, give_up_in_vain, invite, is_lost, is_over, mean, phase_result, wait
from cwfed.types import Download, Uploads

log = logging.getLogger("cwfed.flower")

NOTHING = ArrayRecord(), ConfigRecord()
"""Flower's steps are handed a common model and settings, which there are none of."""
LEAST_PAUSE, MOST_PAUSE = 0.01, 0.5
"""Seconds between two looks for answers: soon again while they come in, seldom where nothing happens."""
ASK_EVERY = 1.0
"""Seconds between two looks at who is connected."""


@dataclass
class Turn:
    """A round that is under way."""

    number: int
    clock: Clock = field(default_factory=Clock)
    invited: list[int] = field(default_factory=list)
    sent: dict[int, Download] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    """Of the invited: who never answered."""
    refused: dict[str, str] = field(default_factory=dict)
    uploads: list[Upload] = field(default_factory=list)
    aggregated: Uploads | None = None
    skipped: str = ""
    scaled_back: list[int] = field(default_factory=list)
    down: int = 0
    up: int = 0
    down_to_measure: int = 0
    trained: dict[int, Score] = field(default_factory=dict)
    received: dict[int, Score] = field(default_factory=dict)


class PersonalisedStrategy(Strategy):
    """Any algorithm of cwfed on Flower: `strategy.start(grid)` runs the federation of a plan."""

    def __init__(
        self, plan: Plan, *, trains: Iterable[int] | None = None, measured: Iterable[int] | None = None
    ) -> None:
        self.plan, self.config, self.blueprint = plan, plan.config, plan.blueprint
        self.algorithm = plan.blueprint.algorithm
        self.guard = self.blueprint.guard
        self.members = Members(plan)
        self.progress = self.first()
        self.turn = Turn(0)
        self._trains = None if trains is None else set(trains)
        self._measured = None if measured is None else set(measured)
        self._ever: set[int] = set()
        """Clients that ever sent a model."""
        self._absent: set[int] = set()
        self.stop = threading.Event()
        """Set by who wants the federation to end: at the next look for answers."""

    def first(self) -> Progress:
        """Before round 1."""
        return Progress(0, self.blueprint.first_state())

    def summary(self) -> None:
        """Say what is about to happen."""
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
        """Run the federation: recorded in its run folder, and from where it was if it was broken off."""
        from cwfed.flower.server import run_federation

        if initial_arrays or num_rounds not in (0, self.config.train.rounds) or timeout or any(unused.values()):
            raise ConfigError(
                "the plan says how the federation runs, not the arguments of start: the rounds are train.rounds, "
                "the timeout is federation.timeout, and initial models come from run.seed"
            )
        return run_federation(self, grid, out)

    def resume(self, progress: Progress) -> None:
        """Take up where a run was."""
        self.progress = progress
        peers = progress.peers
        self.members.names, self.members.keys = list(peers.get("names", [])), list(peers.get("keys", []))
        self._ever = set(peers.get("ever", []))

    def rounds(self, grid: Grid, progress: Progress) -> Iterator[tuple[Progress, Event]]:
        """Carry out the rounds that are left; after each, where the federation is and what happened."""
        self.resume(progress)
        give_up_in_vain(progress, self.config.train.rounds)
        unanswered = 0
        while not is_over(self.config, self.progress):
            before, number = self.progress, self.progress.round + 1
            for sentence in self.gather(grid):
                yield before, Note(sentence)
            sent = list(self.configure_train(number, *NOTHING, grid))
            replies = self.exchange(grid, sent)
            if sent and all(map(replies_of.is_gone, replies)):  # no round: everybody went away, or is far too slow
                unanswered += 1
                yield before, Note(self._unanswered(unanswered, f"round {number}"))
                continue
            unanswered = 0
            self.aggregate_train(number, replies)
            for note in self._measure(grid, number):
                yield before, note
            event = self.event()
            result, lower = getattr(event, self.algorithm.phase), self.blueprint.lower_is_better
            self.progress, stopped = wait(self.progress, self.config, result, lower)
            yield self.progress, replace(event, stopped=stopped)
            give_up_in_vain(self.progress, self.config.train.rounds)

    def _measure(self, grid: Grid, number: int) -> Iterator[Note]:
        """Have the clients measure their models. The last round's numbers are what the run is for: there somebody must."""
        for tries in range(1, FUTILE + 1):
            if not self._measures(number):
                return
            self.aggregate_evaluate(
                number, self.exchange(grid, list(self.configure_evaluate(number, *NOTHING, grid)))
            )
            if self._result(self.turn.received) or number < self.config.train.rounds:
                return
            yield Note(self._unanswered(tries, "the last evaluation"))
            for sentence in self.gather(grid):
                yield Note(sentence)

    def _unanswered(self, tries: int, what: str) -> str:
        if tries >= FUTILE:
            raise RunError(f"nobody answered {what} in {tries} tries of {self.plan.federation.timeout:g} seconds")
        return f"nobody answered {what}: it is tried again"

    def exchange(self, grid: Grid, messages: list[Message]) -> list[Message]:
        """Send messages and gather the answers that come in time; `stop` breaks it off."""
        waiting = set(grid.push_messages(messages))
        until = time.monotonic() + self.plan.federation.timeout
        replies: list[Message] = []
        pause = LEAST_PAUSE
        while waiting and time.monotonic() < until:
            if self.stop.is_set():
                raise KeyboardInterrupt
            found = list(grid.pull_messages(waiting))
            replies += found
            waiting -= {reply.metadata.reply_to_message_id for reply in found}
            pause = LEAST_PAUSE if found else min(2 * pause, MOST_PAUSE)
            time.sleep(pause if waiting else 0)
        return replies

    def gather(self, grid: Grid) -> list[str]:
        """Wait until there are enough nodes, and ask new ones who they are; what changed, in sentences."""
        federation = self.plan.federation
        until = time.monotonic() + federation.wait
        said: list[str] = []
        while True:
            connected = list(grid.get_node_ids())
            if new := [node for node in connected if node not in self.members.asked]:
                said += self._ask(grid, new)
            here = self.members.here(connected)
            if len(here) >= federation.nodes:
                break
            if time.monotonic() > until:
                left_out = "".join(f"; {reason}" for reason in said if "left out" in reason)
                raise RunError(
                    f"only {len(here)} of the {federation.nodes} nodes that the federation needs (federation.nodes) are "
                    f"connected after {federation.wait:g} seconds (federation.wait){left_out}"
                )
            time.sleep(ASK_EVERY)
        absent = self.members.hellos.keys() - set(here)
        said += [f"{self.members.names[c]} (client {c}) is not connected" for c in sorted(absent - self._absent)]
        said += [f"{self.members.names[c]} (client {c}) is connected again" for c in sorted(self._absent & set(here))]
        self._absent = set(absent)
        return said

    def _ask(self, grid: Grid, nodes: Iterable[int]) -> list[str]:
        messages = [self._message(RecordDict(), node, MessageType.QUERY, "hello") for node in nodes]
        hellos, said = [], []
        for reply in self.exchange(grid, messages):
            node = reply.metadata.src_node_id
            try:
                told = dict(wire.texts(replies_of.content_of(reply), "hello"))
                sizes = wire.metrics(reply.content, ("samples", "test", "validation"))
                hellos.append(Hello.read(node, told, sizes))
            except wire.BadMessage as error:
                self.members.refused[node] = str(error)
                said.append(f"a node was left out: {error}")
        said = self.members.welcome(hellos, grid.get_node_ids()) + said
        tell = [h for h in hellos if h.node in self.members.refused]
        told_so = [
            self._message(
                RecordDict({"told": ConfigRecord({"refused": self.members.refused[h.node]})}),
                h.node,
                MessageType.QUERY,
                "refused",
            )
            for h in tell
        ]
        if told_so:
            grid.push_messages(told_so)  # nobody waits for the answer
        return said

    # --- a round, in the steps that Flower knows

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """1. Choose who takes part, and send each its model."""
        self.turn = turn = Turn(server_round)
        here = self.members.here(grid.get_node_ids())
        able = here if self._trains is None else [c for c in here if c in self._trains]
        turn.invited = invite(self.config, able, server_round)
        turn.lost = [c for c in turn.invited if is_lost(self.config, server_round, c)]
        measure = self._measures(server_round)
        messages = []
        for client in turn.invited:
            download = self.download(client)
            turn.down += download.nbytes
            turn.sent[client] = download
            if client not in turn.lost:
                told = {"measure": measure and (self._measured is None or client in self._measured)}
                messages.append(self._send(client, server_round, download, MessageType.TRAIN, told))
        turn.clock.lap("send")
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """2. to 4. Check what arrived, and let the algorithm aggregate it; too few good updates change nothing."""
        turn, own = self.turn, self.blueprint.metrics
        waiting = set(turn.invited) - set(turn.lost)
        for reply in replies:
            client = self.members.client_of(reply.metadata.src_node_id)
            if client not in waiting or replies_of.is_gone(reply):
                continue
            waiting.discard(client)
            try:
                upload, score = replies_of.read_upload(self.members.hellos[client], client, reply, self.guard, own)
                turn.uploads.append(upload)
                turn.up += upload.nbytes
                if score:
                    turn.trained[client] = score
            except wire.BadMessage as error:
                turn.refused[str(client)] = str(error)
        turn.lost = sorted({*turn.lost, *waiting})
        turn.uploads.sort(key=lambda upload: upload.client)  # answers come in any order, sums must not
        turn.clock.lap("train")
        server, least = self.progress.server, self.config.guard.least
        if len(turn.uploads) < least:
            turn.skipped = f"{len(turn.uploads)} good updates, and guard.least = {least}"
            turn.uploads = []
        if turn.uploads:
            turn.aggregated = self._stack(turn)
            server = self.algorithm.aggregate(server, turn.aggregated)
            self._ever |= {upload.client for upload in turn.uploads}
        kept = {} if not self.algorithm.keeps_model else dict(self.progress.trained)
        for upload in turn.uploads:
            kept.pop(upload.client, None)
        in_vain = tuple[str, ...]()
        if turn.refused and len(turn.refused) == len(turn.invited) - len(turn.lost):
            in_vain = (*self.progress.in_vain, next(iter(turn.refused.values())))
        waited, best = self.progress.waited, self.progress.best
        self.progress = Progress(server_round, server, {}, kept | turn.trained, self._peers(), in_vain, waited, best)
        turn.clock.lap("aggregate")
        losses = [upload.metrics["loss"] for upload in turn.uploads]
        return None, MetricRecord({"loss": mean(losses) or 0.0, "participants": len(losses)})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """5. Send every client the model it has now, to be measured where the data are."""
        if not self._measures(server_round):
            return []
        turn, messages = self.turn, []
        is_last = server_round == self.config.train.rounds
        may_stop = 0 < self.config.run.patience <= self.progress.waited + 1  # where this is not the best round
        for client in self.members.here(grid.get_node_ids()):
            if self._measured is not None and client not in self._measured:
                continue
            download = self.download(client)
            turn.down_to_measure += download.nbytes
            unknown = client in self._ever and client not in self.progress.trained
            keep = self.plan.federation.keep
            told = {
                "kept": self.algorithm.keeps_model and unknown,
                "keep": keep == "every" or (keep == "last" and (is_last or may_stop)),
            }
            messages.append(self._send(client, server_round, download, MessageType.EVALUATE, told))
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Gather what the clients measured."""
        turn, own = self.turn, self.blueprint.metrics
        for reply in replies:
            client = self.members.client_of(reply.metadata.src_node_id)
            if client is None or replies_of.is_gone(reply):
                continue
            try:
                hello = self.members.hellos[client]
                turn.received[client] = replies_of.read_score(hello, "received", replies_of.content_of(reply), own)
                if "trained-right" in reply.content.metric_records["metrics"]:
                    turn.trained[client] = replies_of.read_score(hello, "trained", reply.content, own)
            except wire.BadMessage as error:
                turn.refused.setdefault(str(client), f"its measurements: {error}")
        if self.algorithm.keeps_model:
            self.progress = replace(self.progress, trained=self.progress.trained | turn.trained)
        turn.clock.lap("evaluate")
        result = self._result(turn.received)
        return MetricRecord({"accuracy": result.accuracy}) if result else None

    def event(self) -> Round:
        """6. Say what happened."""
        turn = self.turn
        sat_out = self.progress.trained if self.algorithm.keeps_model else {}
        both = turn.received | {c: s for c, s in (sat_out | turn.trained).items() if c in turn.received}
        return Round(
            round=turn.number,
            participants=[upload.client for upload in turn.uploads],
            dropped=turn.lost,
            loss=mean([upload.metrics["loss"] for upload in turn.uploads]),
            penalty=mean([upload.metrics["penalty"] for upload in turn.uploads]),
            client_loss=[upload.metrics["loss"] for upload in turn.uploads],
            correlation=None,
            distance=None,
            received=self._result(turn.received),
            trained=self._result(both),
            down=turn.down,
            up=turn.up,
            refused=turn.refused,
            skipped=turn.skipped,
            scaled_back=turn.scaled_back,
            down_to_measure=turn.down_to_measure,
            seconds=turn.clock.laps("report"),
        )

    # --- parts

    def download(self, client: int) -> Download:
        """What a client is sent; who joins late gets a model from its label histogram, where it told it."""
        download = self.algorithm.send(self.progress.server, client)
        hello = self.members.hellos.get(client)
        if (
            self.progress.round
            and client not in self._ever
            and hello
            and hello.histogram
            and len(download.models) == 1
        ):
            download = Download((self.algorithm.newcomer(self.progress.server, hello.histogram),), download.notes)
        names = self.blueprint.initial  # in its order: Flower's mods compare the names of what came and what goes
        return Download(tuple({name: model[name] for name in names} for model in download.models), download.notes)

    def _measures(self, number: int) -> bool:
        return number % self.config.run.evaluate_every == 0 or number == self.config.train.rounds

    def _peers(self) -> dict[str, Any]:
        return {"names": self.members.names, "keys": self.members.keys, "ever": sorted(self._ever)}

    def _send(self, client: int, number: int, download: Download, kind: str, told: dict[str, Any]) -> Message:
        told = {"client": client, "round": number, **told}
        if kind == MessageType.TRAIN and self.plan.federation.clip:
            told["clipping_norm"] = self.plan.federation.clip  # for Flower's fixedclipping_mod at the client
        content = RecordDict({"told": ConfigRecord(told)})
        wire.download_to(content, download)
        return self._message(content, self.members.hellos[client].node, kind, str(number))

    def _message(self, content: RecordDict, node: int, kind: str, group: str) -> Message:
        return Message(content, dst_node_id=node, message_type=kind, group_id=group)

    def _stack(self, turn: Turn) -> Uploads:
        """What is aggregated: all in one stack, updates that are too long scaled back."""
        uploads, clients = turn.uploads, tuple(upload.client for upload in turn.uploads)
        first = uploads[0]
        models = {name: torch.stack([u.model[name] for u in uploads]) for name in first.model}
        if bound := self.config.guard.norm_bound:
            models, longer = bounded(models, lambda row: turn.sent[clients[row]].model, bound)
            turn.scaled_back = [clients[row] for row in longer]
        return Uploads(
            clients=clients,
            models=models,
            counts=torch.tensor([u.metrics["samples"] for u in uploads]),
            extras={name: torch.stack([u.beside[name] for u in uploads]) for name in first.beside},
        )

    def _result(self, scores: dict[int, Score]) -> PhaseResult | None:
        clients = sorted(c for c in scores if self.members.hellos[c].test)
        if not clients:
            return None
        hellos = [self.members.hellos[c] for c in clients]
        tests, validations = [h.test for h in hellos], [h.validation for h in hellos]
        found = phase_result([scores[c] for c in clients], tests, validations, self.blueprint.metrics)
        return replace(found, clients=clients, samples=tests)
