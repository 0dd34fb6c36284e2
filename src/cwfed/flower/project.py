"""`cwfed flower new`: writes a Flower app that is ready for `flwr run`."""

from __future__ import annotations

import re
import tomllib
import warnings
from pathlib import Path
from typing import Any

import tomli_w

from cwfed.core.errors import CwfedError, RunError
from cwfed.federation.config import Config
from cwfed.federation.settings import flat
from cwfed.flower.plan import Plan

SERVER = '''"""The server: any algorithm of cwfed, as [tool.flwr.app.config] in pyproject.toml says."""

from cwfed.flower import server_app

app = server_app()
'''

CLIENT = '''"""The clients: the same plan, on the data of their node.

A node says in its --node-config who it is and where its data are: name="clinic-3" path="/data/clinic-3".
Without that (in a simulation) the data set of the plan is dealt out, and a node takes the share of its partition.
For data of another kind, say how they are loaded:

    def load(context):
        dataset = cwfed.Dataset("scans", inputs, labels, class_names)  # numpy: N x H x W x C bytes, N whole numbers
        return Site(name=context.node_config["name"], data=dataset, state=Path("/var/lib/cwfed"))

    app = client_app(load)
"""

from cwfed.flower import client_app

app = client_app()
'''

README = """# {name}

A federation of cwfed on Flower. The settings are in `pyproject.toml` under `[tool.flwr.app.config]`; the two apps are in `{package}/`.

```sh
pip install "cwfed[flower]"
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1   # use this environment
flwr run . --stream                                     # a simulation on this machine, with two clients
flwr run . --stream --federation-config "num-supernodes=10" -c "federation.nodes=10 train.rounds=20"
```

A real federation: `cwfed flower deploy . --out ../federation --server HOST:PORT --node NAME ...` writes the folders of its server and its nodes; the guide
is docs/flower.md of cwfed. Never let a plain `flower-superlink` be reached by others: who reaches it runs code on the server and on every node.
The server's run folder is `federation.out`.
"""


MOST_SAMPLES = 10_000
"""The default of the training samples that a client may claim."""


def with_most_samples(config: Config, most: int = MOST_SAMPLES) -> Config:
    """The config with a limit on the training samples that a client may claim, unless it sets one itself."""
    if "most_samples" in config.guard.model_fields_set:
        return config
    return config.model_copy(update={"guard": config.guard.model_copy(update={"most_samples": most})})


def write_project(folder: Path, plan: Plan, name: str = "") -> None:
    """Write the files of an app for this plan; existing files are never overwritten."""
    name = name or folder.resolve().name
    package = re.sub(r"\W+", "_", name.lower()).strip("_")
    if not re.fullmatch(r"[a-z_][a-z0-9_]*", package):
        raise CwfedError(
            f"{name!r} cannot be the name of a Python package: choose a folder that begins with a letter"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CwfedError(f"{folder} is there already: choose a new folder")
    files = {
        "pyproject.toml": tomli_w.dumps(_pyproject(name, package, plan)),
        "README.md": README.format(name=name, package=package),
        f"{package}/__init__.py": '"""A federation of cwfed."""\n',
        f"{package}/server_app.py": SERVER,
        f"{package}/client_app.py": CLIENT,
    }
    try:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CwfedError(f"{folder} cannot be written: {error.strerror}") from None


def read_plan(folder: Path) -> Plan:
    """The plan in the settings of an app."""
    try:
        table = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        return Plan.of(flat(table["tool"]["flwr"]["app"]["config"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder.parent} holds no federation of cwfed, or a damaged one ({error})") from None


def bundle_of(folder: Path) -> bytes:
    """The app as Flower sends it to nodes; the same files always give the same bytes."""
    from flwr.cli.build import build_fab_from_disk

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Flower's own
            return build_fab_from_disk(folder)
    except (OSError, ValueError) as error:
        raise CwfedError(f"{folder} is not a Flower app that can be built: {error}") from None


def _pyproject(name: str, package: str, plan: Plan) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in plan.table().items():
        *sections, last = key.split(".")
        at = nested
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = value
    return {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-"),
            "version": "1.0.0",
            "description": "A federation of cwfed on Flower",
            "license": "Apache-2.0",
            "dependencies": ["cwfed[flower]"],
        },
        "tool": {
            "hatch": {"build": {"targets": {"wheel": {"packages": [package]}}}},
            "flwr": {
                "app": {
                    "publisher": "cwfed",
                    "components": {
                        "serverapp": f"{package}.server_app:app",
                        "clientapp": f"{package}.client_app:app",
                    },
                    "config": nested,
                }
            },
        },
    }
