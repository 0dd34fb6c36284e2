"""Plug-ins that are no method by themselves: each stands over one, as in "fedavg+prior" (`combine.py`)."""
