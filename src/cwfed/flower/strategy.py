"""A Flower strategy that carries any algorithm of cwfed: a model (or several) of its own for every client.

The algorithm is the simulator's object, unchanged. The strategy says who is sent what, checks what comes back, and
lets the algorithm aggregate it: the numbered steps of `simulation._round`, with messages in between.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from cwfed.engine import Score
from cwfed.errors import ConfigError, RunError
from cwfed.events import Event, Note, PhaseResult, Round, Spent
from cwfed.flower import replies as replies_of
from cwfed.flower import wire
from cwfed.flower.members import Hello, Members
from cwfed.flower.plan import Plan, short_hash
from cwfed.flower.replies import Upload
from cwfed.rounds import (
    FUTILE,
    Clock,
    Progress,
    close,
    give_up_in_vain,
    invite,
    is_lost,
    is_over,
    mean,
    phase_result,
    wait,
)
from cwfed.types import Download, Uploads

log = logging.getLogger("cwfed.flower")

NOTHING = ArrayRecord(), ConfigRecord()
"""Flower's steps are handed a common model and settings, which there are none of."""
LEAST_PAUSE, MOST_PAUSE = 0.01, 0.5
"""Seconds between two looks for answers: soon again while they come in, seldom where nothing happens."""
RESTS = 3
"""A look asks once for every node that is waited for, so with many of them it takes long; the pause after it is at least so many
times as long, and the SuperLink has time for the nodes."""
ACCOUNTS = (
    "a federation: the noise is each node's own, and epsilon is what its own account said with its last update; rounds whose "
    "answer was lost cost too and are in that account only"
)
ASK_EVERY = 1.0
"""Seconds between two looks at who is connected."""
PATIENCE = 10.0
"""Seconds, at least, that the others have to say who they are when enough nodes have: the first ones are numbered by name."""


LEFT_OUT_FOR = 60.0
"""Seconds after which a node that was left out is asked again: it may have been put right."""


@dataclass(frozen=True)
class Question:
    """A node was asked who it is; nobody waits for it."""

    message: Message
    until: float
    """When it is asked again; an answer to this question is still listened to."""

    @property
    def node(self) -> int:
        """Who was asked."""
        return self.message.metadata.dst_node_id


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
    notes: list[str] = field(default_factory=list)
    """What is worth a sentence besides."""

    def told(self, metric: str) -> list[float]:
        """What the participants said; nothing where one of them did not: with differential privacy nobody tells its loss."""
        found = [upload.metrics[metric] for upload in self.uploads if metric in upload.metrics]
        return found if len(found) == len(self.uploads) else []


class PersonalisedStrategy(Strategy):
    """Any algorithm of cwfed on Flower: `strategy.start(grid)` runs the federation of a plan."""

    def __init__(
        self, plan: Plan, *, trains: Iterable[int] | None = None, measured: Iterable[int] | None = None
    ) -> None:
        self.plan, self.config, self.blueprint = plan, plan.config, plan.blueprint
        self.algorithm = plan.blueprint.algorithm
        self.guard = self.blueprint.guard
        self.members = Members(plan)
        self.turn = Turn(0)
        self._trains = None if trains is None else set(trains)
        self._measured = None if measured is None else set(measured)
        self.run = ""
        """The federation's own name, the same over all restarts: by it clients keep what they keep for it apart."""
        self._accepted: dict[int, int] = {}
        """By client, the last round in which its update was good: what it kept of later rounds counts for nothing."""
        self._absent: set[int] = set()
        self._questions: dict[str, Question] = {}
        self._heard: list[Hello] = []
        self._again: dict[int, float] = {}
        """By node that was left out or silent, when it is asked again."""
        self._said_of: set[int] = set()
        self._epsilon: dict[int, float | None] = {}
        """By client, what it last said that differential privacy has cost it."""
        self.stop = threading.Event()
        """Set by who wants the federation to end: at the next look for answers."""
        self.resume(self.first())

    def first(self) -> Progress:
        """Before round 1."""
        return Progress(0, self.blueprint.first_state(), peers={"run": secrets.token_hex(8)})

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
        self.progress, peers = progress, progress.peers
        self.members.from_tree(peers)
        self._accepted = accepted_in(progress)
        self.run = str(peers.get("run", self.plan.fingerprint))  # by which earlier versions named it
        self._epsilon = {int(client): epsilon for client, epsilon in peers.get("epsilon", {}).items()}

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
            for sentence in (*self.turn.notes, *self._who_decides()):
                yield before, Note(sentence)
            event = self.event()
            result, lower = getattr(event, self.algorithm.phase), self.blueprint.lower_is_better
            self.progress, stopped = wait(self.progress, self.config, result, lower)
            is_last = is_over(self.config, self.progress)
            yield self.progress, replace(event, stopped=stopped, spent=self._spent() if is_last else None)
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
        waiting = self._push(grid, messages)
        until = time.monotonic() + self.plan.federation.timeout
        replies: list[Message] = []
        pause = LEAST_PAUSE
        while waiting and time.monotonic() < until:
            began = time.monotonic()
            found = replies_of.pull(grid, waiting)
            replies += found.values()
            waiting = {number: message for number, message in waiting.items() if number not in found}
            pause = LEAST_PAUSE if found else min(2 * pause, MOST_PAUSE)
            self._sleep(max(pause, RESTS * (time.monotonic() - began)) if waiting else 0)
        return replies

    def _push(self, grid: Grid, messages: list[Message]) -> dict[str, Message]:
        """Send messages; those that went off, by their number."""
        numbers = set(grid.push_messages(messages))
        return {
            message.metadata.message_id: message for message in messages if message.metadata.message_id in numbers
        }

    def _sleep(self, seconds: float) -> None:
        if self.stop.is_set():
            raise KeyboardInterrupt
        time.sleep(seconds)

    # --- who is here

    def gather(self, grid: Grid) -> list[str]:
        """Wait until there are enough nodes, and ask new ones who they are; what changed, in sentences.

        Once there are enough, nobody is waited for: who has not said who it is yet may do so while the others work.
        """
        federation = self.plan.federation
        began = time.monotonic()
        enough_after = 0.0
        said: list[str] = []
        while True:
            connected = list(grid.get_node_ids())
            self._ask(grid, connected)
            said += self._listen(grid)
            passed = time.monotonic() - began
            is_late = passed > (max(federation.wait, federation.timeout) if self._asked else federation.wait)
            if not enough_after and self._is_enough():
                enough_after = passed
            if self.members.hellos or is_late or self._have_all_spoken(passed, enough_after):
                said += self._welcome(grid, connected)
            here = self.members.here(connected)
            if len(here) >= federation.nodes:
                break
            if is_late:
                left_out = "".join(f"; {reason}" for reason in said if "left out" in reason)
                raise RunError(
                    f"only {len(here)} of the {federation.nodes} nodes that the federation needs (federation.nodes) are "
                    f"connected after {federation.wait:g} seconds (federation.wait){left_out}"
                )
            self._sleep(MOST_PAUSE if self._asked else ASK_EVERY)
        absent = self.members.hellos.keys() - set(here)
        said += [f"{self.members.names[c]} (client {c}) is not connected" for c in sorted(absent - self._absent)]
        said += [f"{self.members.names[c]} (client {c}) is connected again" for c in sorted(self._absent & set(here))]
        self._absent = set(absent)
        return said

    @property
    def _asked(self) -> set[int]:
        """Nodes that may still answer in time."""
        now = time.monotonic()
        return {question.node for question in self._questions.values() if now < question.until}

    def _is_enough(self) -> bool:
        return len({h.name for h in self._heard if not h.misfit(self.plan)}) >= self.plan.federation.nodes

    def _have_all_spoken(self, passed: float, enough_after: float) -> bool:
        """Whether the first nodes can be numbered; once there are enough, the others get as long again as those took."""
        patience = enough_after + max(PATIENCE, enough_after)
        return self._is_enough() and (not self._asked or passed > patience)

    def _ask(self, grid: Grid, connected: Iterable[int]) -> None:
        """Ask those who they are who have not said it."""
        now = time.monotonic()
        known = self.members.nodes | self._asked | {hello.node for hello in self._heard}
        known |= {node for node, then in self._again.items() if now < then}
        messages = [
            self._message(RecordDict(), node, MessageType.QUERY, "hello") for node in connected if node not in known
        ]
        until = now + self.plan.federation.timeout
        self._questions |= {
            number: Question(message, until) for number, message in self._push(grid, messages).items()
        }

    def _listen(self, grid: Grid) -> list[str]:
        """Read what nodes have said of themselves by now."""
        said, silent = [], f"it did not say who it is within {self.plan.federation.timeout:g} seconds"
        found = replies_of.pull(grid, {number: question.message for number, question in self._questions.items()})
        asked = {number: question.node for number, question in self._questions.items()}
        for number, reply in found.items():
            node = asked[number]
            if number not in self._questions:
                continue  # it was asked twice, and has answered twice
            self._questions = {other: q for other, q in self._questions.items() if q.node != node}
            if node in self.members.nodes or replies_of.is_gone(reply):
                continue
            try:
                self._heard.append(replies_of.read(reply, partial(replies_of.read_hello, node)))
            except wire.BadMessage as error:
                said += self._leave_out(node, str(error), self._pause)
        late = {question.node for question in self._questions.values() if question.until <= time.monotonic()}
        return said + [sentence for node in sorted(late) for sentence in self._leave_out(node, silent, 0.0)]

    @property
    def _pause(self) -> float:
        return min(LEFT_OUT_FOR, self.plan.federation.timeout)

    def _leave_out(self, node: int, reason: str, pause: float) -> list[str]:
        """A node is asked again later, beside the work; its reason is said once."""
        is_new = self.members.refused.get(node) != reason
        self.members.refused[node] = reason
        self._again[node] = time.monotonic() + pause
        return [f"a node was left out: {reason}"] if is_new else []

    def _welcome(self, grid: Grid, connected: list[int]) -> list[str]:
        """Let those in who said who they are, and tell those who are left out why."""
        if not self._heard:
            return []
        hellos, self._heard = self._heard, []
        before = dict(self.members.refused)
        said = self._about_keys(grid) + self.members.welcome(hellos, connected)
        refused = {h.node: h.name for h in hellos if h.node in self.members.refused}
        self._again |= dict.fromkeys(refused, time.monotonic() + self._pause)
        old = {node for node in refused if before.get(node) == self.members.refused[node]}
        grid.push_messages(  # nobody waits for the answer
            [
                self._message(
                    RecordDict({"told": ConfigRecord({"refused": self.members.refused[node]})}),
                    node,
                    MessageType.QUERY,
                    "refused",
                )
                for node in refused
                if node not in old
            ]
        )
        repeated = {f"{refused[node]} was left out: {before[node]}" for node in old}
        return [sentence for sentence in said if sentence not in repeated]

    def _about_keys(self, grid: Grid) -> list[str]:
        """Names can only belong to keys where there are some."""
        is_first = not self.members.hellos
        keys = {node.node_id: node.public_key for node in grid.get_nodes()}
        is_key = b"BEGIN PUBLIC KEY"  # what a virtual node has instead is random
        self.members.public_keys |= {node: short_hash(key.hex()) for node, key in keys.items() if is_key in key}
        if not self.plan.federation.pin or self.members.public_keys or not is_first:
            return []
        return [
            "the nodes have no keys: a client's name belongs to whatever node uses it (federation.pin has no effect)"
        ]

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
        turn = self.turn
        waiting = set(turn.invited) - set(turn.lost)
        for reply in replies:
            client = self.members.client_of(reply.metadata.src_node_id)
            if client not in waiting or replies_of.is_gone(reply):
                continue
            waiting.discard(client)
            try:
                hello, (upload, score) = replies_of.read(reply, partial(self._read_upload, client))
            except wire.BadMessage as error:
                turn.refused[str(client)] = str(error)
                continue
            self._renew(client, hello)
            turn.uploads.append(upload)
            turn.up += upload.nbytes
            if self._private:
                self._epsilon[client] = upload.metrics.get("epsilon")
            if score:
                turn.trained[client] = score
        turn.lost = sorted({*turn.lost, *waiting})
        turn.uploads.sort(key=lambda upload: upload.client)  # answers come in any order, sums must not
        turn.clock.lap("train")
        stacked = stack_of(turn.uploads) if turn.uploads else None
        closed = close(self.algorithm, self.progress.server, stacked, lambda c: turn.sent[c].model, self.config.guard)
        turn.refused |= {str(client): why for client, why in closed.refused.items()}
        turn.aggregated, turn.skipped, turn.scaled_back = closed.uploads, closed.skipped, closed.scaled_back
        turn.uploads = [upload for upload in turn.uploads if upload.client in closed.participants]
        turn.trained = {client: score for client, score in turn.trained.items() if client in closed.participants}
        self._accepted |= dict.fromkeys(closed.participants, server_round)
        kept = dict(self.progress.trained) if self.blueprint.has_own_models else {}
        for upload in turn.uploads:
            kept.pop(upload.client, None)
        in_vain = tuple[str, ...]()
        if turn.refused and len(turn.refused) == len(turn.invited) - len(turn.lost):
            in_vain = (*self.progress.in_vain, next(iter(turn.refused.values())))
        before = self.progress
        self.progress = Progress(
            server_round,
            closed.server,
            {},
            kept | turn.trained,
            self._peers(),
            in_vain,
            before.waited,
            before.best,
        )
        turn.clock.lap("aggregate")
        return None, MetricRecord({"loss": mean(turn.told("loss")) or 0.0, "participants": len(turn.uploads)})

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
        turn = self.turn
        for reply in replies:
            client = self.members.client_of(reply.metadata.src_node_id)
            if client is None or replies_of.is_gone(reply):
                continue
            try:
                hello, scores = replies_of.read(reply, partial(self._read_scores, client))
            except wire.BadMessage as error:
                turn.refused.setdefault(str(client), f"its measurements: {error}")
                continue
            self._renew(client, hello)
            turn.received[client] = scores["received"]
            if "trained" in scores:
                turn.trained[client] = scores["trained"]
        if self.blueprint.has_own_models:
            self.progress = replace(self.progress, trained=self.progress.trained | turn.trained)
        turn.clock.lap("evaluate")
        result = self._result(turn.received)
        return MetricRecord({"accuracy": result.accuracy}) if result else None

    def event(self) -> Round:
        """6. Say what happened."""
        turn = self.turn
        sat_out = self.progress.trained if self.blueprint.has_own_models else {}
        own = {c: s for c, s in (sat_out | turn.trained).items() if c in turn.received and self._is_possible(c, s)}
        return Round(
            round=turn.number,
            participants=[upload.client for upload in turn.uploads],
            dropped=turn.lost,
            loss=mean(turn.told("loss")),
            penalty=mean(turn.told("penalty")),
            client_loss=turn.told("loss"),
            correlation=None,
            distance=None,
            received=self._result(turn.received),
            trained=self._result(turn.received | own),
            down=turn.down,
            up=turn.up,
            refused=turn.refused,
            skipped=turn.skipped,
            scaled_back=turn.scaled_back,
            down_to_measure=turn.down_to_measure,
            seconds=turn.clock.laps("report"),
        )

    # --- parts

    def _read_upload(self, client: int, content: RecordDict) -> tuple[Hello, tuple[Upload, Score | None]]:
        hello = self._hello(client, content)
        return hello, replies_of.read_upload(hello, client, content, self.guard, self.blueprint.metrics)

    def _read_scores(self, client: int, content: RecordDict) -> tuple[Hello, dict[str, Score]]:
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
        self.turn.trained.pop(client, None)
        kept = {c: score for c, score in self.progress.trained.items() if c != client}
        self.progress = replace(self.progress, trained=kept)
        sizes = ", ".join(f"{n:,} {what}" for what, n in hello.sizes.items())
        was = ", ".join(f"{n:,}" for n in before.sizes.values())
        self.turn.notes.append(f"the data of {hello.name} (client {client}) have changed: {sizes} (before: {was})")

    def _is_possible(self, client: int, score: Score) -> bool:
        """Whether a score of an earlier round can be one of the data that the client has now."""
        hello = self.members.hellos[client]
        return score.test_right <= hello.test and score.validation_right <= hello.validation

    def _who_decides(self) -> list[str]:
        """Who alone decides the reported accuracy: nobody can check how many test samples a client has."""
        tests = {client: self.members.hellos[client].test for client in self.turn.received}
        most = max(tests, key=lambda client: tests[client], default=None)
        if most is None or len(tests) < 3 or 2 * tests[most] <= sum(tests.values()) or most in self._said_of:
            return []
        self._said_of.add(most)
        share = tests[most] / sum(tests.values())
        return [
            f"{self.members.names[most]} (client {most}) says that it has {share:.1%} of all test samples: the accuracy is "
            "what it says; guard.most_samples bounds it, and the log has the median of the clients"
        ]

    def download(self, client: int) -> Download:
        """What a client is sent; who joins late gets a model from its label histogram, where it told it."""
        download = self.algorithm.send(self.progress.server, client)
        hello = self.members.hellos.get(client)
        if (
            self.progress.round
            and client not in self._accepted
            and hello
            and hello.histogram
            and len(download.models) == 1
        ):
            download = Download((self.algorithm.newcomer(self.progress.server, hello.histogram),), download.notes)
        names = self.blueprint.initial  # in its order: Flower's mods compare the names of what came and what goes
        ordered = ({name: model[name] for name in names if name in model} for model in download.models)
        return Download(tuple(ordered), download.notes)

    def _measures(self, number: int) -> bool:
        return number % self.config.run.evaluate_every == 0 or number == self.config.train.rounds

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
        wire.download_to(content, download)
        return self._message(content, hello.node, kind, str(number))

    def _message(self, content: RecordDict, node: int, kind: str, group: str) -> Message:
        return Message(content, dst_node_id=node, message_type=kind, group_id=group)

    def _result(self, scores: dict[int, Score]) -> PhaseResult | None:
        clients = sorted(scores)
        hellos = [self.members.hellos[c] for c in clients]
        if not any(h.test for h in hellos):
            return None
        tests, validations = [h.test for h in hellos], [h.validation for h in hellos]
        found = phase_result([scores[c] for c in clients], tests, validations, self.blueprint.metrics)
        return replace(found, clients=clients, samples=tests)


def accepted_in(progress: Progress) -> dict[int, int]:
    """By client, the last round in which its update was good; earlier versions remembered only whose ever was."""
    ever = dict.fromkeys(progress.peers.get("ever", []), progress.round)
    return ever | {int(client): number for client, number in progress.peers.get("accepted", {}).items()}


def stack_of(uploads: Sequence[Upload]) -> Uploads:
    """What arrived, in one stack."""
    first = uploads[0]
    return Uploads(
        clients=tuple(upload.client for upload in uploads),
        models={name: torch.stack([u.model[name] for u in uploads]) for name in first.model},
        counts=torch.tensor([u.metrics["samples"] for u in uploads]),
        extras={name: torch.stack([u.beside[name] for u in uploads]) for name in first.beside},
    )
