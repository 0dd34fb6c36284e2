"""The tables and figures of the paper: `paper/` describes them, the modules here run and judge them."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from cwfed.core.errors import CwfedError
from cwfed.reproduce import protocol
from cwfed.reproduce.outcome import Outcome
from cwfed.reproduce.runner import Estimate, Job, Workshop, estimate
from cwfed.reproduce.spec import SCALES, Item, Scale, Setup, find, items, ran
from cwfed.runs import archive
from cwfed.runs.folder import RunFolder

__all__ = [
    "SCALES",
    "Estimate",
    "Item",
    "Job",
    "Outcome",
    "Scale",
    "Workshop",
    "estimate",
    "find",
    "items",
    "judge",
    "write_overview",
]

EXACT = ("memory", "hyperparameters", "pathways", "aggregation")
"""Kinds that are the same at every scale."""


def judge(item: Item, workshop: Workshop) -> Outcome:
    """A table or figure from its finished runs; RunError with the command that makes them if some are missing."""
    from cwfed.reproduce import paper_tables, pictures

    workshop.require(item)
    outcome = (paper_tables.KINDS | pictures.KINDS)[item.kind](item, workshop)
    jobs = [job for job in workshop.jobs(item) if job.state == "finished"]
    outcome.notes += protocol.notes([job.config for job in jobs])
    if item.kind not in EXACT:
        setups = workshop.setups(item)
        outcome.notes += protocol.reduced(setups) if jobs else []
        _name_what_ran(outcome, setups)
        if workshop.scale == "smoke":
            _say_nothing(outcome)
    outcome.runs = [job.place.relative_to(workshop.folder) for job in jobs]
    outcome.command = workshop.command(item)
    return outcome


def _name_what_ran(outcome: Outcome, setups: list[Setup]) -> None:
    """Name the data in headings if other data replace the paper's."""
    if used := sorted({ran(setup.config) for setup in setups if setup.stand_in}):
        outcome.title = f"{outcome.title}; run on {', '.join(used)}, not on the paper's data"


def _say_nothing(outcome: Outcome) -> None:
    """A few rounds on digits neither agree nor disagree with anything."""
    outcome.rows = [
        (label, [replace(cell, verdict="", against=(), undecided=(), kept=0) for cell in cells])
        for label, cells in outcome.rows
    ]
    outcome.pairs = None
    detail = "this scale only shows that everything runs"
    outcome.claims = [replace(claim, holds=None, detail=detail) for claim in outcome.claims]


def write_overview(workshop: Workshop) -> None:
    """Write one document with all results of a scale that exist, in the paper's order, and where their numbers come from."""
    folder = workshop.folder / "results"
    names = [name for name in items() if (folder / f"{name}.md").exists()]
    text = "\n".join((folder / f"{name}.md").read_text(encoding="utf-8") for name in names)
    title = f"# Reproduced at scale {workshop.scale}: ours (the paper's)"
    (folder / "README.md").write_text(f"{title}\n\n{text}", encoding="utf-8")
    used = {
        run for name in names for run in json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["runs"]
    }
    origins = {run: _origin(workshop.folder / run, _changed(workshop.folder / run)) for run in sorted(used)}
    (folder / "runs.json").write_text(json.dumps(origins, indent=1) + "\n", encoding="utf-8")


def _changed(run: Path) -> int:
    """A number that differs when the run has been made again."""
    summary = run if archive.is_archive(run) else run / "summary.json"
    return summary.stat().st_mtime_ns if summary.exists() else 0


@cache
def _origin(path: Path, changed: int) -> dict[str, Any]:
    """A run's settings, hashes, versions, machine and result: its manifest without the long lists.

    The overview is written after every table, of the same runs again: each is read once.
    """
    try:
        with archive.readable(path) as readable:
            folder = RunFolder(readable)
            manifest = folder.read_json("manifest.json", "data", "split")
            reported = folder.read_json("summary.json", "reported")["reported"]
            hashes = {what: manifest[what]["digest"] for what in ("data", "split")}
            config = folder.config().model_dump()
    except CwfedError as error:  # removed or damaged since it was used
        return {"unreadable": str(error)}
    short = {key: value for key, value in manifest.items() if key not in ("data", "split")}
    return short | {"digests": hashes, "config": config, "reported": reported}
