"""All clients in one batched step: for models so small that a step is mostly Python, and for GPUs.

Clients are sorted by how many batches they have, so at every step those still training are the first so many: none is
padded, none is masked. Clients smaller than a batch train in groups of their own size.

A step is run as `vmap` of the gradient until it has been seen often; then it is traced once into a straight line of
tensor operations, which are the same ones, so that the bits do not change.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from cwfed.algorithms import FedAvg
from cwfed.data.partition import Indices
from cwfed.engine.base import Candidate, Loop, Score, Visit, Visited
from cwfed.engine.bench import Bench, Diverged, Stopped, batches, refuse_global_draws
from cwfed.errors import ConfigError
from cwfed.rng import stream
from cwfed.types import Output, Params, Start

TOGETHER = 256
"""At most so many clients in one step: bounds the memory, which holds all their models and activations."""
TRACE_AFTER = 50
"""Steps of one shape before it is traced; a trace takes as long as some dozens of untraced steps."""
FIRST_TRACE_AFTER = 800
"""Steps before anything is traced: the first trace also loads torch's tracer, which takes a second or two."""
COMPILE_AFTER = 2_000
"""Steps of one shape before it is compiled, where that is asked for."""
SAMPLES_AT_ONCE = 8192


class Vmap(Loop):
    """Every client's step in one operation with a leading axis of clients."""

    name = "vmap"

    def __init__(self, *given: Any, compile: bool = False, **named: Any) -> None:
        super().__init__(*given, **named)
        bench = self._benches[0]
        self._step = Traced(vmap(_Gradient(bench, self.algorithm)), compile)
        self._forward = vmap(_Forward(bench), randomness="error")
        self._try()

    def _try(self) -> None:
        """One step of two clients: what cannot be vmapped shows here."""
        bench = self._benches[0]
        shard = max(self.federation.shards, key=lambda shard: len(shard.train))
        size = min(self.how.batch_size, len(shard.train))
        whole = np.stack([shard.train[:size]] * 2)
        group = _Group(bench, [Start(bench.complete())] * 2, [{}, {}])
        try:
            bench.model.train()
            self._forward(group.params, group.buffers, _batch(bench, whole)[0])
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f'run.engine = "vmap" cannot be used with this model, use "threads" or "auto": {reason}'
            ) from None

    # --- training

    def visit(self, round_: int, visits: Sequence[Visit], out: Params) -> list[Visited]:
        starts, downloaded = [], []
        for visit in visits:
            got = visit.download()
            view = self._benches[0].view(visit.client, visit.statistics)
            starts.append(self.algorithm.begin(got, visit.own, view))
            downloaded.append(got.nbytes)
        trained: dict[int, tuple[float, float, Params]] = {}
        for rows in self._groups(visits, starts):
            trained |= self._train(round_, [visits[r] for r in rows], [starts[r] for r in rows], rows, out)
        visited = []
        for row, visit in enumerate(visits):
            loss, penalty, kept = trained[row]
            model = {name: stack[row] for name, stack in out.items()}
            view = self._benches[0].view(visit.client, kept)
            extras = self.algorithm.finish(model, starts[row], view)
            visited.append(Visited(visit.client, loss, penalty, downloaded[row], extras, kept))
        return visited

    def _groups(self, visits: Sequence[Visit], starts: Sequence[Start]) -> Iterator[list[int]]:
        """Rows that can train together: equal batches and notes of equal shape; longest first."""
        alike = defaultdict(list)
        for row, (visit, start) in enumerate(zip(visits, starts, strict=True)):
            samples = len(self.federation.shards[visit.client].train)
            shapes = tuple((name, tuple(note.shape)) for name, note in sorted(start.notes.items()))
            alike[min(self.how.batch_size, samples), shapes].append((-samples, row))
        for rows in alike.values():
            ordered = [row for _, row in sorted(rows)]
            yield from (ordered[at : at + TOGETHER] for at in range(0, len(ordered), TOGETHER))

    def _train(
        self, round_: int, visits: Sequence[Visit], starts: Sequence[Start], rows: list[int], out: Params
    ) -> dict[int, tuple[float, float, Params]]:
        """Train one group; by row, its mean loss and penalty and the statistics that stay with the client."""
        bench, how = self._benches[0], self.how
        bench.model.train()
        group = _Group(bench, starts, [visit.statistics for visit in visits])
        plans = []
        for visit in visits:
            own = self.federation.shards[visit.client].train
            rng = stream(how.seed, "shuffle", round_, visit.client)
            plans.append([own[batch.numpy()] for batch in batches(len(own), how, rng)])
        steps = np.array([len(plan) for plan in plans])
        history = torch.zeros(steps[0], len(plans), 2, device=bench.samples.device)
        drawn = torch.get_rng_state()
        active, now = -1, group
        with torch.no_grad():
            for step in range(steps[0]):
                if self._stop.is_set():
                    raise Stopped
                if active != (active := int((steps > step).sum())):
                    now = group.first(active)
                inputs, labels = _batch(bench, np.stack([plan[step] for plan in plans[:active]]))
                gradients, history[step, :active] = self._step(
                    now.trained, now.fixed, now.buffers, inputs, labels, now.anchor, now.notes
                )
                torch._foreach_sub_(list(now.trained.values()), list(gradients.values()), alpha=how.lr)
        refuse_global_draws(drawn)
        means = history.double().sum(0).cpu().numpy() / steps[:, None]
        finite = torch.stack([w.flatten(1).isfinite().all(1) for w in group.trained.values()]).all(0).cpu().numpy()
        for visit, mean, intact in zip(visits, means, finite, strict=True):
            if not intact or not np.isfinite(mean).all():
                raise Diverged(visit.client, round_)
        where = torch.tensor(rows)
        for name, stack in out.items():
            stack.index_copy_(0, where, group.state(name).to(stack.device))
        local = visits[0].statistics.keys()
        kept = [{name: group.buffers[name][i].cpu().clone() for name in local} for i in range(len(rows))]
        return {row: (*means[i].tolist(), kept[i]) for i, row in enumerate(rows)}

    # --- measuring

    def measure(self, candidates: Sequence[Candidate]) -> list[Score]:
        models = [c.model(self._benches[0].view(c.client, c.statistics)) for c in candidates]
        if len({id(model) for model in models}) < len(models):  # shared models are measured in common batches
            return super().measure(candidates)
        scores = []
        for at in range(0, len(candidates), TOGETHER):
            chosen = candidates[at : at + TOGETHER]
            complete = [m | c.statistics for m, c in zip(models[at : at + TOGETHER], chosen, strict=True)]
            scores += self._score_each(complete, [c.client for c in chosen])
        return scores

    @torch.no_grad()
    def _score_each(self, models: Sequence[Params], clients: Sequence[int]) -> list[Score]:
        """Scores of one model a client. Shorter clients repeat their first sample, which is not counted."""
        bench = self._benches[0]
        bench.model.eval()
        group = _Group(bench, [Start(model) for model in models], [{} for _ in models])
        shards = [self.federation.shards[c] for c in clients]
        parts = [np.concatenate([s.test, s.validation]) for s in shards]
        longest = max(len(part) for part in parts)
        right = np.zeros((len(parts), longest), dtype=bool)
        loss = np.zeros((len(parts), longest))
        padded = np.stack([np.resize(part, longest) if len(part) else np.zeros(longest, np.int64) for part in parts])
        size = max(1, SAMPLES_AT_ONCE // len(parts))
        for at in range(0, longest, size):
            inputs, labels = _batch(bench, padded[:, at : at + size])
            logits, _ = self._forward(group.params, group.buffers, inputs)
            losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
            right[:, at : at + size] = (logits.argmax(2) == labels).cpu().numpy()
            loss[:, at : at + size] = losses.cpu().double().numpy()
        scores = []
        for i, shard in enumerate(shards):
            tests, end = len(shard.test), len(parts[i])
            scores.append(Score(int(right[i, :tests].sum()), float(loss[i, :tests].sum()), int(right[i, tests:end].sum())))
        return scores


class _Group:
    """Clients that train together: their tensors stacked on the bench's device."""

    def __init__(self, bench: Bench, starts: Sequence[Start], statistics: Sequence[Params]) -> None:
        complete = [start.params | own for start, own in zip(starts, statistics, strict=True)]
        device = bench.samples.device

        def stack(tensors: Sequence[Params], names: Any) -> Params:
            return {name: torch.stack([tensor[name] for tensor in tensors]).to(device) for name in names}

        def repeat(buffer: Tensor) -> Tensor:
            return buffer.expand(len(starts), *buffer.shape).clone()

        params = stack(complete, bench.params)
        self.trained = {n: w for n, w in params.items() if bench.params[n].requires_grad}
        self.fixed = {n: w for n, w in params.items() if n not in self.trained}
        known = [n for n in bench.buffers if n in complete[0]]
        self.buffers = {n: repeat(initial) for n, initial in bench.initial_buffers.items()} | stack(complete, known)
        self.anchor = stack([start.anchor for start in starts], starts[0].anchor)
        self.notes = stack([start.notes for start in starts], starts[0].notes)

    @property
    def params(self) -> Params:
        return self.trained | self.fixed

    def first(self, count: int) -> _Group:
        """Views of the first so many clients."""
        part = object.__new__(_Group)
        for kind in ("trained", "fixed", "buffers", "anchor", "notes"):
            setattr(part, kind, {name: tensor[:count] for name, tensor in getattr(self, kind).items()})
        return part

    def state(self, name: str) -> Tensor:
        """A stacked parameter or buffer."""
        return self.params[name] if name in self.params else self.buffers[name]


def _batch(bench: Bench, indices: Indices) -> tuple[Tensor, Tensor]:
    """Inputs and labels for a matrix of indices, clients x samples."""
    inputs, labels = bench.samples.batch(indices.reshape(-1))
    shape = indices.shape
    return inputs.unflatten(0, shape), labels.view(shape)


class _Forward:
    """What one client's network says: (logits, features)."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def __call__(self, params: Params, buffers: Params, inputs: Tensor) -> tuple[Tensor, Tensor]:
        logits = functional_call(self.bench.model, params | buffers, (inputs,))
        return logits, self.bench.take_features()


class _Gradient:
    """The gradient of one client's loss and penalty, and both numbers."""

    def __init__(self, bench: Bench, algorithm: FedAvg) -> None:
        self.forward, self.algorithm = _Forward(bench), algorithm
        self.output_weight = bench.output_weight
        self.gradient = grad(self.loss, has_aux=True)

    def __call__(self, *given: Any) -> tuple[Params, Tensor]:
        found: tuple[Params, Tensor] = self.gradient(*given)
        return found

    def loss(
        self,
        trained: Params,
        fixed: Params,
        buffers: Params,
        inputs: Tensor,
        labels: Tensor,
        anchor: Params,
        notes: Params,
    ) -> tuple[Tensor, Tensor]:
        params = trained | fixed
        logits, features = self.forward(params, buffers, inputs)
        loss = F.cross_entropy(logits, labels)
        output = Output(logits, features, params[self.output_weight])
        penalty = self.algorithm.penalty(params, output, labels, Start({}, anchor, notes))
        return loss + penalty, torch.stack([loss.detach(), penalty.detach()])


class Traced:
    """A function that becomes a straight line of operations for every shape that it meets often."""

    def __init__(self, function: Callable[..., Any], compile: bool) -> None:
        self.function, self.compile = function, compile
        self._seen: Counter[Any] = Counter()
        self._lines: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *given: Any) -> Any:
        tensors = pytree.tree_leaves(given)
        key = tuple((t.shape, t.stride()) for t in tensors)
        self._seen[key] += 1
        if key in self._lines:
            line = self._lines[key]
            if self.compile and self._seen[key] == COMPILE_AFTER:
                self._lines[key] = torch.compile(line)
            return line(*given)
        if self._seen[key] > TRACE_AFTER and self._seen.total() > FIRST_TRACE_AFTER:
            self._lines[key] = straight_line(self.function, given)
        return self.function(*given)


def straight_line(function: Callable[..., Any], example: tuple[Any, ...]) -> GraphModule:
    """The tensor operations that a function does on inputs of this shape, without those that do nothing."""
    from torch.fx.experimental.proxy_tensor import make_fx

    # In-place changes of buffers are part of the trace, so the tracing run works on copies.
    graph = make_fx(function)(*pytree.tree_map(torch.clone, example))
    aten = torch.ops.aten
    for node in list(graph.graph.nodes):
        if node.target in (aten.expand.default, aten.view.default, aten._unsafe_view.default):
            source = node.args[0]
            before, after = source.meta["val"], node.meta["val"]
            if before.shape == after.shape and before.stride() == after.stride():
                node.replace_all_uses_with(source)
                graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph
