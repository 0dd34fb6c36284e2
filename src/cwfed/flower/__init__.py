"""The same algorithms in a real federation, on Flower (extra `flower`).

In your own Flower app it is two lines:

    app = cwfed.flower.server_app()               # server_app.py; or strategy = PersonalisedStrategy(plan)
    app = cwfed.flower.client_app(load_my_data)   # client_app.py

`cwfed flower new DIR` writes such a project. Flower's and Ray's usage reports are off unless you turn them on.
"""

import os
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from cwfed.core.errors import CwfedError

for _name, _value in {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what Ray will do anyway; this avoids its warning
}.items():
    os.environ.setdefault(_name, _value)

if find_spec("flwr") is None:
    raise CwfedError('Flower is not installed: pip install "cwfed[flower]"')

if TYPE_CHECKING:
    from cwfed.flower.client import client_app
    from cwfed.flower.plan import Plan
    from cwfed.flower.server import server_app
    from cwfed.flower.site import Site
    from cwfed.flower.strategy import PersonalisedStrategy
else:
    _PLACES = {
        "PersonalisedStrategy": "strategy",
        "Plan": "plan",
        "Site": "site",
        "client_app": "client",
        "server_app": "server",
    }

    def __getattr__(name: str) -> Any:
        """Import on first use: a node does not need the server's code, nor the gate torch."""
        if name not in _PLACES:
            raise AttributeError(f"module 'cwfed.flower' has no attribute {name!r}")
        return getattr(import_module(f"cwfed.flower.{_PLACES[name]}"), name)


__all__ = ["PersonalisedStrategy", "Plan", "Site", "client_app", "server_app"]
