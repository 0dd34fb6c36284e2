"""`cwfed flower deploy`: the folders of a real federation, one for its server and one for every node.

authority/      the secret keys: ca.key (certificates), app.key (signs the app). Keep them away from the server.
server/         server.toml, ca.crt, server.crt, server.key, app/, signatures/, nodes/ (public keys)
nodes/NAME/     node.toml, ca.crt, trusted.yaml (whose signatures of apps count). No secret: the node makes its own key.
compose.yaml    the same in containers, made with the Dockerfile beside it
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import tomli_w

import cwfed
from cwfed.core import files
from cwfed.core.errors import CwfedError
from cwfed.flower import keys
from cwfed.flower.project import bundle_of
from cwfed.flower.service import NodeSettings, Server, ServerSettings, check_name

CONTROL = 9093
"""The default port on the loopback on which the SuperLink listens."""

DOCKERFILE = f"""FROM python:3.11-slim
RUN pip install "cwfed[flower]=={cwfed.__version__}"
"""


def deploy(app: Path, out: Path, server: str, nodes: list[str], control: int = CONTROL) -> None:
    """Write the folders of a federation of these nodes, whose server they reach at HOST:PORT."""
    if not (app / "pyproject.toml").exists():
        raise CwfedError(f"{app} holds no Flower app: cwfed flower new writes one")
    if out.exists() and any(out.iterdir()):
        raise CwfedError(f"{out} is there already: choose a new folder")
    host, _, port = server.rpartition(":")
    try:
        settings = ServerSettings(
            public=f"0.0.0.0:{port}", control=control, hosts=list(dict.fromkeys([host.strip("[]"), *keys.LOOPBACK]))
        )
        about = {name: NodeSettings(name=check_name(name), server=server, about=_about()) for name in nodes}
    except ValueError:
        raise CwfedError(f"--server {server!r} must look like server.example:9443") from None
    authority, at_server = out / "authority", out / "server"
    for folder in (authority, at_server, at_server / "nodes", at_server / "signatures"):
        folder.mkdir(parents=True)
    authority.chmod(0o700)
    ca_key = keys.authority(at_server / "ca.crt")
    keys.write_private(authority / "ca.key", ca_key)
    keys.server_certificate(at_server, ca_key, settings.hosts)
    signer = keys.signing_key(authority / "app.key")
    (authority / "app.pub").write_text(f"{signer}\n", encoding="utf-8")
    shutil.copytree(app, at_server / "app", ignore=shutil.ignore_patterns("__pycache__"))
    _write_toml(at_server / "server.toml", settings.model_dump())
    for name, node in about.items():
        _write_node(out / "nodes" / name, node, at_server / "ca.crt", signer)
    (out / "compose.yaml").write_text(_compose(list(about)), encoding="utf-8")
    (out / "Dockerfile").write_text(DOCKERFILE, encoding="utf-8")
    sign(out)


def sign(out: Path) -> str:
    """Sign the app as it is now, with the authority's key; the hash of what nodes will run."""
    key, bundle = out / "authority" / "app.key", bundle_of(out / "server" / "app")
    digest = hashlib.sha256(bundle).hexdigest()
    signer = (key.with_name("app.pub")).read_text(encoding="utf-8").strip()
    signed = {_id(signer): keys.sign(bundle, key)}
    files.write_whole(out / "server" / "signatures" / f"{digest}.json", json.dumps(signed))
    return digest


def certify(out: Path) -> None:
    """A new key and certificate for the server, from the same authority: nodes need nothing new."""
    settings = Server(out / "server").settings
    keys.server_certificate(out / "server", keys.read_private(out / "authority" / "ca.key"), settings.hosts)


def _about() -> dict[str, str | int | bool]:
    return {"path": "data", "data": "arrays", "state": "state", "histogram": False}


def _id(signer: str) -> str:
    return f"fpk_{hashlib.sha256(signer.encode()).hexdigest()[:32]}"


def _write_node(folder: Path, settings: NodeSettings, authority: Path, signer: str) -> None:
    folder.mkdir(parents=True)
    shutil.copy(authority, folder / "ca.crt")
    _write_toml(folder / "node.toml", settings.model_dump())
    # JSON is YAML, and needs no library
    (folder / "trusted.yaml").write_text(json.dumps({_id(signer): signer}) + "\n", encoding="utf-8")


def _write_toml(path: Path, table: dict[str, object]) -> None:
    path.write_text(tomli_w.dumps(table), encoding="utf-8")


def _compose(nodes: list[str]) -> str:
    """The services as containers, for one machine or to be distributed; JSON, which is YAML."""

    def service(command: str, folder: str) -> dict[str, object]:
        return {
            "build": ".",
            "command": ["cwfed", "flower", command, "/federation"],
            "volumes": [f"./{folder}:/federation"],
            "network_mode": "host",
            "restart": "always",
        }

    services = {"server": service("serve", "server")}
    services |= {f"node-{name}": service("join", f"nodes/{name}") for name in nodes}
    return json.dumps({"services": services}, indent=2) + "\n"
