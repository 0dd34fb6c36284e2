"""The state of a federation, read from its folder and its SuperLink: for its operator, and for monitoring."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from cwfed.core.errors import RunError
from cwfed.core.events import Event, Note, Round, read
from cwfed.flower import keys
from cwfed.flower.programs import answers
from cwfed.flower.service import Server

SOON = 30.0
"""Days before a certificate expires from which on that is a problem."""
SHOWN = 5
"""The number of notes that are shown."""


@dataclass
class Health:
    """What `cwfed flower status` shows."""

    running: bool
    """Whether the SuperLink and the gate answer."""
    wanted: bool
    """Whether a run should be under way."""
    round: int = 0
    """The last round that is done."""
    rounds: int = 0
    at: str = ""
    """When it was done."""
    finished: bool = False
    nodes: dict[str, str] = field(default_factory=dict)
    """By name: online, offline, or registered (never seen)."""
    certificate_days: float = 0.0
    notes: list[str] = field(default_factory=list)
    """The last notes."""
    problems: list[str] = field(default_factory=list)

    def table(self) -> dict[str, Any]:
        """For programs."""
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        is_done = "finished" if self.finished else "under way" if self.wanted else "not started"
        done = f"round {self.round} of {self.rounds} done at {self.at}" if self.round else "no round done yet"
        return [
            f"server: {'running' if self.running else 'not running'}; certificate: {self.certificate_days:.0f} days left",
            f"run: {is_done}; {done}",
            *(f"{name}: {state}" for name, state in self.nodes.items()),
            *self.notes,
            *(f"problem: {problem}" for problem in self.problems),
        ]


def health(server: Server) -> Health:
    """The state of a federation now."""
    settings, path = server.settings, server.run_folder.path / "events.jsonl"
    happened: list[Event] = read(path) if path.exists() else []
    rounds = [event for event in happened if isinstance(event, Round)]
    found = Health(
        running=answers(settings.control) and answers(int(settings.public.rpartition(":")[2])),
        wanted=bool(server.wish()),
        finished=server.run_folder.finished,
        certificate_days=keys.days_left(server.folder / "server.crt"),
        notes=[f"{event.at} {event.message}" for event in happened if isinstance(event, Note)][-SHOWN:],
    )
    if server.run_folder.exists:
        found.rounds = server.run_folder.config().train.rounds
    if rounds:
        found.round, found.at = rounds[-1].round, rounds[-1].at
    if not found.running:
        found.problems.append(f"the server is not running: cwfed flower serve {server.folder}")
    else:
        found.nodes = _nodes(server, found.problems)
    if found.wanted and (away := [name for name, state in found.nodes.items() if state != "online"]):
        found.problems.append(f"not connected: {', '.join(away)}")
    if found.certificate_days < SOON:
        found.problems.append(f"the certificate ends in {found.certificate_days:.0f} days: cwfed flower certify")
    if found.wanted and rounds and rounds[-1].skipped:
        found.problems.append(f"round {found.round} changed nothing: {rounds[-1].skipped}")
    return found


def _nodes(server: Server, problems: list[str]) -> dict[str, str]:
    try:
        states = server.node_states()
    except RunError as error:
        problems.append(f"the SuperLink does not say who is connected ({error})")
        return {}
    return {name: states.get(str(known["node"]), "unknown") for name, known in sorted(server.admitted.items())}
