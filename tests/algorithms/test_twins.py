"""Slow twins: whole runs of the methods, written from their equations (METHODS.md, ALGORITHMS.md) alone, in plain torch.

A twin shares with cwfed the data, the initial tensors, who takes part and the order of the batches, and nothing else. Compared is the loss of every client's model on its
test data, after every round and in both phases, which no mistake in what travels, stays, is trained, averaged or measured leaves alone.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.cluster import AgglomerativeClustering

from cwfed.core.rng import stream
from cwfed.core.types import Pass
from cwfed.data import Samples
from cwfed.engine.worker import batches, purpose
from cwfed.federation.rounds import one_compute_thread
from cwfed.federation.simulation import Simulation
from tests.conftest import finish, small

BODY, HEAD = ("fc.weight", "fc.bias"), ("output.weight", "output.bias")
ALL = BODY + HEAD
CLIENTS, CLASSES, WIDTH, LR = range(4), 10, 16, 0.05
CHOSEN = (
    "run.engine=loop",
    "data.clients=4",
    "data.samples=260",
    "data.partition=dirichlet",
    "data.alpha=0.5",
    "train.participation=3",
)
STEPS = (f"train.lr={LR}", "train.rounds=4", "train.batch_size=6")


class Run:
    """A run of cwfed, and what a twin takes from it."""

    def __init__(self, *settings):
        simulation = Simulation(small(*CHOSEN, *STEPS, *settings))
        self.options, self.how, self.fresh = simulation.config.algorithm, simulation.training(), simulation.fresh
        self.initial, self.shards = simulation.initial, simulation.federation.shards
        data = simulation.federation.data
        inputs, self.labels = Samples(data.inputs, data.labels, torch.device("cpu")).batch(
            np.arange(len(data.labels))
        )
        self.inputs = inputs.flatten(1)
        _, self.events = finish(simulation)

    def part(self, indices):
        return self.inputs[indices], self.labels[indices]

    def batches(self, client, round_, when="training", index=0, **about):
        own = self.shards[client].train
        rng = stream(self.how.seed, purpose("shuffle", when, index), round_, client)
        return [self.part(own[rows]) for rows in batches(len(own), self.how, Pass(**about), rng)]


def features(p, x):
    return torch.relu(x @ p["fc.weight"].T + p["fc.bias"])


def head(p, f):
    return f @ p["output.weight"].T + p["output.bias"]


def unit(v):
    return v / v.norm(dim=-1, keepdim=True)


def cut(p, names):
    return {n: p[n] for n in names}


def gradients(p, names, loss):
    """Of a function of a model, by some of its tensors."""
    leaves = {n: p[n].detach().clone().requires_grad_() for n in names}
    return dict(zip(names, torch.autograd.grad(loss(p | leaves), list(leaves.values())), strict=True))


def distance(p, q):
    return sum(((p[n] - q[n]) ** 2).sum() for n in ALL)


def least(gram):
    """argmin a' G a over the simplex: the best of all supports. Less than 0.001 is nothing."""
    best = (np.inf, np.zeros(len(gram)))
    for size in range(1, len(gram) + 1):
        for support in combinations(range(len(gram)), size):
            a = np.zeros(len(gram))
            a[list(support)] = np.linalg.solve(gram[np.ix_(support, support)], np.ones(size))
            a /= a.sum()
            if (a >= 0).all() and a @ gram @ a < best[0]:
                best = (a @ gram @ a, a)
    a = np.where(best[1] < 1e-3, 0, best[1])
    return (a / a.sum()).tolist()


class FedAvg:
    shared, kept = ALL, ()
    """What the server averages, what stays with a client."""

    def __init__(self, run):
        self.run, self.o = run, run.options
        self.server = cut(run.initial, self.shared)
        self.own = {c: self.first() for c in CLIENTS}
        self.seen = set()
        self.begin()

    def begin(self): ...

    def first(self):
        """What a client keeps before its first round."""
        return cut(self.run.initial, self.kept)

    def receive(self, c, t):
        """The model of a client on receipt, for round t."""
        return self.server | self.own[c]

    def answer(self, c, p, x):
        return head(p, features(p, x))

    def loss(self, c, p, x, y):
        return F.cross_entropy(self.answer(c, p, x), y)

    def sgd(self, c, p, names, plan, lr=LR, loss=None):
        for x, y in plan:
            found = gradients(p, names, lambda q, x=x, y=y: (loss or self.loss)(c, q, x, y))
            p = p | {n: p[n] - lr * g for n, g in found.items()}
        return p

    def train(self, c, t):
        return self.sgd(c, self.receive(c, t), self.shared + self.kept, self.run.batches(c, t))

    def keep(self, c, p):
        self.own[c] = cut(p, self.kept)

    def weight(self, c):
        return len(self.run.shards[c].train)

    def mean(self, trained, weights=None, names=None):
        weights = weights or {c: self.weight(c) for c in trained}
        total = sum(weights.values())
        return {n: sum(weights[c] / total * p[n] for c, p in trained.items()) for n in names or self.shared}

    def aggregate(self, t, trained):
        self.server = self.mean(trained)

    def tested(self, t, trained):
        """What is measured as `trained`, where that is not what was received."""
        return trained

    def rounds(self):
        for event in self.run.events:
            t = event.round
            trained = {c: self.train(c, t) for c in event.participants}
            for c, p in trained.items():
                self.keep(c, p)
            self.seen |= trained.keys()
            self.aggregate(t, trained)
            received = {c: self.receive(c, t + 1) for c in CLIENTS}
            yield event, received, received | self.tested(t, trained)

    # what clients know of their data

    def data(self, c):
        return self.run.part(self.run.shards[c].train)

    def counts(self, c):
        return torch.bincount(self.data(c)[1], minlength=CLASSES).float()

    def class_means(self, c, p, of=lambda f: f):
        x, y = self.data(c)
        f = of(features(p, x))
        return {k: f[y == k].mean(0) for k in y.unique().tolist()}

    def over_owners(self, sent):
        """By class, the mean of what clients sent of it, by their samples."""
        found = {}
        for k in range(CLASSES):
            have = [(self.counts(c)[k], means[k]) for c, means in sent.items() if k in means]
            if have:
                found[k] = sum(n * v for n, v in have) / sum(n for n, _ in have)
        return found


class Keeper(FedAvg):
    """Clients go on from, and are measured with, models of their own."""

    kept = ALL

    def tested(self, t, trained):
        return {c: self.own[c] for c in self.seen}


class FedRep(FedAvg):
    shared, kept = BODY, HEAD

    def train(self, c, t):
        p = self.sgd(c, self.receive(c, t), HEAD, self.run.batches(c, t, epochs=1))
        return self.sgd(c, p, BODY, self.run.batches(c, t, index=1))


class PerFedAvg(FedAvg):
    def train(self, c, t):
        p = self.receive(c, t)
        for x, y in self.run.batches(c, t, epochs=2, batch_size=2 * self.run.how.batch_size):
            half = len(x) // 2
            fast = self.sgd(c, p, ALL, [(x[:half], y[:half])])
            g = gradients(fast, ALL, lambda q, x=x[half:], y=y[half:]: self.loss(c, q, x, y))
            p = {n: p[n] - LR * g[n] for n in ALL}
        return p

    def tested(self, t, trained):
        one = {c: self.run.batches(c, t + 1, "test", epochs=1, steps=1) for c in CLIENTS}
        return {c: self.sgd(c, self.server, ALL, one[c]) for c in CLIENTS}


class FedRoD(FedAvg):
    kept = ("P.weight", "P.bias")

    def first(self):
        return {"P.weight": self.server["output.weight"], "P.bias": self.server["output.bias"]}

    def both(self, p, x):
        f = features(p, x)
        g = head(p, f)
        return g, g.detach() + f.detach() @ p["P.weight"].T + p["P.bias"]

    def answer(self, c, p, x):
        return self.both(p, x)[1]

    def loss(self, c, p, x, y):
        generic, personal = self.both(p, x)
        return F.cross_entropy(generic + self.counts(c).log(), y) + F.cross_entropy(personal, y)


class FedProto(FedAvg):
    shared, kept = (), ALL

    def begin(self):
        self.known = {}

    def loss(self, c, p, x, y):
        f = features(p, x)
        pull = sum(((f[i] - self.known[k]) ** 2).sum() for i, k in enumerate(y.tolist()) if k in self.known)
        return F.cross_entropy(head(p, f), y) + self.o["lambda"] * pull / f.numel()

    def aggregate(self, t, trained):
        self.known |= self.over_owners({c: self.class_means(c, p) for c, p in trained.items()})


class FedPAC(FedAvg):
    shared, kept = BODY, HEAD

    def begin(self):
        self.known = {}

    def loss(self, c, p, x, y):
        f = features(p, x)
        targets = self.class_means(c, self.server) | self.known
        pull = ((f - torch.stack([targets[k] for k in y.tolist()])) ** 2).mean() if self.known else 0
        return F.cross_entropy(head(p, f), y) + self.o["lambda"] * pull

    def train(self, c, t):
        first, plain = self.receive(c, t), super().loss
        p = self.sgd(c, first, HEAD, self.run.batches(c, t, epochs=1), loss=plain)
        return self.sgd(c, p, BODY, self.run.batches(c, t, index=1))

    def moments(self, c):
        x, y = self.data(c)
        f, share, means = features(self.server, x), self.counts(c) / len(y), self.class_means(c, self.server)
        rows = torch.zeros(CLASSES, WIDTH, dtype=torch.float64)
        variance = 0.0
        for k, mean in means.items():
            rows[k] = share[k] * mean
            variance += float(share[k] * (f[y == k] ** 2).sum(1).mean() - share[k] ** 2 * (mean**2).sum())
        return rows.numpy(), variance / len(y)

    def aggregate(self, t, trained):
        moments = {c: self.moments(c) for c in trained}
        self.known |= self.over_owners({c: self.class_means(c, p) for c, p in trained.items()})
        self.server = self.mean(trained)
        for i in trained:
            apart = [(moments[i][0] - rows).ravel() for rows, _ in moments.values()]
            gram = np.array([[a @ b for b in apart] for a in apart]) + np.diag([v for _, v in moments.values()])
            self.own[i] = self.mean(trained, dict(zip(trained, least(gram), strict=True)), HEAD)


class FedALA(FedAvg):
    def begin(self):
        self.omega = {c: {n: torch.ones_like(self.server[n]) for n in HEAD} for c in CLIENTS}
        self.times = dict.fromkeys(CLIENTS, 0)

    def mixed(self, c, omega):
        return self.server | {n: self.own[c][n] + (self.server[n] - self.own[c][n]) * omega[n] for n in HEAD}

    def learnt(self, c, t):
        """Omega on receipt."""
        omega, ends = self.omega[c], []
        if not self.times[c]:
            return omega
        epochs = self.o["most_epochs"] if self.times[c] == 1 else 1
        plan = self.run.batches(c, t, "receipt", epochs=epochs, share=self.o["share"], incomplete=True)
        for epoch in np.array_split(np.arange(len(plan)), epochs):
            losses = []
            for x, y in (plan[i] for i in epoch):
                losses.append(self.loss(c, self.mixed(c, omega), x, y).item())
                g = gradients(omega, HEAD, lambda q, x=x, y=y: self.loss(c, self.mixed(c, q), x, y))
                omega = {n: (omega[n] - self.o["rate"] * g[n]).clamp(0, 1) for n in HEAD}
            ends.append(np.mean(losses))
            if len(ends) >= 10 and np.std(ends[-10:], ddof=1) < self.o["still"]:
                break
        return omega

    def receive(self, c, t):
        return self.mixed(c, self.learnt(c, t)) if self.times[c] else self.server

    def train(self, c, t):
        self.omega[c] = self.learnt(c, t)
        start = self.mixed(c, self.omega[c]) if self.times[c] else self.server
        return self.sgd(c, start, ALL, self.run.batches(c, t))

    def keep(self, c, p):
        self.own[c] = p
        self.times[c] += 1


class FedCP(FedAvg):
    generic = ("G.weight", "G.bias")
    policy = tuple(f"output.policy.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias"))
    shared, kept = BODY + policy, HEAD

    def begin(self):
        self.server |= {"G.weight": self.run.initial["output.weight"], "G.bias": self.run.initial["output.bias"]}

    def receive(self, c, t):
        received = super().receive(c, t)
        return received | {"u": unit(received["output.weight"].sum(0))}

    def answer(self, c, p, x):
        f = features(p, x)
        linear, norm = (p[f"output.policy.{i}.weight"] for i in (0, 1))
        z = (f * p["u"]) @ linear.T + p["output.policy.0.bias"]
        z = torch.relu(F.layer_norm(z, (2 * WIDTH,), norm, p["output.policy.1.bias"]))
        r, s = torch.softmax(torch.stack([z[:, :WIDTH], z[:, WIDTH:]]), 0)
        return head(p, r * f) + (s * f) @ p["G.weight"].T + p["G.bias"]

    def loss(self, c, p, x, y):
        a, b = features(p, x), features(self.server, x)

        def kernel(a, b):
            apart = ((a[:, None] - b) ** 2).sum(2)
            return sum(torch.exp(-apart / (2 * width)) for width in (10, 15, 20, 50)).mean()

        return super().loss(c, p, x, y) + self.o["lambda"] * (kernel(a, a) + kernel(b, b) - 2 * kernel(a, b))

    def aggregate(self, t, trained):
        heads = {
            c: {"G.weight": (p["output.weight"] + p["G.weight"]) / 2, "G.bias": (p["output.bias"] + p["G.bias"]) / 2}
            for c, p in trained.items()
        }
        self.server = self.mean(trained) | self.mean(heads, names=self.generic)


class GPFL(FedAvg):
    embeddings = "output.class_embeddings"
    valve = tuple(
        f"output.{part}.{i}.{kind}" for part in ("gamma", "beta") for i in (0, 2) for kind in ("weight", "bias")
    )
    shared, kept = (*BODY, embeddings, *valve), HEAD

    def receive(self, c, t):
        shares = self.counts(c) / self.weight(c)
        return super().receive(c, t) | {"t": shares @ self.server[self.embeddings]}

    def valved(self, p, f, context):
        def part(name):
            z = torch.relu(context @ p[f"output.{name}.0.weight"].T + p[f"output.{name}.0.bias"])
            return F.layer_norm(z, (WIDTH,), p[f"output.{name}.2.weight"], p[f"output.{name}.2.bias"])

        return torch.relu((part("gamma") + 1) * f + part("beta"))

    def answer(self, c, p, x):
        return head(p, self.valved(p, features(p, x), p["t"]))

    def loss(self, c, p, x, y):
        fixed = self.server[self.embeddings]
        common = self.valved(p, features(p, x), fixed.mean(0))
        guided = F.cross_entropy(F.cosine_similarity(common[:, None], p[self.embeddings], dim=2), y)
        decay = sum((p[n] ** 2).sum() for n in (self.embeddings, *self.valve)) / 2
        magnitude = ((common - fixed[y]) ** 2).sum().sqrt()
        return super().loss(c, p, x, y) + guided + self.o["lambda"] * magnitude + self.o["mu"] * decay


class FedDBE(FedAvg):
    kept = ("m",)

    common = None

    def first(self):
        return {"m": torch.zeros(WIDTH)}

    def answer(self, c, p, x):
        return head(p, features(p, x) + p["m"])

    def loss(self, c, p, x, y):
        pull = 0 if self.common is None else ((features(p, x).mean(0) - self.common) ** 2 / 2).mean()
        return super().loss(c, p, x, y) + self.o["kappa"] * pull

    def train(self, c, t):
        moved = ALL if self.common is None else (*ALL, "m")
        return self.sgd(c, self.receive(c, t), moved, self.run.batches(c, t))

    def aggregate(self, t, trained):
        if self.common is not None:
            return super().aggregate(t, trained)
        means = {c: {"f": features(p, self.data(c)[0]).mean(0)} for c, p in trained.items()}
        self.common = self.mean(means, names=["f"])["f"]


class FedAS(Keeper):
    shared = BODY

    def receive(self, c, t):
        means = self.class_means(c, self.own[c])

        def apart(c, p, x, y):
            f = features(p, x)
            return sum(((f[y == k] - means[k]) ** 2).mean() for k in y.unique().tolist())

        plan = self.run.batches(c, t, "receipt", epochs=1, batch_size=self.o["batch_size"])
        return self.sgd(c, self.own[c] | self.server, BODY, plan, self.o["rate"], apart)

    def train(self, c, t):
        return self.sgd(c, self.receive(c, t), ALL, self.run.batches(c, t))

    def fisher(self, c, p):
        x, y = self.data(c)
        size = self.o["batch_size"]
        whole = [(x[i : i + size], y[i : i + size]) for i in range(0, len(x) - size + 1, size)]
        found = [gradients(p, ALL, lambda q, x=x, y=y: self.loss(c, q, x, y)) for x, y in whole]
        return sum(float((w.double() ** 2).sum()) for g in found for w in g.values())

    def aggregate(self, t, trained):
        self.server = self.mean(trained, {c: self.fisher(c, p) for c, p in trained.items()})


class FedCAC(FedAvg):
    def begin(self):
        self.masks, self.groups = {}, {}

    def receive(self, c, t):
        if c not in self.masks:
            return self.server
        return {n: torch.where(self.masks[c][n], self.groups[c][n], self.server[n]) for n in ALL}

    def critical(self, before, after):
        sensitivity = ((after - before).abs() * after.abs()).flatten()
        mask = torch.zeros(len(sensitivity), dtype=torch.bool)
        mask[sensitivity.argsort(descending=True)[: round(self.o["tau"] * len(mask))]] = True
        return mask.view_as(after)

    def aggregate(self, t, trained):
        before = {c: self.receive(c, t) for c in trained}
        self.server = self.mean(trained)
        for c, p in trained.items():
            self.masks[c] = {n: self.critical(before[c][n], p[n]) for n in ALL}
        flat = {c: torch.cat([self.masks[c][n].flatten() for n in ALL]) for c in trained}
        overlap = {
            (i, j): 1 - float((flat[i] ^ flat[j]).sum() / (2 * flat[i].sum())) for i in flat for j in flat if i != j
        }
        mean, most = np.mean(list(overlap.values())), max(overlap.values())
        threshold = mean + t / self.o["beta"] * (most - mean)
        for i in trained:
            near = [j for j in trained if j == i or overlap[i, j] >= threshold]
            self.groups[i] = {n: sum(trained[j][n] for j in near) / len(near) for n in ALL}


class FedUV(FedAvg):
    def loss(self, c, p, x, y):
        f = features(p, x)
        z = head(p, f)
        spread = torch.relu(CLASSES**-0.5 - torch.softmax(z, 1).std(0)).mean()
        apart = torch.stack([((a - b) ** 2).sum() for a, b in combinations(f, 2)])
        median = apart[apart > 0].median()
        return F.cross_entropy(z, y) + self.o["mu"] * spread + self.o["lambda"] * torch.exp(-apart / median).mean()

    def keep(self, c, p):
        self.own[c] = p

    def receive(self, c, t):
        return self.server

    def tested(self, t, trained):
        return {c: self.own[c] for c in self.seen}


class FedFomo(Keeper):
    shared = ()

    def begin(self):
        self.reference, self.starts = dict.fromkeys(CLIENTS, cut(self.run.initial, ALL)), {}

    def held_out_loss(self, c, p):
        return self.loss(c, p, *self.run.part(self.run.shards[c].holdout)).item()

    def receive(self, c, t):
        base, gains = self.reference[c], {}
        for j in {*self.seen, c}:
            apart = float(distance(self.own[j], base)) ** 0.5
            gain = self.held_out_loss(c, base) - self.held_out_loss(c, self.own[j])
            gains[j] = max(0, gain / apart) if apart else 0
        if not any(gains.values()):
            return base
        return {
            n: base[n] + sum(g / sum(gains.values()) * (self.own[j][n] - base[n]) for j, g in gains.items())
            for n in ALL
        }

    def train(self, c, t):
        self.starts[c] = self.receive(c, t)
        return self.sgd(c, self.starts[c], ALL, self.run.batches(c, t))

    def keep(self, c, p):
        super().keep(c, p)
        self.reference[c] = self.starts[c]

    def aggregate(self, t, trained): ...


class FedAMP(Keeper):
    shared = ()

    def begin(self):
        self.clouds = dict.fromkeys(CLIENTS, cut(self.run.initial, ALL))

    def receive(self, c, t):
        return self.clouds[c]

    def loss(self, c, p, x, y):
        pull = distance(p, self.clouds[c])
        return super().loss(c, p, x, y) + self.o["lambda"] / (2 * self.o["alpha"]) * pull

    def train(self, c, t):
        return self.sgd(c, self.own[c], ALL, self.run.batches(c, t))

    def aggregate(self, t, trained):
        alpha, sigma = self.o["alpha"], self.o["sigma"]
        for i in self.seen:
            slope = {
                j: np.exp(-float(distance(self.own[i], self.own[j])) / sigma) / sigma for j in self.seen if j != i
            }
            total = max(1.0, alpha * sum(slope.values()))
            weights = {j: alpha * a / total for j, a in slope.items()}
            weights[i] = 1 - sum(weights.values())
            self.clouds[i] = {n: sum(a * self.own[j][n] for j, a in weights.items()) for n in ALL}


class IFCA(FedAvg):
    def begin(self):
        self.centres = [cut(self.run.fresh(i), ALL) for i in range(self.o["k"])]

    def choice(self, c):
        return int(np.argmin([self.loss(c, p, *self.data(c)).item() for p in self.centres]))

    def receive(self, c, t):
        return self.centres[self.choice(c)]

    def aggregate(self, t, trained):
        chosen = {c: self.choice(c) for c in trained}
        for i in {*chosen.values()}:
            self.centres[i] = self.mean({c: p for c, p in trained.items() if chosen[c] == i})


class CFL(FedAvg):
    def begin(self):
        self.cluster, self.models = dict.fromkeys(CLIENTS, 0), [self.server]

    def receive(self, c, t):
        return self.models[self.cluster[c]]

    def aggregate(self, t, trained):
        for number, model in enumerate(list(self.models)):
            here = [c for c in trained if self.cluster[c] == number]
            steps = [torch.cat([(trained[c][n] - model[n]).flatten() for n in ALL]) for c in here]
            if len(here) > 2 and t > self.o["warm_up"] and torch.stack(steps).mean(0).norm() < self.o["eps1"]:
                cosines = np.array([[float(unit(a) @ unit(b)) for b in steps] for a in steps])
                halves = AgglomerativeClustering(2, metric="precomputed", linkage="complete").fit_predict(1 - cosines)
                for c, half in zip(here, halves, strict=True):
                    self.cluster[c] = number if half == halves[0] else len(self.models)
                self.models.append(model)
        for number in {self.cluster[c] for c in trained}:
            self.models[number] = self.mean({c: p for c, p in trained.items() if self.cluster[c] == number})


class FedNH(FedAvg):
    shared = (*BODY, "output.scale")

    def begin(self):
        self.server["P"] = self.run.initial["output.weight"]

    def answer(self, c, p, x):
        return p["output.scale"] * unit(features(p, x)) @ p["P"].T

    def aggregate(self, t, trained):
        sent = {c: {k: unit(v) for k, v in self.class_means(c, p, unit).items()} for c, p in trained.items()}
        rho, rows = self.o["rho"], self.server["P"].clone()
        for k, v in self.over_owners(sent).items():
            rows[k] = unit(rho * rows[k] + (1 - rho) * unit(v))
        self.server = self.mean(trained, dict.fromkeys(trained, 1)) | {"P": rows}


class CwFedAvg(FedAvg):
    def begin(self):
        self.said, self.classes = dict.fromkeys(CLIENTS, torch.full((CLASSES,), 1 / CLASSES)), []

    def read(self, p):
        norms = p["output.weight"].norm(dim=1)
        return norms / norms.sum()

    def loss(self, c, p, x, y):
        return super().loss(c, p, x, y) + self.o["wdr"] * (self.counts(c) / self.weight(c) - self.read(p)).norm()

    def receive(self, c, t):
        if not self.classes:
            return self.server
        rows = zip(self.said[c], self.classes, strict=True)
        return self.server | self.mean(dict(enumerate(self.classes)), dict(enumerate(s for s, _ in rows)), HEAD)

    def aggregate(self, t, trained):
        self.server = self.mean(trained)
        for c, p in trained.items():
            self.said[c] = self.read(p)
        self.classes = [
            self.mean(trained, {c: self.weight(c) * self.said[c][k] for c in trained}) for k in range(CLASSES)
        ]


class Programme(CwFedAvg):
    def begin(self):
        super().begin()
        self.last, self.rows = {}, {}

    def receive(self, c, t):
        if not self.last:
            return self.server
        apart = [(self.said[c] - row).double().numpy() for row in self.rows.values()]
        total = sum(self.weight(j) for j in self.last)
        spread = np.diag([self.o["rho"] * total / self.weight(j) for j in self.last])
        a = least(np.array([[p @ q for q in apart] for p in apart]) + spread)
        return self.server | self.mean(self.last, dict(zip(self.last, a, strict=True)), HEAD)

    def aggregate(self, t, trained):
        super().aggregate(t, trained)
        self.last, self.rows = trained, {c: self.said[c] for c in trained}


class Scaffold(FedAvg):
    def begin(self):
        self.c = {n: torch.zeros_like(w) for n, w in self.server.items()}
        self.of = dict.fromkeys(CLIENTS, self.c)

    def train(self, c, t):
        received = p = self.receive(c, t)
        plan = self.run.batches(c, t)
        for x, y in plan:
            found = gradients(p, ALL, lambda q, x=x, y=y: self.loss(c, q, x, y))
            p = {n: p[n] - LR * (g - self.of[c][n] + self.c[n]) for n, g in found.items()}
        moved = LR * len(plan)
        self.of[c] = {n: self.of[c][n] - self.c[n] + (received[n] - p[n]) / moved for n in ALL}
        return p

    def aggregate(self, t, trained):
        super().aggregate(t, trained)
        known = [self.weight(c) for c in self.seen]
        total = len(CLIENTS) * sum(known) / len(known)
        self.c = {n: sum(self.weight(c) * self.of[c][n] for c in self.seen) / total for n in ALL}


class Moon(FedAvg):
    def begin(self):
        self.last = dict.fromkeys(CLIENTS, self.run.initial)

    def train(self, c, t):
        received, last = self.receive(c, t), self.last[c]

        def loss(c, q, x, y):
            z = unit(features(q, x))
            near, far = ((z * unit(features(p, x))).sum(1) / self.o["temperature"] for p in (received, last))
            contrast = -(near.exp() / (near.exp() + far.exp())).log().mean()
            return self.loss(c, q, x, y) + self.o["mu"] * contrast

        self.last[c] = self.sgd(c, received, ALL, self.run.batches(c, t), loss=loss)
        return self.last[c]


class Momentum(FedAvg):
    def begin(self):
        self.m = {n: torch.zeros_like(w) for n, w in self.server.items()}

    def aggregate(self, t, trained):
        before, after = self.server, self.mean(trained)
        self.m = {n: 0.5 * self.m[n] + after[n] - before[n] for n in ALL}
        self.server = {n: before[n] + self.m[n] for n in ALL}


class Yogi(FedAvg):
    def begin(self):
        self.m = {n: torch.zeros_like(w) for n, w in self.server.items()}
        self.v = {n: torch.full_like(w, 1e-6) for n, w in self.server.items()}

    def aggregate(self, t, trained):
        before, after = self.server, self.mean(trained)
        for n in ALL:
            d = after[n] - before[n]
            self.m[n] = 0.9 * self.m[n] + 0.1 * d
            self.v[n] = self.v[n] - 0.01 * d**2 * (self.v[n] - d**2).sign()
        self.server = {n: before[n] + 0.01 * self.m[n] / (self.v[n].sqrt() + 1e-3) for n in ALL}


class Plugged(FedAvg):
    """FedAvg with balanced, offset, owners and tune."""

    kept = ("o",)

    def first(self):
        return {"o": torch.zeros(CLASSES)}

    def prior(self, c):
        counts = self.counts(c) + self.o["prior_eps"]
        return self.o["prior_tau"] * (counts / counts.sum()).log()

    def answer(self, c, p, x):
        return head(p, features(p, x)) + p["o"] + self.prior(c)

    def receive(self, c, t):
        plan = self.run.batches(c, t, "receipt", epochs=1)
        return self.sgd(c, self.server | self.own[c], (*HEAD, "o"), plan)

    def aggregate(self, t, trained):
        before, self.server = self.server, self.mean(trained)
        for k in range(CLASSES):
            lengths = {c: (p["output.weight"] - before["output.weight"])[k].norm() for c, p in trained.items()}
            for n, rows in self.mean(trained, lengths, HEAD).items():
                self.server[n][k] = rows[k]


SPLITS = ("algorithm.warm_up=1", "algorithm.eps1=9", "algorithm.eps2=0.01")
TWINS = [
    ("fedrep", FedRep, ()), ("per-fedavg", PerFedAvg, ()), ("fedrod", FedRoD, ()), ("fedproto", FedProto, ("algorithm.predict=head",)),
    ("fedpac", FedPAC, ()), ("fedala", FedALA, ("train.rounds=5", "algorithm.most_epochs=12")), ("fedcp", FedCP, ()), ("gpfl", GPFL, ("algorithm.lambda=0.1",)),
    ("feddbe", FedDBE, ()), ("fedas", FedAS, ()), ("fedcac", FedCAC, ("algorithm.beta=3", "train.rounds=5")), ("feduv", FedUV, ()), ("fedfomo", FedFomo, ()),
    ("fedamp", FedAMP, ()), ("ifca", IFCA, ()), ("cfl", CFL, SPLITS), ("fednh", FedNH, ()), ("cwfedavg", CwFedAvg, ()), ("cwfedavg+programme", Programme, ()),
    ("scaffold", Scaffold, ()), ("moon", Moon, ()), ("fedavg+fedopt", Momentum, ("algorithm.server_momentum=0.5",)),
    ("fedavg+fedopt", Yogi, ("algorithm.server=yogi", "algorithm.server_lr=0.01")), ("fedavg+balanced+offset+owners+tune", Plugged, ("algorithm.owners=updates",)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "settings"), TWINS, ids=[kind.__name__ for _, kind, _ in TWINS])
def test_every_client_s_models_are_those_of_the_twin(name, kind, settings):
    run = Run(f"algorithm.name={name}", *settings)
    twin, compared = kind(run), 0
    with one_compute_thread():
        for event, received, trained in twin.rounds():
            for phase, models in (("received", received), ("trained", trained)):
                for c, found in enumerate(getattr(event, phase).client_metrics["loss"]):
                    x, y = run.part(run.shards[c].test)
                    mine = F.cross_entropy(twin.answer(c, models[c], x), y).item()
                    assert found == pytest.approx(mine, abs=1e-5), f"client {c}, {phase}, round {event.round}"
                    compared += 1
    assert compared == 2 * 4 * len(run.events)
    assert any(len(event.participants) < 4 for event in run.events)
