"""One HTML page for a comparison: self-contained, works offline, nothing but what the run folders say."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from cwfed.report import tables
from cwfed.report.runs import RunRecord
from cwfed.report.style import COLOURS, DASHES
from cwfed.types import PHASES

STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #ffffff; --line: #d0d0d0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #16181c; --line: #444; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.scroll { overflow-x: auto; } .quiet { opacity: .75; font-size: .9em; } h2 { margin-top: 2.5rem; }
"""


def write(path: Path, title: str, rows: Sequence[dict[str, Any]], records: Sequence[RunRecord]) -> None:
    """The page of a comparison: its table, curves, per-client accuracies, data and settings."""
    figures = [
        ("Accuracy over the rounds", _curves(records)),
        ("Each client", _clients(records)),
        ("Who holds what", _distribution(records[0])),
        ("Class distributions read from the weights", _correlation(records)),
    ]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<div class="scroll">{_table(rows)}</div><p class="quiet">{escape(tables.EXPLANATION)}</p>',
    ]
    for i, (heading, figure) in enumerate(figures):
        body = figure.to_html(full_html=False, include_plotlyjs=i == 0, config={"displaylogo": False})
        parts.append(f"<h2>{escape(heading)}</h2>{body}")
    parts.append(f"<h2>How it was made</h2>{_origin(records)}")
    path.write_text(
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style><body>{''.join(parts)}</body></html>",
        encoding="utf-8",
    )


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in tables.HEADER)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in tables.cells(row)) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _layout(figure: go.Figure, x: str, y: str) -> go.Figure:
    """Transparent, with greys that can be read on white and on black."""
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font_color="#808080",
        margin={"l": 60, "r": 20, "t": 20, "b": 50},
        height=420,
        legend={"orientation": "h", "y": -0.2},
    )
    figure.update_xaxes(title=x, gridcolor="rgba(128,128,128,.25)", zeroline=False)
    figure.update_yaxes(title=y, gridcolor="rgba(128,128,128,.25)", zeroline=False)
    return figure


def _curves(records: Sequence[RunRecord]) -> go.Figure:
    figure = go.Figure()
    for i, record in enumerate(records):
        for phase in PHASES:
            rounds, accuracies = record.curve(phase)
            reported = phase == record.started.phase
            figure.add_scatter(
                x=rounds,
                y=[100 * a for a in accuracies],
                name=escape(f"{record.label} ({phase})"),
                mode="lines",
                line={"color": COLOURS[i % len(COLOURS)], "dash": "solid" if reported else "dot"},
                visible=True if reported else "legendonly",
            )
    return _layout(figure, "round", "test accuracy, %")


def _clients(records: Sequence[RunRecord]) -> go.Figure:
    figure = go.Figure()
    for i, record in enumerate(records):
        accuracies = record.summary["per_client"]["accuracies"]
        figure.add_scatter(
            x=[int(c) for c in accuracies],
            y=[100 * a for a in accuracies.values()],
            name=escape(record.label),
            mode="markers",
            marker={"color": COLOURS[i % len(COLOURS)], "symbol": i, "size": 9},
        )
    return _layout(figure, "client", "test accuracy, %")


def _distribution(record: RunRecord) -> go.Figure:
    histogram = record.manifest["split"]["histogram"]
    names = [escape(str(name)) for name in record.manifest["data"]["classes"]]
    figure = go.Figure(
        go.Heatmap(
            z=histogram, x=names, colorscale="Blues", hovertemplate="client %{y}, class %{x}: %{z}<extra></extra>"
        )
    )
    figure = _layout(figure, "class", "client")
    figure.update_xaxes(type="category")
    figure.update_yaxes(autorange="reversed")
    return figure


def _correlation(records: Sequence[RunRecord]) -> go.Figure:
    figure = go.Figure()
    for i, record in enumerate(records):
        found = [(r.round, r.correlation) for r in record.rounds if r.correlation is not None]
        figure.add_scatter(
            x=[number for number, _ in found],
            y=[value for _, value in found],
            name=escape(record.label),
            mode="lines",
            line={"color": COLOURS[i % len(COLOURS)], "dash": DASHES[i % len(DASHES)]},
        )
    return _layout(figure, "round", "correlation of p~ with p")


def _origin(records: Sequence[RunRecord]) -> str:
    first = records[0].manifest
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    folders = "".join(f"<li>{escape(r.label)}: <code>{escape(str(r.path))}/config.toml</code></li>" for r in records)
    return (
        f"<p>{escape(versions)}; {escape(first['machine']['cpu'])} "
        f"({escape(first['machine']['instruction_set'])}). Data {escape(first['data']['digest'][:12])}, "
        f"split {escape(first['split']['digest'][:12])}. The settings of each run, to run it again:</p><ul>{folders}</ul>"
    )
