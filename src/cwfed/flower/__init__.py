"""The same algorithms in a real federation, on Flower (extra `flower`).

In your own Flower app it is two lines:

    app = cwfed.flower.server_app()               # server_app.py; or strategy = PersonalisedStrategy(plan)
    app = cwfed.flower.client_app(load_my_data)   # client_app.py

`cwfed flower new DIR` writes such a project. Flower's and Ray's usage reports are off unless you turn them on.
"""

import os
from importlib.util import find_spec

from cwfed.core.errors import CwfedError

for _name, _value in {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what Ray will do anyway, without its word about it
}.items():
    os.environ.setdefault(_name, _value)

if find_spec("flwr") is None:
    raise CwfedError('Flower is not installed: pip install "cwfed[flower]"')

from cwfed.flower.client import Site, client_app  # noqa: E402 (after the environment is set)
from cwfed.flower.plan import Plan  # noqa: E402
from cwfed.flower.server import server_app  # noqa: E402
from cwfed.flower.strategy import PersonalisedStrategy  # noqa: E402

__all__ = ["PersonalisedStrategy", "Plan", "Site", "client_app", "server_app"]
