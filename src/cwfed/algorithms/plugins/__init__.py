"""Plug-ins that are not methods by themselves: each is added to one, as in "fedavg+prior" (`combine.py`)."""
