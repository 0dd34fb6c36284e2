"""The user's own code by name: "module:function", found in the working directory or the installed packages.

Objects that are given in Python get such a name too, within this process (`give`).
"""

from __future__ import annotations

import ast
import importlib
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from cwfed.core.errors import ConfigError, did_you_mean
from cwfed.core.files import sha256

_seen: dict[Path, tuple[ModuleSpec | None, str]] = {}
"""The hash of each source file when its module was imported, which is the code that runs, even if the file has changed since."""


_given: dict[str, Any] = {}
"""The objects given in this process, by name; a class that is defined again replaces the earlier one."""


GIVEN = "given"
"""The module in the names of objects that are neither functions nor classes, and so cannot be imported."""


def give(thing: Any, called: str = "") -> str:
    """Remember an object; returns the name by which a config refers to it: that of the function or class, or `called`."""
    name = f"{GIVEN}:{called}" if called else f"{thing.__module__}:{thing.__qualname__}"
    _given[name] = thing
    return name


def load_object(name: str, what: str) -> Any:
    """The object called "module:attribute"; `what` names its role in the error."""
    if name in _given:
        return _given[name]
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise ConfigError(f'{what} {name!r} must look like "module:name"')
    if module_name == GIVEN or "<locals>" in attribute:
        raise ConfigError(f"{what} {name!r} was given in Python: give it again, as cwfed.run({what}=...)")
    _look_here()
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # it is the user's code, or a script: whatever stops it is the answer
        lacking = error.name if isinstance(error, ModuleNotFoundError) else None
        if lacking and f"{module_name}.".startswith(f"{lacking}."):
            raise ConfigError(
                f"{what} {name!r}: there is no module {lacking!r}, neither here nor installed"
            ) from None
        raise ConfigError(f"{what} {name!r}: the module {module_name!r} cannot be imported ({why(error)})") from None
    if not hasattr(module, attribute):
        near = did_you_mean(attribute, [n for n in vars(module) if not n.startswith("_")])
        raise ConfigError(f"{what} {name!r}: {module_name} has no {attribute!r}; {near}")
    sources([name])  # hashed now, just after it was imported
    return getattr(module, attribute)


def why(error: BaseException) -> str:
    """What stopped the user's code, and where in it: one line instead of a traceback."""
    message = " ".join(str(error).split())
    return ", ".join(
        filter(None, [f"{type(error).__name__}{': ' * bool(message)}{message}", place_in_own_code(error)])
    )


def place_in_own_code(error: BaseException) -> str:
    """The last line of the user's code in an error's traceback; "" if there is none."""
    steps = traceback.extract_tb(error.__traceback__)
    own = [step for step in steps if not _is_installed(Path(step.filename).resolve())]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else ""


def sources(names: Iterable[str]) -> dict[str, str]:
    """Hashes of the user's source files behind these names ("module:attribute"), by relative path.

    They are the file of each module, and the files that it imports, directly or indirectly, from the same folder or folders below it.
    Installed packages are left out, because their versions identify them. Nothing is imported.
    """
    _look_here()
    found: dict[str, str] = {}
    for module in dict.fromkeys(name.partition(":")[0] for name in names):
        path = _file(module)
        if path is None or _is_installed(path):
            continue
        root = path.parents[module.count(".") + (path.name == "__init__.py")]
        waiting, known, elsewhere = [module], {module}, set()
        while waiting:
            name = waiting.pop(0)
            if name.partition(".")[0] in elsewhere:
                continue
            path = _file(name)
            if path is None:
                continue
            if not path.is_relative_to(root) or _is_installed(path):
                elsewhere.add(name)  # so are its submodules: packages come before their modules
                continue
            found[path.relative_to(root).as_posix()] = _hash(name, path)
            new = {wanted for wanted in _imports(name, path) if wanted not in known}
            known |= new
            waiting += sorted(new)
    return dict(sorted(found.items()))


def _look_here() -> None:
    if os.getcwd() not in sys.path:  # a console script does not have the working directory in its path
        sys.path.insert(0, os.getcwd())


def _file(module: str) -> Path | None:
    """The source file of a module, found as an import would find it but without importing anything."""
    loaded = getattr(sys.modules.get(module), "__file__", None)
    if loaded:
        return Path(loaded).resolve() if loaded.endswith(".py") else None
    spec = _spec(module)
    origin = spec.origin if spec else None
    return Path(origin).resolve() if origin and origin.endswith(".py") else None


def _spec(module: str) -> ModuleSpec | None:
    package = module.rpartition(".")[0]
    if not package:
        return None if module in sys.builtin_module_names else PathFinder.find_spec(module)
    places = _places_in(package)
    return None if places is None else PathFinder.find_spec(module, places)


def _places_in(package: str) -> Sequence[str] | None:
    """The folders of a package's modules; None for a plain module and for one that does not exist."""
    if loaded := sys.modules.get(package):
        return getattr(loaded, "__path__", None)
    spec = _spec(package)
    return spec.submodule_search_locations if spec else None


def _is_installed(path: Path) -> bool:
    """Whether a file belongs to Python, to an installed package, or to cwfed itself."""
    return any(path.is_relative_to(place) for place in _installed())


@cache
def _installed() -> list[Path]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    places = [*map(sysconfig.get_path, names), *site.getsitepackages(), site.getusersitepackages()]
    return [*dict.fromkeys(Path(place).resolve() for place in places), Path(__file__).resolve().parents[1]]


def _hash(module: str, path: Path) -> str:
    spec = getattr(sys.modules.get(module), "__spec__", None)  # another object if the module was imported again
    if path not in _seen or _seen[path][0] is not spec:
        _seen[path] = spec, sha256(path.read_bytes())
    return _seen[path][1]


def _imports(module: str, path: Path) -> tuple[str, ...]:
    """The modules that a source file may import, by their full names, with the packages they are in."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return _imported(module, package, path.read_bytes())


@lru_cache(maxsize=1000)  # nodes and workers load the same objects repeatedly
def _imported(module: str, package: str, source: bytes) -> tuple[str, ...]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ()
    names = [module]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join(filter(None, [*above, node.module or ""]))
            names += [base, *(f"{base}.{alias.name}" if base else alias.name for alias in node.names)]
    return tuple(dict.fromkeys(package for name in names for package in _with_packages(name)))


def _with_packages(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[:depth]) for depth in range(1, len(parts) + 1) if parts[0])
