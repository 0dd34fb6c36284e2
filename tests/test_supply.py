"""What the project is built from, and what its own code never does."""

from __future__ import annotations

import ast
import re

import pytest

from tests.conftest import ROOT

SOURCES = sorted((ROOT / "src").rglob("*.py"))


def pinned(path) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==([^\s\\]+)", path.read_text(), re.M)
    return {
        re.sub(r"[-_.]+", "-", name.lower()): version.partition("+")[0] for name, version in found
    }  # torch's +cpu


def test_the_lock_file_has_the_pinned_versions_with_hashes():
    assert pinned(ROOT / "requirements.lock") == pinned(ROOT / "constraints.txt")
    blocks = re.split(r"\n(?=\w)", (ROOT / "requirements.lock").read_text().partition("\n")[2])
    without = [block.split()[0] for block in blocks if "==" in block and "--hash=sha256:" not in block]
    assert not without


def test_every_pinned_package_has_its_licence_in_the_list():
    listed = re.findall(r"^\| ([\w.-]+) \| (\S+) \| (.+) \|$", (ROOT / "docs" / "licences.md").read_text(), re.M)
    versions = {re.sub(r"[-_.]+", "-", name.lower()): version for name, version, _ in listed if name != "package"}
    assert versions == pinned(ROOT / "constraints.txt")
    assert not [name for name, _, words in listed if words in ("not stated", "not installed here")]


def name_of(call: ast.Call) -> str:
    return ast.unparse(call.func)


def forbidden(tree: ast.AST) -> list[str]:
    """What nobody should find in the code: text that becomes code, pickles, shells."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [
                n
                for n in names
                if n.split(".")[0] in ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
            ]
        if not isinstance(node, ast.Call):
            continue
        name, options = name_of(node), {k.arg: ast.unparse(k.value) for k in node.keywords}
        if name in ("eval", "exec", "compile", "__import__", "os.system", "os.popen"):
            found.append(name)
        if name == "torch.load" and options.get("weights_only") != "True":
            found.append("torch.load without weights_only")
        if name in ("np.load", "numpy.load") and options.get("allow_pickle") != "False":
            found.append("np.load that may unpickle")
        if options.get("shell") == "True":
            found.append(f"{name} with a shell")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=[str(p.relative_to(ROOT / "src")) for p in SOURCES])
def test_no_text_becomes_code_and_nothing_foreign_is_unpickled(path):
    # what a process and the workers that it started say to each other, through sockets without a name, is from nobody else
    own = ["pickle", "cloudpickle"] if path.match("engine/shared.py") else []
    assert forbidden(ast.parse(path.read_text())) == own


def test_the_check_itself_finds_what_it_looks_for():
    bad = "import pickle\neval('1')\ntorch.load(p)\ntorch.load(p, weights_only=False)\nnp.load(p)\nrun('ls', shell=True)"
    assert len(forbidden(ast.parse(bad))) == 6
    good = "model.eval()\ntorch.load(p, weights_only=True)\nnp.load(p, allow_pickle=False)\nre.compile('x')"
    assert forbidden(ast.parse(good)) == []
