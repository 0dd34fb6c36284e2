"""Imported once by the process that all others are forked from."""

import importlib
import pkgutil

import cwfed

for module in pkgutil.walk_packages(cwfed.__path__, "cwfed."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
