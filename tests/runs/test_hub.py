"""The hub, through its own client, against a stand-in on this machine that speaks the hub's protocol for files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest

import cwfed
from cwfed.cli import share
from cwfed.core.errors import RunError
from cwfed.runs import session
from tests.conftest import small

huggingface_hub = pytest.importorskip("huggingface_hub")
SHA = "0123456789abcdef0123456789abcdef01234567"


class StandIn(BaseHTTPRequestHandler):
    """Repositories in memory: made, committed to, listed and read as on the hub."""

    repos: dict[str, dict[str, bytes]]
    private: dict[str, object]

    def _answer(self, content: object, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.repos.setdefault(name, {})
            self.private[name] = asked
            return self._answer({"url": f"{self.server.address}/{name}"})
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        name, verb = re.fullmatch(r"/api/models/([\w-]+/[\w-]+)/(preupload|commit)/main", self.path).groups()
        if verb == "preupload":
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return self._answer({"files": files})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.repos[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self._answer({"commitUrl": f"{self.server.address}/{name}/commit/{SHA}", "commitOid": SHA})

    def do_GET(self):
        path = unquote(self.path.partition("?")[0])
        if found := re.fullmatch(r"/api/models/([\w-]+/[\w-]+)(/revision/main)?", path):
            if found[1] not in self.repos:
                return self._answer({"error": "no such repository"}, 404, X_Error_Code="RepoNotFound")
            files = [{"rfilename": name} for name in self.repos[found[1]]]
            return self._answer({"id": found[1], "sha": SHA, "siblings": files})
        if found := re.fullmatch(r"/api/models/([\w-]+/[\w-]+)/tree/\w+", path):
            if found[1] not in self.repos:
                return self._answer({"error": "no such repository"}, 404, X_Error_Code="RepoNotFound")
            files = self.repos[found[1]].items()
            return self._answer(
                [{"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()} for n, c in files]
            )
        name, file = re.fullmatch(r"/([\w-]+/[\w-]+)/resolve/\w+/(.+)", path).groups()
        content = self.repos.get(name, {}).get(file)
        if content is None:
            return self._answer({"error": "no such file"}, 404, X_Error_Code="EntryNotFound")
        return self._answer(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=SHA)

    do_HEAD = do_GET  # noqa: N815 (its name is given)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    handler = type("Handler", (StandIn,), {"repos": {}, "private": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    real = huggingface_hub.HfApi
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: real(endpoint=server.address, token="hf_stand_in"))
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda *a, **k: real(endpoint=server.address, token="hf_stand_in").snapshot_download(*a, **k),
    )
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # the stand-in is on this machine: an environment that keeps the hub's client offline is not meant here
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield handler
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "run"
    session.run(small("data.samples=400", "train.rounds=2", "data.validation=0.2"), folder)
    return folder


def test_a_run_with_its_models_comes_back_as_it_was(stand_in, run, tmp_path, capsys):
    share.push(run, "me/first")
    assert set(stand_in.repos["me/first"]) >= {"config.toml", "summary.json", "models/index.json", "README.md"}
    assert not any("checkpoint" in name or name == ".lock" for name in stand_in.repos["me/first"])
    assert "private" in json.dumps(stand_in.private["me/first"])  # unless somebody says --public
    share.pull("me/first", tmp_path / "mine")
    for path in (p for p in (tmp_path / "mine").rglob("*") if p.is_file()):
        assert path.read_bytes() == (run / path.relative_to(tmp_path / "mine")).read_bytes()
    ours, theirs = (cwfed.load_model(where, client=3) for where in (run, tmp_path / "mine"))
    images = cwfed.load_data("digits").inputs[:20]
    assert (ours.predict(images) == theirs.predict(images)).all()
    share.push(run, "me/numbers", models=False)
    assert not any(name.startswith("models/") for name in stand_in.repos["me/numbers"])


def test_what_is_strange_in_a_repository_is_left_there(stand_in, run, tmp_path, capsys):
    share.push(run, "me/first", models=False)
    stand_in.repos["me/first"] |= {"models/evil.pkl": b"x", "code.py": b"x", "models/client-1.safetensors.py": b"x"}
    share.pull("me/first", tmp_path / "mine")
    found = {p.name for p in (tmp_path / "mine").rglob("*") if p.is_file()}
    assert found == {"config.toml", "manifest.json", "events.jsonl", "summary.json"}


def test_a_damaged_run_is_not_taken(stand_in, run, tmp_path, capsys):
    share.push(run, "me/first", models=False)
    files = stand_in.repos["me/first"]
    files["summary.json"] = files["summary.json"].replace(b'"accuracy"', b'"akkuracy"', 1)
    with pytest.raises(RunError, match=r"me/first.*damaged"):
        share.pull("me/first", tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []  # nothing is left


def test_what_the_hub_refuses_is_one_sentence(stand_in, run, tmp_path, monkeypatch):
    with pytest.raises(RunError, match=r"the Hugging Face hub, me/none: .*hf auth login"):
        share.pull("me/none", tmp_path / "mine")
    stand_in.repos["me/other"] = {"README.md": b"x"}
    with pytest.raises(RunError, match="holds no finished run"):
        share.pull("me/other", tmp_path / "mine")
    with pytest.raises(RunError, match="the Hugging Face hub, a/b/c") as refused:
        share.push(run, "a/b/c")
    assert "token" not in str(refused.value)  # it would not help: the name is none
    (tmp_path / "there").mkdir()
    with pytest.raises(RunError, match="there already"):
        share.pull("me/other", tmp_path / "there")
    with pytest.raises(RunError, match="nothing to push"):
        share.push(tmp_path / "there", "me/first")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RunError, match=r'pip install "cwfed\[hub\]"'):
        share.push(run, "me/first")
