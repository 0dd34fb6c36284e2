"""A new algorithm is one file in the folder: nothing else needs to know its name."""

from __future__ import annotations

import pkgutil
import sys
import textwrap

import cwfed.algorithms
from cwfed.algorithms import ALGORITHMS, PLUGINS, FedAvg
from tests import processes

NEW = '''
    """One more. Somebody, 2027."""
    from dataclasses import dataclass
    from typing import ClassVar
    from cwfed.algorithms.fedavg import FedAvg

    @dataclass(frozen=True)
    class OneMore(FedAvg):
        """A method."""
        name: ClassVar[str] = "one-more"
'''


def test_every_file_is_registered():
    helpers = {"base", "combine", "own_models", "plugins", "twin"}
    files = {info.name for info in pkgutil.iter_modules(cwfed.algorithms.__path__)} - helpers
    assert {cls.__module__.rpartition(".")[2] for cls in ALGORITHMS.values()} == files
    assert ALGORITHMS["fedavg"] is FedAvg
    assert all(cls.name == name for name, cls in ALGORITHMS.items())
    plugins = {info.name for info in pkgutil.iter_modules(cwfed.algorithms.plugins.__path__)}
    assert {cls.__module__.rpartition(".")[2] for cls in PLUGINS.values()} == plugins | {
        "fedala",
        "fedbn",
        "feddbe",
        "fedprox",
    }
    assert all(cls.plugin == name for name, cls in PLUGINS.items())


COMMANDS = (
    ["algorithms"],
    ["cost", "--model", "mlp", "--shape", "8"],
    ["run", "--json", "--set", "algorithm.name=one-more", "--set", "train.rounds=1", "--set", "data.samples=400"],
)


def test_a_file_in_the_folder_is_all_that_a_new_algorithm_needs(tmp_path):
    """The folder is extended by one file, in a process of its own; the command line then knows the method."""
    (tmp_path / "one_more.py").write_text(textwrap.dedent(NEW))
    script = f"""
        import sys, importlib.util
        spec = importlib.util.find_spec("cwfed.algorithms")
        # one more folder to look for modules in, as if the file lay beside the others
        path = [*spec.submodule_search_locations, {str(tmp_path)!r}]
        module = importlib.util.module_from_spec(spec)
        module.__path__ = path
        sys.modules["cwfed.algorithms"] = module
        spec.loader.exec_module(module)
        from cwfed.cli import main
        for command in ({COMMANDS!r}):
            sys.argv = ["cwfed", *command]
            print("begin")
            try:
                main()
            except SystemExit as end:
                assert not end.code, command
    """
    done = processes.run([sys.executable, "-c", textwrap.dedent(script)], check=True, cwd=tmp_path)
    said = done.stdout.split("begin")[1:]
    assert ["one-more" in words for words in said] == [True] * len(COMMANDS)
