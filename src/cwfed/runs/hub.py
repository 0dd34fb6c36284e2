"""Runs and personal models on the Hugging Face hub, through its own client: one repository a run, the files as in the run's folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cwfed.core.errors import CwfedError, RunError, plain
from cwfed.runs.folder import RunFolder

_FILES = re.compile(
    r"config\.toml|manifest\.json|events\.jsonl|summary\.json|vocabulary\.json"
    r"|models/(validated/)?(index\.json|rounds\.json|client-\d{1,9}\.safetensors)",
    re.ASCII,
)
"""The files that are pushed and pulled: numbers, texts and safetensors, nothing that could be code."""


def push(run: str | Path, repo: str, *, models: bool = True, private: bool = True) -> str:
    """Put a finished run into a repository, which is created if it does not exist; returns its address."""
    folder = RunFolder(run)
    if not folder.finished:
        raise RunError(f"{folder.path} is not a finished run: there is nothing to push")
    summary = folder.summary()  # it must be whole
    names = [
        name for name in _below(folder.path) if _FILES.fullmatch(name) and (models or not name.startswith("models/"))
    ]
    card = _card(
        repo, summary.algorithm, summary.dataset, summary.reported.accuracy, any("models/" in n for n in names)
    )
    client = _client()
    with _said_plainly(repo):
        api = client.HfApi()
        api.create_repo(repo, private=private, exist_ok=True)
        parts = [client.CommitOperationAdd(name, str(folder.path / name)) for name in names]
        parts.append(client.CommitOperationAdd("README.md", card.encode()))
        done = api.create_commit(
            repo, parts, commit_message=f"{summary.algorithm} on {summary.dataset}, seed {summary.seed}"
        )
        return str(done.repo_url)


def pull(repo: str, out: str | Path, *, revision: str | None = None) -> Path:
    """Get the run in a repository as a folder; RunError if it is incomplete. None of it is executed or unpickled."""
    out = Path(out)
    if out.exists():
        raise RunError(f"{out} is there already: choose another --out")
    client = _client()
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=".pulled-") as scratch:
        with _said_plainly(repo):
            there = client.HfApi().list_repo_files(repo, revision=revision)
            names = [name for name in there if _FILES.fullmatch(name)]
            if "config.toml" in names:
                client.snapshot_download(repo, revision=revision, local_dir=scratch, allow_patterns=names)
        folder = Path(scratch) / "run"
        for name in names if "config.toml" in names else []:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(Path(scratch) / name, folder / name)
        if not RunFolder(folder).finished:
            raise RunError(f"{repo} holds no finished run of cwfed: cwfed hub push makes one")
        try:
            RunFolder(folder).summary()
            RunFolder(folder).facts()
        except CwfedError as error:
            raise RunError(str(error).replace(str(folder), repo)) from None
        folder.rename(out)
    return out


def _below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _card(repo: str, algorithm: str, dataset: str, accuracy: float, with_models: bool) -> str:
    """README.md of the repository."""
    how = """
```python
import cwfed

model = cwfed.load_model("run", client=0)
```
"""
    return f"""---
library_name: cwfed
tags: [federated-learning, personalised-federated-learning]
---

# {algorithm} on {dataset}

A run of cwfed: best test accuracy {accuracy:.2%} (its events, settings and checksums are here{", and every client's personal model" if with_models else ""}).

```sh
cwfed hub pull {repo} -o run
cwfed report run
```
{how if with_models else ""}"""


def _client() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise RunError('the Hugging Face hub needs its client: pip install "cwfed[hub]"') from None
    return huggingface_hub


@contextmanager
def _said_plainly(repo: str) -> Iterator[None]:
    """Turn any error of the hub's client into one sentence: an impossible name, no token, no rights, no network."""
    try:
        yield
    except CwfedError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        status = getattr(getattr(error, "response", None), "status_code", None)
        # a private repository is "not found" to a client without a token, too
        token = " (hf auth login gives the client a token)" if status in (401, 403, 404) else ""
        raise RunError(
            f"the Hugging Face hub, {plain(repo, 200)}: {lines[0] if lines else type(error).__name__}{token}"
        ) from None
