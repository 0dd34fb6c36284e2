"""All clients in one batched step: for models so small that a step is mostly Python, and for GPUs.

Clients are sorted by how many batches they have, so at every step those still training are the first so many, and
nothing is padded. Clients smaller than a batch train in groups of their own size. A run of very many steps has its
step compiled, for all clients and for a quarter of them; then clients that are done may stay in the batch, with a
learning rate of zero, because every other number of clients would be another compilation.

Embeddings are not part of the batched step: it is given the rows that the batch looks up, and their gradient is added
to the table. A table of 100,000 words is touched only where there is a word.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from cwfed.core import augment
from cwfed.core.errors import ConfigError, RunError
from cwfed.core.metrics import LOSS, OwnSums
from cwfed.core.mixing import rows as rows_of
from cwfed.core.mixing import unstacked
from cwfed.core.optimizers import clipped, first_state
from cwfed.core.rng import stream
from cwfed.core.types import Batch, Download, Output, Params, Pass, Start, nbytes
from cwfed.data.partition import Indices
from cwfed.engine import draws
from cwfed.engine.base import Call, Candidate, Job, Score, Trained, Visit, Visited, overrides, scores_of
from cwfed.engine.embeddings import Table, along, look_up, lookups
from cwfed.engine.group import Group, stacked
from cwfed.engine.loop import Loop
from cwfed.engine.questions import Questions, add_own, questions
from cwfed.engine.traced import Traced
from cwfed.engine.worker import OPTIMIZER, Stopped, batches, purpose

TOGETHER = 256
"""At most so many clients in one step."""
MEMORY = 2**31
"""At most so many bytes of models in one step."""
COMPILE_FOR = 20_000
"""Steps of a run that pay for compiling one: some ten seconds, or two where it was compiled before."""


class CannotVmap(ConfigError):
    """The model or the penalty does something that torch cannot batch."""


class Vmap:
    """Every client's step in one operation with a leading axis of clients."""

    name = "vmap"
    workers = 1

    def __init__(
        self, job: Job, *, compile: str = "never", rounds: int = 1, steady: bool = True, lenient: bool = False
    ) -> None:
        """`steady`: the same clients take part in every round. `lenient`: what cannot be vmapped is done as by the loop."""
        self.job, self.algorithm, self.federation, self.how = job, job.algorithm, job.federation, job.how
        self.why, self.lenient = "", lenient
        self._loop = Loop(job)
        """Does what is not batched."""
        self._tasks, self._worker = self._loop.tasks, self._loop.tasks.worker
        self._proved: bool | None = None
        has_compiler = any(map(shutil.which, ("g++", "clang++", "c++")))
        if compile == "always" and not has_compiler:
            raise ConfigError(
                'run.compile = "always" needs a C++ compiler, and there is none on this machine: install one, or set it to '
                '"never", with which the last bits are others'
            )
        longest = max(len(shard.train) for shard in self.federation.shards.values())
        steps = rounds * self.how.epochs * max(1, longest // self.how.batch_size)
        if compile == "always" and self._worker.buffers:
            raise ConfigError('run.compile = "always" cannot be used with a model that has running statistics')
        # Other clients are other shapes, and each would be another compilation.
        pays = steady and steps >= COMPILE_FOR and not self._worker.buffers
        # A compiled step has clients in it that are done, with a learning rate of zero: other optimisers would move them.
        is_plain = self.how.is_plain and self.how.augment == "none" and not overrides(self.algorithm, "passes")
        if compile == "always" and not is_plain:
            raise ConfigError(
                'run.compile = "always" is for one pass of plain SGD without augmentation: set run.compile = "auto"'
            )
        is_wanted = compile == "always" or (compile == "auto" and pays and is_plain)
        self.compile, self.note = is_wanted and has_compiler, ""
        if is_wanted and not has_compiler:
            self.note = (
                "a run as long as this one has its step compiled, and this machine has no C++ compiler: it is not compiled "
                "(run.compile), so its last bits are others than where there is one"
            )
        self._lookups = lookups(self._worker.model, self.federation.data.inputs)
        if not self.how.is_plain or overrides(self.algorithm, "loss", "passes"):
            self._lookups.clear()  # every row of an embedding may move
        self._together, self._measured = (
            max(1, min(TOGETHER, MEMORY // (models * nbytes(self._worker.params))))
            for models in (1, 2)  # measuring, a client has up to two rows on average, and a row holds a model
        )
        self._answers = vmap(self._forward)
        self._steps: dict[Pass, Traced] = {}
        self._judge = Traced(self._answer_and_compare)
        self._asked: dict[tuple[int, ...], Questions] = {}
        self._room: dict[str, Tensor] = {}
        self._tested: set[Hashable] = set()
        self._try_model()

    def _try_model(self) -> None:
        """Two clients' forward pass: what cannot be vmapped shows here."""
        shard = max(self.federation.shards.values(), key=lambda shard: len(shard.train))
        model = self._worker.complete()
        group = self._group([Start(model)] * 2, [{}, {}])
        inputs, _ = self._worker.samples.batch(np.stack([shard.train[: self.how.batch_size]] * 2))
        try:
            self._worker.model.train()
            self._answers(group.params, group.buffers, look_up(self._lookups, [model] * 2, inputs, {}), inputs)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            raise CannotVmap(
                f'run.engine = "vmap" cannot be used with this model, use "threads": {str(error).splitlines()[0]}'
            ) from None

    # --- what is done as by the loop

    def try_training(self) -> None:
        self._loop.try_training()

    def rehearse(self, state: Any, visit: Visit) -> None:
        self._loop.rehearse(state, visit)

    def download(self, state: Any, visit: Visit) -> Download:
        return self._loop.download(state, visit)

    def personal(self, round_: int, state: Any, visits: Sequence[Visit], is_tuned: bool = False) -> list[Params]:
        return self._loop.personal(round_, state, visits, is_tuned)

    def close(self) -> None:
        self._loop.close()
        self._asked.clear()
        self._room.clear()
        for held in ("_tasks", "_worker", "_answers", "_steps", "_judge", "_lookups"):
            self.__dict__.pop(held, None)  # they know the network, and through it the data

    # --- one step, pure but for the parameters it moves

    def _forward(self, params: Params, buffers: Params, rows: Params, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """What one client's network says: (logits, features)."""
        for name, lookup in self._lookups.items():
            lookup.rows, lookup.inputs = rows[name], inputs
        try:
            logits = functional_call(self._worker.model, params | buffers, (inputs,))
        finally:
            for lookup in self._lookups.values():
                lookup.rows = lookup.inputs = None
        return logits, self._worker.take_features()

    def _loss(
        self, stage: str, moving: tuple[Params, Params], group: Group, inputs: Tensor, labels: Tensor, lr: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One client's loss with penalty, and both apart."""
        trained, rows = moving
        params = trained | group.fixed

        def network(params: Params, inputs: Tensor, statistics: str | None = "") -> Output:
            buffers = group.buffers
            if statistics is None:
                buffers = {name: b.clone() for name, b in buffers.items()}
            elif statistics:
                buffers = buffers | {n: buffers[statistics + n] for n in buffers if statistics + n in buffers}
            return Output(*self._forward(params, buffers, rows, inputs), params[self._worker.output_weight], buffers)

        batch = Batch(inputs, labels, self.how.label_smoothing, lr)
        found = self.algorithm.loss(network, params, batch, Start({}, group.anchor, group.notes), stage)
        return found.loss + found.penalty, torch.stack([found.loss.detach(), found.penalty.detach()])

    def _step(self, one: Pass) -> Traced:
        """The step of a pass, made once."""
        if one not in self._steps:
            gradient = vmap(grad(partial(self._loss, one.stage), has_aux=True))
            self._steps[one] = Traced(partial(self._descend, one, gradient))
        return self._steps[one]

    def _descend(
        self,
        one: Pass,
        gradient: Callable[..., Any],
        group: Group,
        rows: Params,
        inputs: Tensor,
        labels: Tensor,
        rate: Tensor,
        lr: Tensor,
    ) -> tuple[Tensor, ...]:
        """One step in place; every client's losses, and by how much each looked-up row moves."""
        found: tuple[tuple[Params, Params], Tensor] = gradient((group.trained, rows), group, inputs, labels, lr)
        (gradients, by_row), losses = found
        if self.how.is_plain:
            for name, w in group.trained.items():
                w.sub_(along(rate, w) * gradients[name])
        else:
            after, state = vmap(self._update)(group.trained, gradients, group.optimizer, rate)
            for place, now in ((group.trained, after), (group.optimizer, state)):
                for name, tensor in now.items():
                    place[name].copy_(tensor)
        if one.low > -torch.inf or one.high < torch.inf:
            for w in group.trained.values():
                w.clamp_(one.low, one.high)
        moves = []
        for name, gradient_of_rows in by_row.items():
            move = -along(rate, gradient_of_rows) * gradient_of_rows
            padding = self._lookups[name].padding_idx
            moves.append(move if padding is None else move * (inputs != padding).unsqueeze(-1))
        return losses, *moves

    def _update(self, params: Params, gradients: Params, state: Params, rate: Tensor) -> tuple[Params, Params]:
        """One client's step with the optimiser."""
        if self.how.clip:
            gradients = clipped(gradients, self.how.clip)
        return self.how.optimizer.update(params, gradients, state, rate)

    # --- training

    def visit(self, round_: int, state: Any, visits: Sequence[Visit], out: Params) -> list[Visited]:
        if self._proved is False:
            return self._loop.visit(round_, state, visits, out)
        try:
            visited = self._visit_together(round_, state, visits, out)
        except (RuntimeError, TypeError, ValueError, LookupError, NotImplementedError) as error:
            if self._proved:
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            if not self.lenient:
                raise RunError(f'this cannot be vmapped, use run.engine = "threads": {reason}') from None
            self._proved, self.why = False, f"this cannot be vmapped: {reason}"
            return self._loop.visit(round_, state, visits, out)
        self._proved = True
        return visited

    def _visit_together(self, round_: int, state: Any, visits: Sequence[Visit], out: Params) -> list[Visited]:
        starts, downloads, begun = [], [], []
        self._loop.prepare(state, visits)
        for visit in visits:
            got = self._loop.download(state, visit)
            start = self.algorithm.begin(got, visit.own, self._worker.view(visit.client, visit.statistics))
            if overrides(self.algorithm, "passes") and self.algorithm.passes("receipt", self.job.task, start):
                start = self._tasks.received(round_, visit, start)
                visit = replace(visit, statistics=self._worker.copy_of(visit.statistics))
            starts.append(start)
            downloads.append(got)
            begun.append(visit)
        trained: dict[int, Trained] = {}
        for alike, rows in self._groups(begun, starts):
            chosen, chosen_starts = [begun[r] for r in rows], [starts[r] for r in rows]
            self._test_penalty(alike, chosen[0], chosen_starts[0])
            trained |= self._train(round_, alike, chosen, chosen_starts, rows, out)
        return [
            self._tasks.visited(visit, downloads[row], starts[row], trained[row], model)
            for row, (visit, model) in enumerate(zip(begun, unstacked(out), strict=True))
        ]

    def _test_penalty(self, alike: Hashable, visit: Visit, start: Start) -> None:
        """Looked-up rows get the gradient of the loss alone: a penalty on a whole embedding makes it dense."""
        if alike in self._tested or not self._lookups:
            return
        self._tested.add(alike)
        worker = self._worker
        worker.load(start.params | visit.statistics)
        inputs, labels = worker.samples.batch(self.federation.shards[visit.client].train[: self.how.batch_size])
        said = worker.forward(inputs)
        output = Output(said.logits.detach(), said.features.detach(), said.weight)
        penalty = self.algorithm.penalty(worker.params, output, labels, worker.here(start))  # of the common loss
        tables = [worker.params[name] for name in self._lookups]
        if penalty.requires_grad:
            gradients = torch.autograd.grad(penalty, tables, allow_unused=True)
            if any(gradient is not None for gradient in gradients):
                self._lookups.clear()

    def _groups(self, visits: Sequence[Visit], starts: Sequence[Start]) -> Iterator[tuple[Hashable, list[int]]]:
        """What is alike in some starts, and their rows: equal batches, notes and anchors. Longest first."""
        groups = defaultdict(list)
        for row, (visit, start) in enumerate(zip(visits, starts, strict=True)):
            samples = len(self.federation.shards[visit.client].train)
            notes = tuple((name, note.shape, note.dtype) for name, note in start.notes.items())
            passes = self.algorithm.passes("training", self.job.task, start)
            size = tuple(min(self.how.size(one), samples) for one in passes)
            groups[size, notes, tuple(start.anchor), passes].append((-samples, row))
        for alike, rows in groups.items():
            ordered = [row for _, row in sorted(rows)]
            for at in range(0, len(ordered), self._together):
                yield alike, ordered[at : at + self._together]

    @torch.no_grad()
    def _train(
        self,
        round_: int,
        alike: Hashable,
        visits: Sequence[Visit],
        starts: Sequence[Start],
        rows: list[int],
        out: Params,
    ) -> dict[int, Trained]:
        """Train one group; by row, its mean loss and penalty and what stays with the client beside its model."""
        self._worker.model.train()
        passes = self.algorithm.passes("training", self.job.task, starts[0])
        group = self._group(starts, [visit.statistics for visit in visits])
        tables = self._tables(starts, rows, out)
        drawn = torch.get_rng_state()
        sums, steps = np.zeros((len(rows), 2)), np.zeros(len(rows))
        kept_states: Params = {}
        for index, one in enumerate(passes):
            group = group.training(self._worker.moved_by(one))
            if not self.how.is_plain:
                group = group._replace(optimizer=self._optimizer(index, group, visits))
            plans = [self._plan(round_, index, one, visit.client) for visit in visits]
            if not len(plans[0]):
                continue
            changed = self._changes(round_, index, plans, visits)
            rate = self.how.rate(one, round_)
            rates = (rate, self.how.rate(Pass(), round_))
            sums += self._carry_out((alike, index), one, plans, group, tables, rates, changed)
            steps += [len(plan) for plan in plans]
            kept_states |= {f"{OPTIMIZER}{index}.{n}": t for n, t in group.optimizer.items()}
        draws.refuse_global(drawn)
        means = sums / np.maximum(steps, 1)[:, None]
        weights = group.params if len(passes) > 1 else group.trained
        finite = [rows_of(w).sum(1) for w in weights.values()] + [table.sums() for table in tables.values()]
        means[~torch.stack(finite).isfinite().all(0).cpu().numpy(), 0] = (
            np.nan
        )  # a weight is no number: so is the loss
        trained, places = group.params | group.buffers, torch.tensor(rows)
        for name, stack in out.items():
            if name in tables:
                tables[name].save(stack)
            else:
                stack.index_copy_(0, places, trained[name].to(stack.device))
        local = visits[0].statistics.keys()
        kept = [{name: group.buffers[name][i].cpu().clone() for name in local} for i in range(len(rows))]
        optimizer = [
            {n: t[i].cpu().clone() for n, t in kept_states.items()} if self.how.keep_optimizer else {}
            for i in range(len(rows))
        ]
        return {
            row: Trained(float(means[i, 0]), float(means[i, 1]), kept[i], optimizer[i]) for i, row in enumerate(rows)
        }

    def _optimizer(self, index: int, group: Group, visits: Sequence[Visit]) -> Params:
        """The state of each client's optimiser before a pass: what it kept, or a fresh one."""
        prefix = f"{OPTIMIZER}{index}."
        states = []
        for i, visit in enumerate(visits):
            kept = {n.removeprefix(prefix): t for n, t in visit.optimizer.items() if n.startswith(prefix)}
            states.append(first_state(self.how.optimizer, {n: w[i] for n, w in group.trained.items()}, kept))
        device = self._worker.samples.device
        return {name: torch.stack([state[name].to(device) for state in states]) for name in states[0]}

    def _changes(
        self, round_: int, index: int, plans: Sequence[Indices], visits: Sequence[Visit]
    ) -> list[Tensor] | None:
        """For each step, how the clients' images are changed; None where they are not."""
        if self.how.augment == "none":
            return None
        each = [
            self._worker.drawn(plan, "training", index, v.client, round_, self.how) or []
            for plan, v in zip(plans, visits, strict=True)
        ]
        return [torch.stack([own[step] for own in each if step < len(own)]) for step in range(len(each[0]))]

    def _carry_out(
        self,
        alike: Hashable,
        one: Pass,
        plans: Sequence[Indices],
        group: Group,
        tables: dict[str, Table],
        rates_of: tuple[float, float],
        changed: list[Tensor] | None,
    ) -> NDArray[np.float64]:
        """All steps of the clients' plans, longest first; the sums of each client's losses and penalties.

        `rates_of` are the learning rates of the pass and of the round.
        """
        device = self._worker.samples.device
        padded = self.compile
        steps = np.array([len(plan) for plan in plans])
        trains = torch.from_numpy(steps[None, :] > np.arange(steps[0])[:, None]).to(device)  # steps x clients
        history: list[Tensor] = []
        now, among = group, len(plans)
        together = np.empty((steps[0], len(plans), plans[0].shape[1]), np.int64)
        for i, plan in enumerate(plans):
            together[: len(plan), i] = plan
            together[len(plan) :, i] = plan[0]  # who is done repeats
        batches = self._worker.samples.batches(together)
        rates, lr = (trains * rates_of[0]).unbind(), torch.full((len(plans),), rates_of[1], device=device)
        step = self._step(one)
        for at, ((inputs, labels), rate, active) in enumerate(
            zip(batches, rates, trains.sum(1).tolist(), strict=True)
        ):
            if self._worker.stop.is_set():
                raise Stopped
            if one.once and at == 1:
                group = group.training(name for name in group.trained if name not in one.once)
                now = group.first(among)
            if among != (among := self._how_many(active, len(plans), padded)):
                now = group.first(among)
            if among < len(plans):
                inputs, labels, rate = inputs[:among], labels[:among], rate[:among]
            if changed is not None:
                inputs = augment.change(inputs, changed[at], self._worker.black)
            looked_up = {name: table.look_up(inputs) for name, table in tables.items()}
            key = (inputs.shape, alike, bool(one.once) and at == 0, *looked_up)
            losses, *moves = step(key, now, looked_up, inputs, labels, rate, lr[:among], compile=padded)
            for table, move in zip(tables.values(), moves, strict=True):
                table.move(inputs, move)
            history.append(losses)
        told = nn.utils.rnn.pad_sequence(history).transpose(0, 1)  # steps x clients x (loss, penalty)
        sums: NDArray[np.float64] = torch.where(trains[:, :, None], told, 0.0).cpu().double().sum(0).numpy()
        return sums

    def _how_many(self, active: int, clients: int, padded: bool) -> int:
        """Who is in the next step: those still training, or the least part that was worth compiling for."""
        if not padded:
            return active
        return min(size for size in {clients, -(-clients // 4)} if size >= active)

    def _plan(self, round_: int, index: int, one: Pass, client: int) -> Indices:
        """The client's batches as a matrix of sample indices, one row a step."""
        own = self.federation.shards[client].train
        rng = stream(self.how.seed, purpose("shuffle", "training", index), round_, client)
        if one.incomplete or one.until:
            raise NotImplementedError("a pass in training with incomplete batches or an end of its own")
        return own[np.asarray(batches(len(own), self.how, one, rng))]

    def _group(self, starts: Sequence[Start], statistics: Sequence[Params]) -> Group:
        return stacked(self._worker, starts, statistics, apart=self._lookups)

    # --- embeddings

    def _tables(self, starts: Sequence[Start], rows: list[int], out: Params) -> dict[str, Table]:
        """The embeddings of these participants, in the stack in which they are handed over."""
        for name in self._lookups:
            for row, start in zip(rows, starts, strict=True):
                out[name][row].copy_(start.params[name])
        device = self._worker.samples.device
        return {name: Table(out[name].to(device), torch.tensor(rows, device=device)) for name in self._lookups}

    # --- measuring

    def measure(self, candidates: Sequence[Candidate], round_: int = 0, state: Any = None) -> list[Score]:
        scores, call = [], Call("measure", round_, state)
        for at in range(0, len(candidates), self._measured):
            chosen = candidates[at : at + self._measured]
            self._loop.prepare(state, (candidate.visit for candidate in chosen if candidate.model is None))
            models = [self._tasks.candidate(call, candidate) for candidate in chosen]
            if len({id(model) for model in models}) < len(models):  # shared models are measured in common batches
                scores += self._loop.measure([replace(c, model=m) for c, m in zip(chosen, models, strict=True)])
            else:
                scores += self._score_each(models, [c.visit for c in chosen])
        return scores

    @torch.no_grad()
    def _score_each(self, models: Sequence[Params], visits: Sequence[Visit]) -> list[Score]:
        """Scores of one model a client."""
        self._worker.model.eval()
        asked = self._questions(tuple(visit.client for visit in visits))
        found: list[tuple[Tensor, ...]] = []
        own, at = OwnSums(self.job.metrics, 2 * len(visits)), 0
        if not asked.owners:
            nothing = np.zeros((2 * len(visits), 4, self.federation.data.classes))
            return scores_of(nothing, [0.0] * len(visits), own)
        models = [models[i] for i in asked.owners]
        group = self._group([Start(model) for model in models], [visits[i].statistics for i in asked.owners])
        for inputs, labels in asked.batches():
            rows = look_up(self._lookups, models, inputs, self._room)
            *answers, logits = self._judge(
                inputs.shape,
                group.params,
                group.buffers,
                rows,
                inputs,
                labels,
                compile=self.compile,
            )
            found.append(tuple(answers))
            if self.job.metrics:
                add_own(own, asked, at, logits, labels)
            at += labels.shape[1]
        predicted, right, loss = (torch.cat(column, 1).cpu().numpy() for column in zip(*found, strict=True))
        tables = asked.places.count(predicted, right, loss.astype(np.float64))
        return scores_of(tables, tables[::2, LOSS].sum(1).tolist(), own)

    def _answer_and_compare(
        self, params: Params, buffers: Params, rows: Params, inputs: Tensor, labels: Tensor
    ) -> tuple[Tensor, ...]:
        """For each client's samples: the answer, is it right, and its cross-entropy; and the logits."""
        logits, _ = self._answers(params, buffers, rows, inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        predicted = logits.argmax(2)
        return predicted, predicted == labels, loss.view(labels.shape), logits

    def _questions(self, clients: tuple[int, ...]) -> Questions:
        """The same for every round."""
        if clients not in self._asked:
            self._asked = {clients: questions(self.federation, self._worker.samples, clients)}
        return self._asked[clients]
