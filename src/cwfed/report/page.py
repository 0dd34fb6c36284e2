"""One HTML page for any runs: self-contained, works offline, made from run folders only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from plotly.offline import get_plotlyjs

from cwfed.core.metrics import words
from cwfed.report import tables
from cwfed.report.finished import MEANINGS, UNITS, LeftOut
from cwfed.report.groups import APART, Group
from cwfed.report.page_data import page_data

NORMS = {
    "received": "on receipt",
    "trained": "after local training",
    "difference": "the change by local training",
    "classes": "class models",
}


def write(
    path: Path,
    title: str,
    groups: Sequence[Group],
    left_out: Sequence[LeftOut] = (),
    opening: str = "",
    apart: str = APART,
) -> None:
    """The page of these experiments; what was left out is named on it. `opening` is HTML that stands before them, `apart` says
    why there are several."""
    assets = resources.files("cwfed.report") / "assets"
    style, script = (assets / name for name in ("page.css", "page.js"))
    body = [f"<h1>{escape(title)}</h1>", _left_out(left_out), opening, _contents(groups, apart)]
    alone = len(groups) == 1 and groups[0].title == title
    body += [_section(i, group, "All methods" if alone else group.title) for i, group in enumerate(groups)]
    path.write_text(
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{style.read_text()}</style></head>'
        f'<body>{"".join(body)}<script id=data type="application/json">{_json(page_data(groups))}</script>'
        f"<script>{get_plotlyjs()}</script><script>{script.read_text()}</script></body></html>",
        encoding="utf-8",
        errors="xmlcharrefreplace",  # half a character, which JSON can hold
    )


def _json(data: Any) -> str:
    """JSON that is safe inside a page: a name from the data cannot end the script around it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _left_out(left_out: Sequence[LeftOut]) -> str:
    if not left_out:
        return ""
    said = [(str(f.path), f.why.removeprefix(f"{f.path} is ")) for f in left_out]  # a path that is said once
    items = "".join(f"<li><code>{escape(path)}</code>: {escape(why)}</li>" for path, why in said)
    return f"<div class=warning id=left-out>Left out of this report:<ul>{items}</ul></div>"


def _contents(groups: Sequence[Group], apart: str) -> str:
    if len(groups) < 2:
        return ""
    links = "".join(f'<li><a href="#experiment-{i}">{escape(g.title)}</a></li>' for i, g in enumerate(groups))
    return f"<nav><p class=quiet>{escape(apart)}</p><ul>{links}</ul></nav>"


def _section(number: int, group: Group, heading: str) -> str:
    labels, rows = [method.label for method in group.methods], [method.row for method in group.methods]
    places = {str(i): labels[i] for i in group.baselines()}
    methods = {str(i): label for i, label in enumerate(labels)}
    best = group.ranked()[0]
    seeds = max(len(method.records) for method in group.methods)
    one_split = group.records[0].config.data.split_seed >= 0
    others = "other seeds train on the same split" if one_split else "other seeds deal the data out otherwise"
    one_seed = f" Seed {group.records[0].started.seed}: {others}." if seeds > 1 else ""
    one_run = f"Of the run with seed {group.records[0].started.seed}; the table has the mean." if seeds > 1 else ""
    apart = [label for i, label in enumerate(labels) if i not in group.aligned()]
    if apart:
        one_seed += f" Not compared client by client, for want of a run on the same split: {', '.join(apart)}."
    one_seed = escape(one_seed)
    parts = [
        f'<section data-group="{number}" id="experiment-{number}"><h2>{escape(heading)}</h2>',
        f"<div class=scroll>{_table(group)}</div><p class=quiet>{escape(tables.explanation(rows))}</p>",
        _notes(group),
        "<h3>Over the rounds</h3><div class=controls>",
        _select("y", "show", MEANINGS | {name: words(name) for name in group.own_metrics()}),
        _select("x", "over", UNITS),
        '</div><div class="plot wide" data-plot=curves></div>',
        f"<h3>Each client</h3><p class=quiet>Best round, the phase that is reported.{one_seed}</p>",
        '<div class="plot wide" data-plot=clients></div>',
        f"<h3>Each class</h3><p class=quiet>Recall over all clients, best round, the phase that is reported. {one_run}</p>",
        '<div class="plot wide" data-plot=classes></div>',
        _classes(group),
        f"<h3>Who gains, who loses</h3><p class=quiet>{one_seed}</p><div class=controls>",
        _select("baseline", "points of accuracy against", places),
        f"</div>{_gains(group)}",
        '<div class="plot wide" data-plot=gains></div>'
        if any(group.gains(base, i) for base in group.baselines() for i in range(len(labels)))
        else "",
        "<h3>Data and models</h3><p class=quiet>The length of an output layer's row for a class, the class distributions "
        "read from the rows the clients sent last, and the shares of the clients' last models in each personal output "
        f"layer.{one_seed}</p><div class=controls>",
        _select("method", "models of", methods, str(best)),
        _select("norms", "output norms", NORMS),
        "</div><div class=plots>",
        *(
            f"<div><p class=caption>{caption}</p><div class=plot data-plot={name}></div></div>"
            for name, caption in (
                ("data", "Who holds what"),
                ("norms", "Output norms"),
                ("spread", "p~ against p"),
                ("mixture", "What each personal model was mixed from"),
            )
        ),
        f"</div><h3>What it cost</h3><p class=quiet>{one_run}</p><div class=plots>",
        "<div><p class=caption>Traffic</p><div class=plot data-plot=traffic></div></div>",
        "<div><p class=caption>Time by step</p><div class=plot data-plot=seconds></div></div></div>",
        f"<h3>Settings that differ</h3>{_differing(group)}",
        f"<h3>How it was made</h3>{_origin(group)}</section>",
    ]
    return "".join(parts)


def _select(name: str, label: str, choices: dict[Any, str], chosen: str = "") -> str:
    options = "".join(
        f'<option value="{escape(str(value))}"{" selected" if value == chosen else ""}>{escape(words)}</option>'
        for value, words in choices.items()
    )
    return f"<label>{escape(label)} <select data-choice={name}>{options}</select></label>"


def _table(group: Group) -> str:
    """The comparison table; a click on a heading sorts by the numbers behind the texts."""
    rows = [method.row for method in group.methods]
    metrics = tables.metrics_of(rows)
    names = ["setting" if group.of_settings else "algorithm", *tables.header(rows)[1:]]
    head = "".join(f"<th scope=col><button>{escape(name)}</button></th>" for name in names)
    ranked = [group.methods[i] for i in group.ranked()]
    best, is_contest = ranked[0].row["reported"]["mean"], len(ranked) > 1
    lines = []
    for method, look in ((group.methods[i], group.looks[i]) for i in group.ranked()):
        label, *texts = tables.cells(method.row, metrics)
        swatch = f'<span class="swatch{" hollow" if look.hollow else ""}" style="color:{look.colour}"></span>'
        cells = [f"<td class=method>{swatch}{escape(label)}</td>"]
        cells += [
            f'<td data-value="{"" if value is None else repr(float(value))}">{escape(text)}</td>'
            for text, value in zip(texts, tables.numbers(method.row, metrics), strict=True)
        ]
        is_best = method is ranked[0] or (group.is_ranked_by_test and method.row["reported"]["mean"] == best)
        mark = " class=best" if is_contest and is_best else ""
        lines.append(f"<tr{mark}>{''.join(cells)}</tr>")
    return f"<table class=sortable><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _notes(group: Group) -> str:
    notes = tables.footnotes([method.row for method in group.methods])
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<div class=warning>Notes of the runs:<ul>{items}</ul></div>"


def _classes(group: Group) -> str:
    """Each class under each method in numbers: recall, precision, F1 and mean loss."""
    kinds = ("recall", "precision", "f1", "loss")
    names = [str(name) for name in group.records[min(group.aligned())].manifest["data"]["classes"]]
    lines = []
    for method, record in zip(group.methods, group.records, strict=True):
        found: dict[str, list[Any]] = record.summary.get("per_class", {})
        for k, name in enumerate(names if found else []):
            values = [found["samples"][k], *(found[kind][k] for kind in kinds)]
            texts = [str(values[0]), *map(tables.shown, ("accuracy", "accuracy", "macro_f1", "loss"), values[1:])]
            cells = "".join(
                f'<td data-value="{"" if value is None else value}">{text}</td>'
                for value, text in zip(values, texts, strict=True)
            )
            lines.append(f"<tr><td>{escape(name)}</td><td>{escape(method.label)}</td>{cells}</tr>")
    if not lines:
        return ""
    columns = ("class", "method", "test samples", "recall", "precision", "F1", "loss")
    head = "".join(f"<th scope=col><button>{name}</button></th>" for name in columns)
    table = f"<table class=sortable><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f"<details><summary>in numbers</summary><div class=scroll>{table}</div></details>"


def _gains(group: Group) -> str:
    """How many clients are better and worse off than under each baseline."""
    lines = []
    for base in group.baselines():
        for other, method in enumerate(group.methods):
            gains = np.array(list(group.gains(base, other).values()))
            if not len(gains):
                continue
            worst = np.sort(gains)[: max(1, len(gains) // 10)].mean()
            numbers = ((gains > 0).sum(), (gains < 0).sum(), gains.mean(), worst)
            cells = "".join(
                f'<td data-value="{value}">{value:+.1f}</td>' if i > 1 else f'<td data-value="{value}">{value}</td>'
                for i, value in enumerate(numbers)
            )
            words = f"{method.label} against {group.methods[base].label}"
            lines.append(f"<tr><td>{escape(words)}</td>{cells}</tr>")
    if not lines:
        return "<p class=quiet>There are no two methods on the same split: nothing to compare.</p>"
    names = ("", "clients that gain", "clients that lose", "mean gain", "worst tenth of the gains")
    head = "".join(f"<th scope=col><button>{name}</button></th>" for name in names)
    table = f"<table class=sortable><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f"<details><summary>in numbers</summary><div class=scroll>{table}</div></details>"


def _differing(group: Group) -> str:
    found = group.differing()
    if not found:
        return "<p class=quiet>None.</p>"
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in ("", *(m.label for m in group.methods)))
    body = "".join(
        f"<tr><td><code>{escape(key)}</code></td>"
        + "".join(f"<td>{'–' if value is None else escape(str(value))}</td>" for value in values)
        + "</tr>"
        for key, values in found.items()
    )
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _origin(group: Group) -> str:
    first = group.records[0].manifest
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    folders = "".join(
        f"<li>{escape(method.label)}, seed {record.started.seed}: <code>{escape(str(record.path))}/config.toml</code></li>"
        for method in group.methods
        for record in method.records
    )
    return (
        f"<p>{escape(versions)}; {escape(first['machine']['cpu'])} ({escape(first['machine']['instruction_set'])}). "
        f"Data {escape(first['data']['digest'][:12])}, split {escape(first['split']['digest'][:12])}.</p>"
        + f"<details><summary>The settings of each run, to run it again</summary><ul>{folders}</ul></details>"
    )
