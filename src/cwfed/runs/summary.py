"""A run in numbers: a pure function of its events. Both phases and all three pickings, always."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cwfed.core import metrics
from cwfed.core.errors import RunError
from cwfed.core.events import Event, Newcomers, Note, PhaseResult, Round, Spent, Started
from cwfed.core.types import PHASES, Phase

PICKINGS = ("best", "validated", "last")

Picks = dict[str, tuple[int, PhaseResult] | None]


def pick(rounds: Sequence[Round], phase: Phase, started: Started) -> Picks:
    """The round and result that each picking chooses, by the metric of the run; the first one where several are equal."""
    name, worth = started.pick, started.worth
    results = [(r.round, getattr(r, phase)) for r in rounds if getattr(r, phase) is not None]
    if not results:
        return {"best": None, "validated": None, "last": None}
    validated = [found for found in results if found[1].held_out(name) is not None]
    return {
        "best": max(results, key=lambda found: worth(found[1].value(name))),
        "validated": max(validated, key=lambda found: worth(found[1].held_out(name))) if validated else None,
        "last": results[-1],
    }


def summarise(events: Sequence[Event]) -> dict[str, Any]:
    """What `summary.json` says."""
    started = next((e for e in events if isinstance(e, Started)), None)
    rounds = [e for e in events if isinstance(e, Round)]
    if started is None or not rounds:
        raise RunError("the run has no finished round to summarise")
    picks = {phase: pick(rounds, phase, started) for phase in PHASES}
    best = picks[started.phase]["best"]
    if best is None:
        raise RunError("the run has no evaluated round to summarise")
    joined = next((e for e in reversed(events) if isinstance(e, Newcomers)), None)
    seconds: Counter[str] = Counter()
    for r in rounds:
        seconds.update(r.seconds)
    refused = Counter(client for r in rounds for client in r.refused)
    skipped = [r.round for r in rounds if r.refused and r.skipped]
    spent = rounds[-1].spent
    return ({"privacy": _spent(spent)} if spent else {}) | {
        "algorithm": started.algorithm,
        "dataset": started.dataset,
        "seed": started.seed,
        "rounds": rounds[-1].round,
        "clients": started.clients,
        "parameters": started.parameters,
        "accuracy": {
            phase: {name: found and found[1].accuracy for name, found in picks[phase].items()} for phase in PHASES
        },
        "picked_rounds": {
            phase: {name: found and found[0] for name, found in picks[phase].items()} for phase in PHASES
        },
        "reported": {
            "accuracy": best[1].accuracy,
            "phase": started.phase,
            "picking": "best",
            "round": best[0],
            **({"metric": started.pick, "value": best[1].value(started.pick)} if started.pick != "accuracy" else {}),
        },
        "per_client": per_client(best[1], started),
        **_metrics(picks, best[1]),
        "newcomers": joined and {"clients": joined.clients, "histogram": joined.histogram, "uniform": joined.uniform},
        "correlation": rounds[-1].correlation,
        "loss": rounds[-1].loss,
        "traffic": {"down": sum(r.down for r in rounds), "up": sum(r.up for r in rounds)},
        "seconds": {**{k: round(v, 3) for k, v in seconds.items()}, "total": round(sum(seconds.values()), 3)},
        "notes": [e.message for e in events if isinstance(e, Note)],
        **({"stopped": rounds[-1].stopped} if rounds[-1].stopped else {}),  # before all rounds were done, and why
        **({"refused": dict(refused)} if refused else {}),  # updates of each client that the guard left out
        **({"skipped": skipped} if skipped else {}),  # rounds that too few good updates were left for
    }


def _metrics(picks: Mapping[Phase, Picks], best: PhaseResult) -> dict[str, Any]:
    """All metrics beside the accuracy, and each class in the round that is reported; runs of earlier versions have none."""
    found: dict[str, Any] = {}
    if best.metrics:
        found["metrics"] = {
            phase: {
                metric: {name: one and one[1].value(metric) for name, one in picks[phase].items()}
                for metric in (*best.metrics, "loss")
            }
            for phase in PHASES
        }
    if best.classes:
        table = best.classes.table()
        kinds = {
            "recall": metrics.recall,
            "precision": metrics.precision,
            "f1": metrics.f1,
            "loss": metrics.class_loss,
        }
        found["per_class"] = {"samples": best.classes.samples} | {
            name: [metrics.finite(value) for value in kind(table).tolist()] for name, kind in kinds.items()
        }
    return found


def _spent(spent: Spent) -> dict[str, Any]:
    """The largest epsilon of any client, which is the guarantee; None is without bound."""
    known = [e for e in spent.epsilon.values() if e is not None]
    return {
        "epsilon": max(known) if len(known) == len(spent.epsilon) and known else None,
        "delta": spent.delta,
        "histogram_epsilon": spent.histogram,
        "per_client": spent.epsilon,
        **({"known": spent.known} if spent.known else {}),
    }


def per_client(result: PhaseResult, started: Started) -> dict[str, Any]:
    """Every client counts the same: mean, standard deviation, and the mean of the worst tenth."""
    clients = started.evaluated if result.clients is None else result.clients
    samples = started.test_samples if result.samples is None else result.samples
    pairs = [(c, r / n) for c, r, n in zip(clients, result.right, samples, strict=True) if n]
    others = {
        name: {str(c): value for c, value in zip(clients, values, strict=True) if value is not None}
        for name, values in result.client_metrics.items()
    }
    return {
        **_over_clients([accuracy for _, accuracy in pairs]),
        "accuracies": {str(client): accuracy for client, accuracy in pairs},
        **(
            {"metrics": {name: _of_clients(name, values, started) for name, values in others.items()}}
            if others
            else {}
        ),
    }


def _of_clients(name: str, values: dict[str, float], started: Started) -> dict[str, Any]:
    known = list(values.values())
    over = (
        _over_clients(known, name in started.lower_is_better)
        if known
        else dict.fromkeys(("mean", "std", "worst_decile"))
    )
    return {**over, "values": values}


def _over_clients(values: Sequence[float], lower_is_better: bool = False) -> dict[str, float]:
    ordered = np.sort(values)
    count = max(1, len(values) // 10)
    tenth = ordered[-count:] if lower_is_better else ordered[:count]
    return {"mean": float(ordered.mean()), "std": float(ordered.std()), "worst_decile": float(tenth.mean())}


def aggregate(label: str, summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over seeds of everything the table shows, and all notes of the runs."""
    reported = summaries[0]["reported"]
    others = [s.get("metrics", {}).get(reported["phase"], {}) for s in summaries]
    return {
        "label": label,
        "algorithm": summaries[0]["algorithm"],
        "accuracy": {
            phase: {name: spread([s["accuracy"][phase][name] for s in summaries]) for name in PICKINGS}
            for phase in PHASES
        },
        "reported": {
            "phase": reported["phase"],
            "picking": reported["picking"],
            **spread([s["reported"]["accuracy"] for s in summaries]),
        },
        "pick": reported.get("metric", "accuracy"),
        "metrics": {  # of the reported phase, in its best round
            name: spread([found[name]["best"] for found in others])
            for name in others[0]
            if all(name in found for found in others)
        },
        "worst_decile": spread([s["per_client"]["worst_decile"] for s in summaries]),
        "correlation": spread([s["correlation"] for s in summaries]),
        "traffic": spread([s["traffic"]["down"] + s["traffic"]["up"] for s in summaries]),
        "seconds": spread([s["seconds"]["total"] for s in summaries]),
        "memory": spread([s.get("peak_memory_bytes") for s in summaries]),
        "notes": list(dict.fromkeys(note for s in summaries for note in s.get("notes", []))),
    }


def spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean and sample standard deviation; the latter needs two values."""
    known = [v for v in values if v is not None]
    if len(known) < len(values) or not known:
        return {"mean": None, "std": None}
    return {"mean": float(np.mean(known)), "std": float(np.std(known, ddof=1)) if len(known) > 1 else None}
