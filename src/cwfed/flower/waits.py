"""How long Flower waits before it asks again for a part of a message that is not there yet.

A message is announced before its numbers have arrived. Flower (1.41) asks for those, waits a second, then two, then four: what comes after 1.1 s is
taken after 3, what comes after 3.1 s after 7, and nobody can set that. In the processes that are ours, those of messages and the server's, it asks sooner.
"""

from __future__ import annotations

from flwr.supercore.inflatable import inflatable_utils

FIRST, LONGEST = 0.1, 1.0
"""Seconds: the first wait, and the longest of those that double."""
TRIES = 7200
"""For as long as Flower tries."""


def ask_sooner() -> None:
    """From now on, in this process and those that are forked from it."""
    for function in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        sooner = {"initial_backoff": FIRST, "backoff_cap": LONGEST, "max_tries_per_object": TRIES}
        function.__kwdefaults__ = (function.__kwdefaults__ or {}) | sooner
