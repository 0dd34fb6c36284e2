"""The paper's tables: one function a kind, from a spec and its runs to an outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cwfed import algorithms, cost, summary
from cwfed.models import InputShape
from cwfed.report.runs import RunRecord
from cwfed.reproduce.outcome import Outcome
from cwfed.reproduce.runner import Workshop
from cwfed.reproduce.spec import Item, Row, Setup
from cwfed.reproduce.verdict import Cell, Claim, Pairs, Value, judge, leader_claims, order_claim, parse


def accuracy(item: Item, workshop: Workshop) -> Outcome:
    """Methods x settings: best round on test, of the phase on which each method is reported (the paper's protocol)."""
    setups = [Setup(name, workshop.scale) for name in item.settings]
    labels = [row.label for row in item.rows]
    records = [[workshop.records(setup, row) for row in item.rows] for setup in setups]
    ours = [
        [spread([100 * r.summary["reported"]["accuracy"] for r in runs]) for runs in column] for column in records
    ]
    published = [[parse(row.published[i]) for row in item.rows] for i in range(len(setups))]

    pairs = Pairs()
    columns = [
        judge(labels, here, there, pairs, setup.title)
        for here, there, setup in zip(ours, published, setups, strict=True)
    ]
    result = Outcome(item, workshop.scale, columns=[setup.title for setup in setups])
    result.rows = [(label, [column[i] for column in columns]) for i, label in enumerate(labels)]
    result.claims = [order_claim(pairs)]
    if item.leader:
        result.claims += leader_claims(item.leader, labels, result.columns, ours, published)
    if any(row.models_sent for row in item.rows):
        _add_models_sent(result, setups[0], item.rows, records[0])
    return result


def _add_models_sent(
    result: Outcome, setup: Setup, rows: Sequence[Row], records: Sequence[Sequence[RunRecord]]
) -> None:
    """A column with what a participant downloads and uploads in a round, in models, counted from the bytes sent."""
    cells = []
    for row, runs in zip(rows, records, strict=True):
        symbols = {"M": setup.config.data.clients, "C": setup.entry(row).settings.get("k", 0)}
        there = float(sum(symbols[part] if part in symbols else int(part) for part in row.models_sent.split("+")))
        here = spread([models_sent(run) for run in runs])
        # a round in which others' models do not exist yet sends fewer
        same = abs(here.mean - there) <= 0.05 * there
        cells.append(Cell(here, Value(there), "same" if same else "differs"))
    title = f"models sent ({setup.title})"
    result.columns.append(title)
    result.rows = [(label, [*row, cell]) for (label, row), cell in zip(result.rows, cells, strict=True)]
    wrong = [label for (label, _), cell in zip(result.rows, cells, strict=True) if cell.verdict == "differs"]
    detail = f"not: {', '.join(wrong)}" if wrong else "measured from the bytes of every round, within 5 %"
    result.claims.append(
        Claim("communication is the paper's formula: 2, FedFomo 1 + M, IFCA 1 + C", not wrong, detail)
    )


def models_sent(run: RunRecord) -> float:
    """Models that a participant downloads and uploads in a round, on average."""
    visits = sum(len(r.participants) + len(r.dropped) for r in run.rounds)
    return sum(r.down + r.up for r in run.rounds) / (visits * 4 * run.started.parameters)


def memory(item: Item, workshop: Workshop) -> Outcome:
    """Numbers the server stores, counted from the model's shapes; nothing is run."""
    options = item.options
    shape, clients = InputShape(tuple(options["shape"])), options["clients"]
    result = Outcome(item, workshop.scale, columns=[f"{k} classes" for k in options["classes"]])
    by_method: dict[str, list[float]] = {}
    for classes in options["classes"]:
        for row in cost.costs(options["model"], shape, classes, clients, clients, {}):
            by_method.setdefault(row.method, []).append(row.server / 1e6)
    agrees = True
    for method, published in options["published"].items():
        cells = []
        for ours, there in zip(by_method[method], map(parse, published), strict=True):
            same = abs(ours - there.mean) <= 0.005 + 2e-4 * there.mean
            agrees &= same
            cells.append(Cell(Value(ours), there, "same" if same else "differs"))
        result.rows.append((method, cells))
    for method in ("cwfedavg (all), lean", "cwfedavg (output), lean"):
        result.rows.append((method, [Cell(Value(value)) for value in by_method[method]]))
    result.claims = [
        Claim("the numbers are the paper's", agrees, "to the printed digit, or within 0.02 % (see the note)"),
        Claim(
            "class-wise averaging of the output layer costs little",
            by_method["cwfedavg (output), as published"][0] < 1.01 * by_method["fedavg"][0],
            "10 classes: less than 1 % above FedAvg",
        ),
    ]
    result.notes = [
        "Four published numbers are up to 0.01 % smaller than the parameters of ResNet-18 give (111.82, 1122.78, "
        "11689.51, 524.69): about 1,090 numbers a model are missing in the column for all layers.",
        f"Lean: what this library stores, with {clients} participants (the smaller of K class models and the "
        "participants' models, and K numbers a client).",
    ]
    return result


def hyperparameters(item: Item, workshop: Workshop) -> Outcome:
    """The settings of the scale `paper`, beside the published ones."""
    setups = [Setup(name, "paper") for name in item.settings]
    result = Outcome(item, workshop.scale, columns=[setup.title for setup in setups], digits=None)
    wrong = []
    for name, values in item.options["values"].items():
        used = [
            algorithms.describe(algorithms.build(s.entry(Row(label="", algorithm={"name": name})).settings), name)
            for s in setups
        ]
        for key, published in values.items():
            there = published if isinstance(published, list) else [published] * len(setups)
            cells = [_setting(float(u[key]), t) for u, t in zip(used, there, strict=True)]
            wrong += [f"{name}.{key}" for cell in cells if cell.verdict == "differs"]
            result.rows.append((f"{name}: {key}", cells))
    result.claims = [Claim("the settings are the paper's", not wrong, ", ".join(wrong))]
    result.notes = [
        "wdr is the coefficient of the equation; the paper's lambda (10, 10, 1000, 2000) is twice that, because its "
        "code multiplies the regulariser by half of lambda.",
        "These are the settings of the scale paper; the others change the coefficient (settings.toml says where).",
    ]
    return result


def _setting(ours: float, published: float | str) -> Cell:
    """A hyper-parameter beside the paper's; nothing beside it where the paper is silent."""
    if published == "":
        return Cell(Value(ours))
    return Cell(Value(ours), Value(float(published)), "same" if ours == float(published) else "differs")


def spread(values: Sequence[float]) -> Value:
    """Mean and sample standard deviation; the latter needs two values."""
    found = summary.spread(values)
    assert found["mean"] is not None
    return Value(found["mean"], found["std"])


KINDS: dict[str, Callable[[Item, Workshop], Outcome]] = {
    "accuracy": accuracy,
    "memory": memory,
    "hyperparameters": hyperparameters,
}
